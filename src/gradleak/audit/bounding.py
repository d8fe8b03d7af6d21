"""What no attack could do on the setting of an audit: computed on the client's side, where the
secrets are, from the very updates that attacks were given."""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from gradleak.audit.bound_records import (
    record_chains,
    record_counts,
    record_exposure,
    record_guarantees,
    record_oracle,
    remark_on_counts,
    remark_on_exposure,
    remark_on_noise,
)
from gradleak.audit.client import compute, look, private_batches, protect, stream_of
from gradleak.audit.ready import Opened, open_prior, open_target
from gradleak.audit.spec import AuditSpec
from gradleak.bounds.ceiling import walk_chain
from gradleak.bounds.exposure import Exposure, expose, list_forms
from gradleak.bounds.fitting import count_fitting, read_deterministic
from gradleak.bounds.information import largest_shift, most_bits
from gradleak.bounds.oracle import (
    Score,
    SentenceLists,
    SentenceOdds,
    decide_all,
    free_places,
    list_sentences,
)
from gradleak.core.attack import Display, Progress, Silent
from gradleak.core.batch import Example, PrivateBatch
from gradleak.core.defense import Channel, protect_in_turn
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation, Round
from gradleak.core.prior import prior_of_texts
from gradleak.core.specs import to_string
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.matching.noisy_channel import Likelihood, NoisyChannel, read_channel
from gradleak.records.schema import BoundRecord, BoundsRecord
from gradleak.records.statistics import Interval, interval

WORDS = 150  # on each list, the true one among them
INFORMATION = "Whatever the prior and the attacker: a theorem about clipping and Gaussian noise."
MEASURED = (
    "As the bound by the clip, with the size that the clipped gradients of these secrets have in"
    " what is seen, or their distance from their mean: an estimate for secrets like these, whatever"
    " the attacker."
)


@dataclass(frozen=True)
class Setting:
    """One audit, opened, and what its defenses do."""

    spec: AuditSpec
    opened: Opened
    private: Sequence[PrivateBatch]  # once for each draw
    channel: NoisyChannel
    words: int | None
    rounds: int
    learning_rate: float  # of the server, between two rounds
    kept: "ListCache"

    @property
    def target(self) -> Target:
        return self.opened.target

    def list_sentences(self, private: PrivateBatch, example: int) -> SentenceLists:
        """Returns the oracle's lists for one example: they depend on neither noise nor view."""
        assert private.batch.ids is not None
        spec, length = self.spec, private.lengths[example]
        key = (
            *(to_string(spec.target), to_string(spec.prior), spec.dtype, self.words, length),
            *private.batch.ids[example].tolist(),
        )
        if key not in self.kept:
            prior = prior_of_texts(self.opened.prior)
            vocabulary = self.target.vocabulary
            found = list_sentences(private.batch, example, length, vocabulary, prior, self.words)
            if self.words is None:  # too large to keep
                return found
            self.kept[key] = found
        return self.kept[key]


# Of settings that differ in noise, view or defense, by target, prior and sentence
ListCache = dict[tuple[object, ...], SentenceLists]


