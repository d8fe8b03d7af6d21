"""What no attack could do on the setting of an audit: computed on the client's side, where the
secrets are, from the very updates that attacks were given."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradleak.audit.client import compute, look, private_batches, protect, stream_of
from gradleak.audit.ready import Opened, open_prior, open_target
from gradleak.audit.spec import AuditSpec
from gradleak.bounds.ceiling import ceiling_of, walk_chain
from gradleak.bounds.exposure import Exposure, expose, list_forms
from gradleak.bounds.information import largest_shift, most_bits, most_success
from gradleak.bounds.oracle import SentenceOdds, ask_oracle, free_places
from gradleak.core.attack import Display, Progress, Silent
from gradleak.core.batch import Example, PrivateBatch
from gradleak.core.defense import protect_in_turn
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
ORACLE = (
    "The attacker is told the labels, the lengths, the defense and every other word of the batch,"
    " and has unlimited time. For secrets drawn from the prior it is a theorem; on these texts it"
    " is an estimate. At the words' places: a guess that is aligned with the secrets afterwards has"
    " more chances."
)
INFORMATION = "Whatever the prior and the attacker: a theorem about clipping and Gaussian noise."
MEASURED = (
    "As the bound by the clip, with the size that the clipped gradients of these secrets have in"
    " what is seen, or their distance from their mean: an estimate for secrets like these, whatever"
    " the attacker."
)
GUARANTEE = (
    "Whatever the attacker: a theorem, for an event of the chance that stands beside it. That is"
    " the upper end of the 95 % interval of what the oracle gets right without the update. Nothing"
    " is subtracted for not knowing who takes part."
)


CEILING = (
    "As the oracle, but not told the other words: the root of the share of words that a chain"
    " which starts at the truth still has. For secrets drawn from the prior it is a theorem; on"
    " these texts it is an estimate."
)
EXPOSURE = (
    "The attacker is told the form, the labels, the lengths, the defense and all of the text but"
    " the secret, which is one of {:,} or fewer, all alike likely. For secrets drawn so it is a"
    " theorem; on these it is an estimate."
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

    @property
    def target(self) -> Target:
        return self.opened.target


def bound_setting(
    spec: AuditSpec,
    *,
    examples: Sequence[Example] | None = None,
    words: int | None = WORDS,
    rounds: int = 1,
    device: str = "cpu",
    secrets: bool = False,
    sweeps: int = 0,
    display: Display | None = None,
) -> BoundsRecord:
    """Returns what no attack could do on an audit's own updates.

    `words` are on each of the oracle's lists, none for the whole vocabulary. Of several `rounds`
    of the same batch, while the model stands still, all are seen. With `secrets`, marked ones that
    have a form (digits, a day, a made-up name) are held against all others of that form. With
    `sweeps`, chains that start at the truth bound searches that are not told the other words.
    """
    began, display = time.monotonic(), display or Silent()
    if spec.target.medium != "text":
        raise GradleakError("Bounds are computed for texts, and this audit is of pictures.")
    if rounds < 1 or (words is not None and words < 2):
        raise GradleakError(
            f"Bounds need rounds from 1 and at least 2 words; they are {rounds} and {words}."
        )
    if sweeps and words is not None:
        raise GradleakError("The chains of a ceiling go over the whole vocabulary: use words all.")
    channel = read_channel(spec.defenses, spec.protocol, spec.batch_size, rounds)
    target = open_target(spec, device)
    private = private_batches(spec, target, examples) * spec.draws
    setting = Setting(spec, open_prior(spec, target), private, channel, words, rounds)
    progress = Progress()
    odds: list[tuple[int, SentenceOdds]] = []
    exposed: list[tuple[int, Exposure]] = []
    kept: list[tuple[int, float]] = []  # words that a chain still has
    with display.watch(f"bounds on {len(private)} batches", progress):
        for index, one in enumerate(private):
            seen, batch = _see_rounds(setting, one, index), index % spec.limit
            odds += [(batch, each) for each in _ask(setting, one, seen)]
            if secrets:
                exposed += [(batch, each) for each in _expose(setting, one, seen)]
            if sweeps:
                kept += [(batch, each) for each in _walk(setting, one, seen, sweeps)]
            progress.report(index + 1, len(private))
    found = [
        *_bound_by_oracle(odds, to_string(spec.prior)),
        *_bound_by_chains(kept, to_string(spec.prior)),
        *_bound_by_exposure(exposed),
        *_bound_by_noise(setting),
        *_guarantee(setting, odds),
    ]
    remarks = _remark(setting, odds)
    if secrets:
        remarks += _remark_on_exposure(exposed)
    return BoundsRecord(
        to_string(spec.prior), words, rounds, tuple(found), time.monotonic() - began, remarks
    )


def _ask(setting: Setting, private: PrivateBatch, seen: Observation) -> list[SentenceOdds]:
    prior = prior_of_texts(setting.opened.prior)
    found = []
    for example, length in enumerate(private.lengths):
        likelihood = Likelihood(seen, private.batch, example, setting.channel)
        found.append(
            ask_oracle(
                private.batch,
                example,
                length,
                setting.target.vocabulary,
                prior,
                likelihood,
                setting.words,
            )
        )
    return found


def _walk(setting: Setting, private: PrivateBatch, seen: Observation, sweeps: int) -> list[float]:
    """Returns the share of words that a chain has left after its sweeps, of each example."""
    assert private.batch.ids is not None
    vocabulary, found = setting.target.vocabulary, []
    streams = Streams.root("ceiling", setting.spec.seed).child("batch", seen.index)
    for place, length in enumerate(private.lengths):
        row = private.batch.ids[place]
        found.append(
            walk_chain(
                row,
                length,
                free_places(vocabulary, row.tolist(), length),
                vocabulary,
                prior_of_texts(setting.opened.prior),
                Likelihood(seen, private.batch, place, setting.channel),
                sweeps,
                streams.child("example", place).generator(),
            )[-1]
        )
    return found


def _expose(setting: Setting, private: PrivateBatch, seen: Observation) -> list[Exposure]:
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
                Likelihood(seen, private.batch, place, setting.channel),
            )
            found += [] if exposure is None else [exposure]
    return found


def _see_rounds(setting: Setting, private: PrivateBatch, index: int) -> Observation:
    """Returns the observation that attacks get, or the mean of as many: the same update with its
    noise divided by √rounds."""
    spec = setting.spec
    computed = compute(spec, setting.target, private, index)
    seen = look(spec, setting.target, private, protect(spec, computed, index), index)
    if setting.rounds == 1:
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


def _bound_by_oracle(odds: Sequence[tuple[int, SentenceOdds]], prior: str) -> list[BoundRecord]:
    batches = [batch for batch, _ in odds]
    sentences = [one for _, one in odds]
    assumes = f"Prior: {prior}. {ORACLE}"

    def estimate(of: str, values: list[float], without: list[float], unit: str) -> BoundRecord:
        found = interval(values, batches)
        chance = sum(without) / len(without)
        return BoundRecord(
            *("oracle", of, found.mean, found.low, found.high, chance, unit, "estimate", found.n),
            assumes,
        )

    made = [
        estimate(
            "token_accuracy",
            [one.mean(lambda word: word.is_right) for one in sentences],
            [one.mean(lambda word: word.is_right_without) for one in sentences],
            "fraction",
        ),
        estimate(
            "exact_match",
            [float(one.is_right) for one in sentences],
            [float(one.is_right_without) for one in sentences],
            "fraction",
        ),
    ]
    if all(word.is_whole for one in sentences for word in one.words):
        made += [
            estimate(
                "largest_posterior",
                [one.mean(lambda word: word.largest) for one in sentences],
                [one.mean(lambda word: word.largest_prior) for one in sentences],
                "fraction",
            ),
            estimate(
                "bits_of_a_word",
                [one.mean(lambda word: word.bits) for one in sentences],
                [0.0] * len(sentences),
                "bits",
            ),
        ]
    return made


def _bound_by_chains(kept: Sequence[tuple[int, float]], prior: str) -> list[BoundRecord]:
    if not kept:
        return []
    found = interval([share for _, share in kept], [batch for batch, _ in kept])
    mean, low, high = (ceiling_of(share) for share in (found.mean, found.low, found.high))
    assumes = f"Prior: {prior}. {CEILING}"
    return [
        BoundRecord(
            *("ceiling", "token_accuracy", mean, low, high, None, "fraction", "estimate"),
            *(found.n, assumes),
        )
    ]


def _bound_by_exposure(exposed: Sequence[tuple[int, Exposure]]) -> list[BoundRecord]:
    """Returns, by form, how many bits the right secret stands out by, and how often it is first."""
    made = []
    for form in dict.fromkeys(one.form for _, one in exposed):
        some = [(batch, one) for batch, one in exposed if one.form == form]
        batches, most = [batch for batch, _ in some], max(one.options for _, one in some)
        bits = interval([one.bits for _, one in some], batches)
        first = interval([float(one.rank == 1) for _, one in some], batches)
        chance = sum(1 / one.options for _, one in some) / len(some)
        assumes = EXPOSURE.format(most)
        for of, found, without, unit in (
            (f"bits of {form}", bits, 0.0, "bits"),
            (f"{form} first", first, chance, "fraction"),
        ):
            ends = (found.mean, found.low, found.high)
            made.append(
                BoundRecord("exposure", of, *ends, without, unit, "estimate", found.n, assumes)
            )
    return made


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
    found = measure_information(setting)
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


def _guarantee(setting: Setting, odds: Sequence[tuple[int, SentenceOdds]]) -> list[BoundRecord]:
    shift = _find_shift(setting)
    if shift is None:
        return []
    chances = {
        "token_accuracy": [one.mean(lambda word: word.is_right_without) for _, one in odds],
        "exact_match": [float(one.is_right_without) for _, one in odds],
    }
    made = []
    for of, values in chances.items():
        chance = interval(values, [batch for batch, _ in odds])
        made.append(
            BoundRecord(
                *("guarantee", of, most_success(chance.high, shift), None, None, chance.high),
                *("fraction", "theorem", chance.n, GUARANTEE, _name_protected(setting)),
            )
        )
    return made


def _find_shift(setting: Setting) -> float | None:
    return largest_shift(setting.channel, setting.spec.batch_size)


def _name_protected(setting: Setting) -> str:
    channel = setting.channel
    return "example" if channel.clip is None or channel.clips_each else "client"


def _remark_on_exposure(exposed: Sequence[tuple[int, Exposure]]) -> tuple[str, ...]:
    if not exposed:
        return ("No marked secret has a form whose members can be listed.",)
    dropped = sum(one.dropped for _, one in exposed)
    if not dropped:
        return ()
    total = sum(one.options + one.dropped for _, one in exposed)
    return (
        f"Of {total} secrets that were tried for {len(exposed)} marked ones, {dropped} give the"
        " text another number of tokens than is known and were left out.",
    )


def _remark(setting: Setting, odds: Sequence[tuple[int, SentenceOdds]]) -> tuple[str, ...]:
    remarks = []
    if setting.channel.clip is None:
        remarks.append(
            "Nothing is clipped, so that no guarantee holds for every text: one with a larger"
            " gradient stands out more."
        )
    else:
        remarks.append(
            "The guarantee is for who knows that the example took part. One for who does not, by"
            " the sampling rate of the run, is not computed here."
        )
    if not all(word.is_whole for _, one in odds for word in one.words):
        remarks.append(
            f"The oracle chooses among {setting.words} words at each place, the true one and the"
            " likeliest others: leaving words out makes it right more often, never less. How sure"
            " it is, and bits, are given for the whole vocabulary only."
        )
    return tuple(remarks)
