"""The span attack: exact sentences from the span of layer inputs, in five steps.

1. scan.py      Which words at which positions could have been fed into the first layer?
2. choose.py    How likely is each of them, and where may sentences end?
3. assemble.py  Which words form sentences? Only the right ones fit the span of a deeper layer.
4. account.py   What of the update do the sentences found so far explain? Steps 2 and 3 go on with
                what is left.
5. certificate/ Does the update prove the sentences?

row_space.py is what all of them hold layer inputs against.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from gradleak.attacks.certificate import (
    CERTIFYING,
    Certificate,
    certify_all,
    fits,
    with_certificates,
)
from gradleak.attacks.span.account import open_remainder
from gradleak.attacks.span.assemble import Assembly, PrefixGrowth
from gradleak.attacks.span.blend import BlendSearch, write_out_attention
from gradleak.attacks.span.choose import Choices, make_choices, weigh_pairs
from gradleak.attacks.span.grow_matched import grow_text
from gradleak.attacks.span.low_rank import LowRankSearch, Words, has_only_adapters
from gradleak.attacks.span.row_space import Check, RowSpace, open_checks, read_row_space
from gradleak.attacks.span.scan import Pairs, Scan, count_positions
from gradleak.core.attack import Attack, Bench, Cost, Reconstruction, TokenIds, Trace
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.parts import ATTENTION_INPUTS
from gradleak.core.registry import Count, register
from gradleak.matching.chunking import pieces, refuse_without_room
from gradleak.matching.inputs import ModuleInputs, visible_linear_parts

PREFIXES_A_TEXT = 2  # kept alive at least, for models that do not read ahead
ADAPTED = 32  # tokens of a text of unknown length, where only adapters are seen
RESTARTS = 6  # of the search through them
OBSERVATIONS_AT_ONCE = 16  # share one pass over the vocabulary
# Numbers for every word at every position while one observation is held against them.
SCANNED = 8


@register("attack", "span")
@dataclass(frozen=True)
class Span(Attack):
    """Finds exact words from undefended gradients by the span of layer inputs (DAGER).

    It needs no labels or lengths.
    """

    cites = "Petrov et al., NeurIPS 2024 (DAGER); sparse choice of pairs: Wipf & Rao 2007"

    version = 3  # what counts as a direction of a span follows from drawn errors
    wants_classes = False

    longest: Count = 256  # positions to try
    attempts: Count = 16  # sentences searched at once
    tries: Count = 32  # exchanges of words tried for each in one step
    steps: Count = 400  # of the search, at most
    beam: Count = 64  # prefixes alive, for models that do not read ahead; twice the texts at least

    @property
    def passes(self) -> int:
        """As long as this many passes take: it makes none, but goes through all words."""
        return 40

    @property
    def uses(self) -> frozenset[Fact]:
        """The certificate's: the same batch several times over gives the same update."""
        return frozenset({Fact.BATCH_SIZE})

    def adapts_to(self, channel: Channel) -> bool:
        return channel.only_scaled

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        adapted = [place for place, one in enumerate(observations) if has_only_adapters(one)]
        found = dict(
            zip(adapted, self._take_apart([observations[n] for n in adapted], bench), strict=True)
        )
        others = [place for place in range(len(observations)) if place not in found]
        step = self._count_at_once([observations[n] for n in others], bench) if others else 1
        for start in range(0, len(others), step):
            places = others[start : start + step]
            group = [observations[place] for place in places]
            made = self._reconstruct_group(group, bench, start, len(others))
            found |= zip(places, made, strict=True)
        return [found[place] for place in range(len(observations))]

    def _take_apart(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        """Finds the words of updates of adapters, which hold fewer directions than tokens."""
        early, made = bench.ending_early(CERTIFYING), list[Reconstruction]()
        longest = [max(one.knows.lengths or (ADAPTED,)) for one in observations]
        words = Words(observations[0].target, max(longest), bench) if longest else None
        if words is not None and not words.have_positions:
            words = Words(observations[0].target, 1, bench)
        for place, observation in enumerate(observations):
            assert words is not None
            bench.progress.report(place, len(observations))
            begun = time.monotonic()
            if words.have_positions:
                sentences, passes = LowRankSearch(observation, words, early, RESTARTS).run()
            else:
                sentences = (self._grow_rotary(observation, words, early),)
                passes = len(sentences[0])
            cost = Cost(time.monotonic() - begun, passes)
            trace = Trace(guesses=((passes, sentences),))
            made.append(Reconstruction(sentences, cost=cost, trace=trace))
        return with_certificates(observations, made, bench)

    def _grow_rotary(self, observation: Observation, words: Words, bench: Bench) -> TokenIds:
        """Grows a text of the words that the first layer's inputs show, after the first step."""
        every, inner = words.ids[: words.free], words.ids[: words.free]
        with contextlib.suppress(GradleakError):  # at the first step nothing shows them
            search = LowRankSearch(observation, words, bench, 1)
            inner = search.list_words(max(observation.knows.lengths or (ADAPTED,)))
        beam = max(1, self.beam // 4 * min(4, len(every) // len(inner)))
        return grow_text(observation, inner, every, bench, beam)

    def _count_at_once(self, observations: Sequence[Observation], bench: Bench) -> int:
        """Says how many observations fit into one pass over the vocabulary.

        Each holds a number for every word at every position, and some more for a while.
        """
        target = observations[0].target
        known = (max(one.knows.lengths) for one in observations if one.knows.lengths)
        longest = min(max(known, default=self.longest), self.longest)
        entries = longest * len(target.vocabulary.allowed) * target.dtype.itemsize
        what = "every word at every position of one batch"
        refuse_without_room("span", SCANNED * entries, bench, target.device, what)
        return pieces(bench, target.device, 2 * entries, 0, OBSERVATIONS_AT_ONCE).size

    def _reconstruct_group(
        self, observations: Sequence[Observation], bench: Bench, done: int, total: int
    ) -> list[Reconstruction]:
        """Takes the steps for observations that share one scan and one pass of certificates."""
        begun = time.monotonic()
        spaces = [_read_first_space(observation) for observation in observations]
        parts = visible_linear_parts(observations[0], 1, ATTENTION_INPUTS)
        streams = [bench.streams_of(observation) for observation in observations]
        scan = Scan(ModuleInputs(observations[0].target, parts[:1]), spaces, streams)
        positions = count_positions(scan, observations, self.longest)
        pairs = scan.find_pairs(max(positions))
        shared, early = time.monotonic() - begun, bench.ending_early(CERTIFYING)
        # Steps 2 to 4 go observation by observation, and certificates all together again.
        searches, guesses = list[SentenceSearch](), list[Guess]()
        each = zip(observations, spaces, pairs, positions, strict=True)
        for place, (observation, space, fitting, used) in enumerate(each):
            bench.progress.report(done + place, total)
            search = SentenceSearch(
                self, observation, space, fitting, used, scan.by_position, early
            )
            searches.append(search)
            guesses.append(search.run())
        begun = time.monotonic()
        certificates = certify_all(observations, [guess.sentences for guess in guesses], bench)
        shared = (shared + time.monotonic() - begun) / len(observations)
        made = zip(searches, guesses, certificates, strict=True)
        return [search.conclude(guess, certified, shared) for search, guess, certified in made]


def _read_first_space(observation: Observation) -> RowSpace:
    parts = visible_linear_parts(observation, 1, ATTENTION_INPUTS)
    if not parts:
        raise GradleakError(
            "span needs the gradient of the first layer's query, key or value, which this view does"
            " not show; use energy."
        )
    return read_row_space(observation, parts)


@dataclass
class Guess:
    """Sentences, whether they use up all directions of a deeper layer, and what the search took."""

    sentences: list[TokenIds]
    complete: bool
    steps: int = 0
    seconds: float = 0.0


class SentenceSearch:
    """Turns the pairs of one observation into sentences: steps 2 to 4."""

    def __init__(
        self,
        settings: Span,
        observation: Observation,
        space: RowSpace,
        pairs: Pairs,
        positions: int,
        by_position: bool,
        bench: Bench,
    ) -> None:
        self.settings, self.observation, self.space, self.pairs = (
            settings,
            observation,
            space,
            pairs,
        )
        self.positions, self.by_position, self.bench = positions, by_position, bench
        self.vocabulary = observation.target.vocabulary
        self.checks = open_checks(observation, space.rank, positions) if space.exact else []
        self.remainder = None
        if self.checks:
            self.remainder = open_remainder(observation, space, self.checks[0])

    def run(self) -> Guess:
        """Returns the sentences that were found, or the best there are."""
        begun = time.monotonic()
        guess = None
        if self.checks and not self.bench.out_of_time:
            # Reading ahead, a token's deeper input depends on words that are not chosen yet.
            find = self._assemble if self.checks[0].reads_ahead() else self._grow
            guess = find(self.checks[0])
        guess = guess or self._take_nearest()
        guess.seconds = time.monotonic() - begun
        return guess

    def conclude(
        self, guess: Guess, certificate: Certificate, shared_seconds: float
    ) -> Reconstruction:
        """Returns the reconstruction; its cost holds a share of what was done for all at once."""
        sentences = certificate.sentences or tuple(guess.sentences)
        return Reconstruction(
            sentences=sentences,
            certified=certificate.proven,
            labels=certificate.labels,
            trace=Trace(guesses=((guess.steps, sentences),)),
            cost=Cost(shared_seconds + guess.seconds, guess.steps),
            note="" if certificate.proven else self._name_obstacle(guess) or certificate.note,
        )

    def make_choices(self, found: Sequence[TokenIds]) -> Choices | None:
        """Makes the choices that there are beside sentences that were found.

        None where they make no sentence. Where the found ones can be taken out of the gradient, the
        others are weighed by what is left of it; elsewhere the pairs of the found ones count less.
        """
        left = self.remainder.subtract(found) if found and self.remainder else None
        known = self._mark_pairs(() if left is not None else found)
        weights = weigh_pairs(self.space, self.pairs.coordinates, left).masked_fill(known, 0.0)
        return make_choices(
            self.pairs, weights, known, self.vocabulary, self.positions, self.by_position
        )

    def _mark_pairs(self, sentences: Sequence[TokenIds]) -> Bool[Tensor, "pairs"]:
        """Marks the pairs that are words of these sentences."""
        used = {pair for sentence in sentences for pair in enumerate(sentence)}
        each = zip(self.pairs.positions.tolist(), self.pairs.words.tolist(), strict=True)
        found = [self.by_position and pair in used for pair in each]
        return torch.tensor(found, dtype=torch.bool, device=self.pairs.words.device)

    def _assemble(self, check: Check) -> Guess | None:
        """Finds the sentences of a model that reads the whole sentence at every token."""
        choices = self.make_choices([])
        if choices is None:
            return None
        attention = write_out_attention(check) if self.by_position else None
        blends = BlendSearch(attention, check, choices) if attention else None
        search = Assembly(
            check,
            choices,
            self.make_choices,
            blends,
            self.settings.attempts,
            self.settings.tries,
            self.bench.streams_of(self.observation).child("assembly").generator(),
            lambda found: fits(self.observation, found),
        )
        steps = search.search(self.settings.steps, self._keep_going)
        sentences, left = list(search.found), search.left
        complete = left == 0
        # The best there is for what was not found.
        for sentence in search.unfinished:
            if check.count_tokens([sentence]) <= left:
                sentences.append(sentence)
                left -= check.count_tokens([sentence])
        return Guess(sentences or search.unfinished[:1], complete, steps)

    def _grow(self, check: Check) -> Guess | None:
        """Finds the sentences of a model that reads only what came before."""
        # Of so many texts as there are, a prefix each is right, and others fit by chance
        beam = max(self.settings.beam, PREFIXES_A_TEXT * (self.observation.knows.batch_size or 1))
        growth = PrefixGrowth(self.observation, check, self.pairs, beam, self.by_position)
        most = min(self.settings.longest, check.space.rank)
        longest = self.positions if self.by_position else most
        sentences = growth.grow(longest, self._keep_going)
        if not sentences:
            return None
        return Guess(sentences, growth.directions == check.space.rank, longest)

    def _take_nearest(self) -> Guess:
        """Takes the nearest word at every position.

        That is all there is without a deeper layer, without an exact span or without time.
        """
        prefix, suffix = self.vocabulary.prefix, self.vocabulary.suffix
        # Each position by itself: nothing here tells which words belong together.
        fitting, words = self.pairs.words, list[int]()
        frame = torch.tensor([*prefix, *suffix, self.vocabulary.pad], device=fitting.device)
        for place in range(len(prefix), max(self.positions - len(suffix), len(prefix) + 1)):
            here = self.pairs.positions == (place if self.by_position else 0)
            here &= ~torch.isin(fitting, frame)
            words.append(self.vocabulary.pad)
            if bool(here.any()):
                words[-1] = int(fitting[here][self.pairs.distances[here].argmin()])
        return Guess([(*prefix, *words, *suffix)], complete=False)

    def _keep_going(self, step: int, score: float) -> bool:
        progress = self.bench.progress
        progress.report(progress.done, progress.total, score)
        return not self.bench.out_of_time

    def _name_obstacle(self, guess: Guess) -> str:
        """Says what stood in the way of the search, if anything did."""
        width = len(self.space.directions)
        if not self.space.exact:
            return (
                "The first layer's gradient has no exact span: it is noisy or changed, or its"
                f" words fill all {width} directions."
            )
        if not self.checks:
            return (
                "No deeper layer has an exact span: hidden, changed, or as many tokens as the"
                f" model is wide ({width})."
            )
        return "" if guess.complete else "The search ended before all tokens were found."