def bound_setting(
    spec: AuditSpec,
    *,
    examples: Sequence[Example] | None = None,
    words: int | None = WORDS,
    rounds: int = 1,
    device: str = "cpu",
    secrets: bool = False,
    sweeps: int = 0,
    learning_rate: float = 0.0,
    display: Display | None = None,
    kept: ListCache | None = None,
) -> BoundsRecord:
    """Returns what no attack could do on an audit's own updates.

    `words` are on each of the oracle's lists, none for the whole vocabulary. Of several `rounds`
    of the same batch all are seen; between two of them the server moves its model against the
    update by `learning_rate`, or not at all. With `secrets`, marked ones that have a form (digits,
    a day, a made-up name) are held against all others of that form. With `sweeps`, chains that
    start at the truth bound searches that are not told the other words. Lists of words are `kept`
    for settings that are bounded after this one.

    Where one defense adds no noise, the words that fit what arrived are counted instead.
    """
    began, display = time.monotonic(), display or Silent()
    _refuse_impossible(spec, words, rounds, sweeps, learning_rate)
    counted = read_deterministic(spec.defenses, spec.protocol, spec.batch_size)
    channel = (
        NoisyChannel(0.0)
        if counted is not None
        else read_channel(spec.defenses, spec.protocol, spec.batch_size, rounds)
    )
    target = open_target(spec, device)
    private = private_batches(spec, target, examples) * spec.draws
    opened = open_prior(spec, target)
    cache = {} if kept is None else kept
    setting = Setting(spec, opened, private, channel, words, rounds, learning_rate, cache)
    if counted is not None:
        counts = list(_count_words(setting, counted, display))
        return _record(setting, began, [record_counts(counts)], remark_on_counts(counts))
    return _bound_by_likelihood(setting, began, display, secrets, sweeps)


def _refuse_impossible(
    spec: AuditSpec, words: int | None, rounds: int, sweeps: int, learning_rate: float
) -> None:
    if spec.target.medium != "text":
        raise GradleakError("Bounds are computed for texts, and this audit is of pictures.")
    if rounds < 1 or (words is not None and words < 2):
        raise GradleakError(
            f"Bounds need rounds from 1 and at least 2 words; they are {rounds} and {words}."
        )
    if sweeps and words is not None:
        raise GradleakError("The chains of a ceiling go over the whole vocabulary: use words all.")
    if learning_rate and rounds == 1:
        raise GradleakError("A model moves between rounds, and there is one: ask for more rounds.")


def _bound_by_likelihood(
    setting: Setting, began: float, display: Display, secrets: bool, sweeps: int
) -> BoundsRecord:
    spec, private = setting.spec, setting.private
    progress = Progress()
    odds: list[tuple[int, SentenceOdds]] = []
    exposed: list[tuple[int, Exposure]] = []
    walked: list[tuple[int, float]] = []  # words that a chain still has
    with display.watch(f"bounds on {len(private)} batches", progress):
        for index, one in enumerate(private):
            scores, batch = _score_by_likelihood(setting, one, index), index % spec.limit
            odds += [(batch, each) for each in _ask(setting, one, scores)]
            if secrets:
                exposed += [(batch, each) for each in _expose(setting, one, scores)]
            if sweeps:
                walked += [(batch, each) for each in _walk(setting, one, scores, index, sweeps)]
            progress.report(index + 1, len(private))
    prior, shift = to_string(spec.prior), _find_shift(setting)
    runs = [each.sampling() for each in spec.defenses]
    run = next((one for one in runs if one is not None), None)
    found = [
        *record_oracle(odds, prior),
        *record_chains(walked, prior),
        *record_exposure(exposed),
        *_bound_by_noise(setting),
        *([] if shift is None else record_guarantees(odds, shift, run, _name_protected(setting))),
    ]
    remarks = remark_on_noise(odds, setting.words, setting.channel.clip is not None, run)
    if secrets:
        remarks += remark_on_exposure(exposed)
    return _record(setting, began, found, remarks)


def _record(
    setting: Setting, began: float, found: Sequence[BoundRecord], remarks: tuple[str, ...]
) -> BoundsRecord:
    return BoundsRecord(
        to_string(setting.spec.prior),
        setting.words,
        setting.rounds,
        tuple(found),
        time.monotonic() - began,
        remarks,
        setting.learning_rate,
    )


def _count_words(
    setting: Setting, channel: Channel, display: Display
) -> Iterator[tuple[int, int, int]]:
    """Yields of each place its batch, how many words of its list fit what arrived, and how many
    were tried."""
    progress = Progress()
    with display.watch(f"words that fit on {len(setting.private)} batches", progress):
        for index, private in enumerate(setting.private):
            seen = _see_rounds(setting, private, index)
            for example in range(len(private.lengths)):
                lists = setting.list_sentences(private, example)
                sizes = [len(one.words) for one in lists.words]
                for ids in torch.split(lists.ids, sizes):
                    fitting = count_fitting(seen, private.batch, example, ids, channel)
                    yield index % setting.spec.limit, fitting, len(ids)
            progress.report(index + 1, len(setting.private))


