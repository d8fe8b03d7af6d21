"""The span attack: words and positions from the first layer's span, sentences from deeper ones, a proof at the end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gradleak.attacks.certificate import CERTIFYING, certify_all
from gradleak.attacks.span.row_space import RowSpace, attention_parts, space_of
from gradleak.attacks.span.scan import Scan, used_positions
from gradleak.attacks.span.solve import Guess, Settings, Solver
from gradleak.core.attack import Attack, Bench, Reconstruction
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.ranges import Count
from gradleak.core.registry import register
from gradleak.matching.chunking import pieces, refuse_without_room
from gradleak.matching.inputs import ModuleInputs

OBSERVATIONS_AT_ONCE = 16  # share one pass over the vocabulary
SCANNED = 8  # numbers for every word at every position while one observation is held against them


@register("attack", "span")
@dataclass(frozen=True)
class Span(Attack):
    """Finds the exact words from the span of layer inputs; undefended gradients only, no labels or lengths needed (DAGER)."""

    cites = "Petrov et al., NeurIPS 2024 (DAGER); sparse choice of pairs: Wipf & Rao 2007"

    longest: Count = 256  # positions to try
    attempts: Count = 16  # sentences searched at once
    tries: Count = 32  # exchanges of words tried for each in one step
    steps: Count = 400  # of the search, at most
    beam: Count = 64  # prefixes alive, for models that do not read ahead

    @property
    def passes(self) -> int:
        return 40  # as long as these take: it makes none, but goes through all words at all positions

    @property
    def uses(self) -> frozenset[Fact]:
        """The certificate does: the same batch several times over gives the same update."""
        return frozenset({Fact.BATCH_SIZE})

    def adapts_to(self, channel: Channel) -> bool:
        return channel.only_scaled

    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        found: list[Reconstruction] = []
        step = self._at_once(observations, bench)
        for start in range(0, len(observations), step):
            found += self._group(observations[start : start + step], bench, start, len(observations))
        return found

    def _at_once(self, observations: Sequence[Observation], bench: Bench) -> int:
        """How many share one pass over the vocabulary: each holds a number for every word at every position, some for a while."""
        target = observations[0].target
        longest = max((max(one.knows.lengths) for one in observations if one.knows.lengths), default=self.longest)
        entries = min(longest, self.longest) * len(target.vocabulary.allowed) * target.dtype.itemsize
        refuse_without_room("span", SCANNED * entries, bench, target.device, "every word at every position of one batch")
        return pieces(bench, target.device, 2 * entries, 0, OBSERVATIONS_AT_ONCE).size

    def _group(self, observations: Sequence[Observation], bench: Bench, done: int, total: int) -> list[Reconstruction]:
        begun = time.monotonic()
        spaces = [_first_space(observation) for observation in observations]
        target = observations[0].target
        inputs = ModuleInputs(target, attention_parts(observations[0], 1)[:1])
        scan = Scan(target, inputs, spaces, [bench.streams_of(observation) for observation in observations])
        positions = used_positions(scan, observations, self.longest)
        pairs = scan.pairs(max(positions))
        shared, early = time.monotonic() - begun, bench.ending_early(CERTIFYING)
        solvers, guesses = list[Solver](), list[Guess]()
        for place, observation in enumerate(observations):
            bench.progress.report(done + place, total)
            solver = Solver(observation, spaces[place], pairs[place], positions[place], scan.by_position, self._settings, early)
            solvers.append(solver)
            guesses.append(solver.solve())
        begun = time.monotonic()
        certificates = certify_all(observations, [guess.sentences for guess in guesses], bench)
        shared = (shared + time.monotonic() - begun) / len(observations)
        each = zip(solvers, guesses, certificates, strict=True)
        return [solver.conclude(guess, certificate, shared) for solver, guess, certificate in each]

    @property
    def _settings(self) -> Settings:
        return Settings(self.longest, self.attempts, self.tries, self.steps, self.beam)


def _first_space(observation: Observation) -> RowSpace:
    parts = attention_parts(observation, 1)
    if not parts:
        raise GradleakError(
            "span needs the gradient of the first layer's query, key or value, which this view does not show; use energy."
        )
    return space_of(observation, parts)