def _ask(
    setting: Setting, private: PrivateBatch, scores: Sequence[Score]
) -> Iterator[SentenceOdds]:
    for example, score in enumerate(scores):
        lists = setting.list_sentences(private, example)
        yield decide_all(lists, score(lists.ids))


def _walk(
    setting: Setting, private: PrivateBatch, scores: Sequence[Score], index: int, sweeps: int
) -> list[float]:
    """Returns the share of words that a chain has left after its sweeps, of each example."""
    assert private.batch.ids is not None
    vocabulary, found = setting.target.vocabulary, []
    streams = Streams.root("ceiling", setting.spec.seed).child("batch", index)
    for place, length in enumerate(private.lengths):
        row = private.batch.ids[place]
        found.append(
            walk_chain(
                row,
                length,
                free_places(vocabulary, row.tolist(), length),
                vocabulary,
                prior_of_texts(setting.opened.prior),
                scores[place],
                sweeps,
                streams.child("example", place).generator(),
            )[-1]
        )
    return found


def _expose(setting: Setting, private: PrivateBatch, scores: Sequence[Score]) -> list[Exposure]:
    found = []
    for place, example in enumerate(private.examples):
        for span, form in list_forms(example):
            exposure = expose(
                setting.target,
                example,
                private.batch,
                place,
                private.lengths[place],
                span,
                form,
                scores[place],
            )
            found += [] if exposure is None else [exposure]
    return found


def _score_by_likelihood(setting: Setting, private: PrivateBatch, index: int) -> list[Score]:
    """Returns, for each example of a batch, how likely all that is seen is for candidates."""
    examples = range(len(private.lengths))
    if not setting.learning_rate:
        seen = _see_rounds(setting, private, index)

        # One at a time: each holds the sum of all the others' gradients
        @lru_cache(maxsize=1)
        def prepare(example: int) -> Likelihood:
            return Likelihood(seen, private.batch, example, setting.channel)

        return [partial(lambda one, ids: prepare(one)(ids), one) for one in examples]
    noise = setting.channel.noise_std * math.sqrt(setting.rounds)
    channel = replace(setting.channel, noise_std=noise)  # of one round

    def score(example: int, ids: Tensor) -> Tensor:
        # Noise is drawn anew in each round, so that log-likelihoods add. The model goes the same
        # way each time that it is asked.
        rounds = _see_moving_model(setting, private, index)
        found = [Likelihood(seen, private.batch, example, channel)(ids) for seen in rounds]
        return torch.stack(found).sum(0)

    return [partial(score, one) for one in examples]


def _see_moving_model(setting: Setting, private: PrivateBatch, index: int) -> Iterator[Observation]:
    """Yields what is seen in each round of a model that the server moves against each update; a
    client draws its noise anew in each."""
    spec, target = setting.spec, copy.deepcopy(setting.target)
    for number in range(setting.rounds):
        streams = stream_of(spec, index)
        rngs = [streams if number == 0 else streams.child("round", number)]
        each = bool(spec.defenses) and spec.defenses[0].wants_per_example
        computed = spec.protocol.update(target, private.batch[None], per_example=each, rngs=rngs)
        sent = protect_in_turn(spec.defenses, computed, rngs)
        yield look(spec, target, private, sent, index)
        with torch.no_grad():
            for name, tensor in sent.tensors.items():
                target.parameters[name].sub_(setting.learning_rate * tensor[0])


def _see_rounds(setting: Setting, private: PrivateBatch, index: int) -> Observation:
    """Returns the observation that attacks get, or the mean of as many: the same update with its
    noise divided by √rounds."""
    spec = setting.spec
    computed = compute(spec, setting.target, private, index)
    seen = look(spec, setting.target, private, protect(spec, computed, index), index)
    if setting.rounds == 1 or not setting.channel.noise_std:
        return seen
    quiet = show_quiet(spec, setting.target, computed, index).tensors
    mean = {
        name: quiet[name] + (tensor - quiet[name]) / math.sqrt(setting.rounds)
        for name, tensor in seen.update.tensors.items()
    }
    return replace(seen, rounds=(Round(setting.target, Update(mean)),))


def show_quiet(spec: AuditSpec, target: Target, computed: Update, index: int) -> Update:
    """Returns what would be seen if the defenses added no noise."""
    defenses = [defense.without_noise() for defense in spec.defenses]
    return spec.view.show(target, protect_in_turn(defenses, computed, [stream_of(spec, index)]))


def _bound_by_noise(setting: Setting) -> list[BoundRecord]:
    """Returns the information that updates carry: by the clip for certain, by what was sent as an
    estimate."""
    shift, protects = _find_shift(setting), _name_protected(setting)
    made = []
    if shift is not None:
        made.append(
            BoundRecord(
                *("information", "bits", most_bits(shift), None, None, 0.0, "bits", "theorem"),
                *(len(setting.private), INFORMATION, protects),
            )
        )
    # Of a model that moves only the first gradients are here
    found = None if setting.learning_rate else measure_information(setting)
    if found is not None:
        made.append(
            BoundRecord(
                *("information measured", "bits", found.mean, found.low, found.high, 0.0, "bits"),
                *("estimate", found.n, MEASURED, protects),
            )
        )
    return made


def measure_information(setting: Setting) -> Interval | None:
    """Returns the mean over secrets of ‖m − centre‖²/2s² in bits, m being what a secret adds to
    what is seen without noise; none of a single one.

    Every centre that does not depend on the secret bounds the information. Two are tried, nothing
    and the mean of the other secrets, and the better one counts: of few secrets it is nothing.
    """
    count = len(setting.private) // setting.spec.draws
    pieces = setting.channel.clip is None or setting.channel.clips_each
    total: dict[str, Tensor] = {}
    number = 0
    for index in range(count):
        for contribution in _list_contributions(setting, index, pieces):
            number += 1
            for name, tensor in contribution.items():
                total[name] = total.get(name, torch.zeros_like(tensor)) + tensor
    if number < 2:
        return None
    around: tuple[list[float], list[float]] = ([], [])
    batches = []
    for index in range(count):
        for one in _list_contributions(setting, index, pieces):
            moved = {name: one[name] - (total[name] - one[name]) / (number - 1) for name in one}
            for values, tensors in zip(around, (one, moved), strict=True):
                square = sum(float(each.double().square().sum()) for each in tensors.values())
                values.append(most_bits(math.sqrt(square) / setting.channel.noise_std))
            batches.append(index)
    return interval(min(around, key=sum), batches)


def _list_contributions(setting: Setting, index: int, pieces: bool) -> Sequence[dict[str, Tensor]]:
    """Returns what each example of a batch adds to what is seen, or all together where they are
    clipped together."""
    spec, private = setting.spec, setting.private[index]
    if not pieces:
        computed = compute(spec, setting.target, private, index)
        return [dict(show_quiet(spec, setting.target, computed, index).tensors)]
    examples = len(private.examples)
    found = []
    for example in range(examples):
        alone = replace(private, batch=private.batch[example : example + 1])
        computed = compute(spec, setting.target, alone, index)
        seen = show_quiet(spec, setting.target, computed, index).tensors
        found.append({name: tensor / examples for name, tensor in seen.items()})
    return found


def _find_shift(setting: Setting) -> float | None:
    return largest_shift(setting.channel, setting.spec.batch_size)


def _name_protected(setting: Setting) -> str:
    channel = setting.channel
    return "example" if channel.clip is None or channel.clips_each else "client"
