"""One observation from the words that fit to sentences and, where the update proves them, the certificate."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from gradleak.attacks.certificate import Certificate, fits
from gradleak.attacks.span.assembly import Assembly
from gradleak.attacks.span.blends import Blends
from gradleak.attacks.span.checks import Check, Sentence, checks_of
from gradleak.attacks.span.choices import Choices, choices_of
from gradleak.attacks.span.endings import with_last_words
from gradleak.attacks.span.mixing import mixing_of
from gradleak.attacks.span.prefixes import Prefixes, reads_ahead
from gradleak.attacks.span.remainder import remainder_of
from gradleak.attacks.span.row_space import RowSpace
from gradleak.attacks.span.scan import Pairs
from gradleak.attacks.span.sparse import weights
from gradleak.core.attack import Bench, Cost, Reconstruction, Trace
from gradleak.core.observation import Observation


@dataclass(frozen=True)
class Settings:
    """The numbers of the attack."""

    longest: int
    attempts: int
    tries: int
    steps: int
    beam: int


@dataclass
class Guess:
    """Sentences, whether they use up all directions of a deeper layer, and how many steps the search took."""

    sentences: list[Sentence]
    complete: bool
    steps: int = 0
    seconds: float = 0.0


class Solver:
    """Turns the pairs of one observation into sentences."""

    def __init__(
        self,
        observation: Observation,
        space: RowSpace,
        pairs: Pairs,
        positions: int,
        by_position: bool,
        settings: Settings,
        bench: Bench,
    ) -> None:
        self.observation, self.space, self.pairs, self.positions = observation, space, pairs, positions
        self.by_position, self.settings, self.bench = by_position, settings, bench
        self.checks = checks_of(observation, space.rank, positions) if space.exact else []
        self.remainder = remainder_of(observation, space, self.checks[0]) if self.checks else None

    def solve(self) -> Guess:
        """The sentences that were found, or the best there are."""
        begun = time.monotonic()
        guess = self._guess()
        guess.seconds = time.monotonic() - begun
        return guess

    def conclude(self, guess: Guess, certificate: Certificate, shared_seconds: float) -> Reconstruction:
        """The reconstruction; its cost holds a share of what was done for all observations at once."""
        sentences = certificate.sentences or tuple(guess.sentences)
        return Reconstruction(
            sentences=sentences,
            certified=certificate.proven,
            labels=certificate.labels,
            trace=Trace(guesses=((guess.steps, sentences),)),
            cost=Cost(shared_seconds + guess.seconds, guess.steps),
            note="" if certificate.proven else self._obstacle(guess) or certificate.note,
        )

    def _obstacle(self, guess: Guess) -> str:
        """What stood in the way of the search, if anything did."""
        width = len(self.space.directions)
        if not self.space.exact:
            return (
                f"The first layer's gradient has no exact span: it is noisy or changed, or its words fill all {width} directions."
            )
        if not self.checks:
            return f"No deeper layer has an exact span: hidden, changed, or as many tokens as the model is wide ({width})."
        return "" if guess.complete else "The search ended before all tokens were found."

    def _guess(self) -> Guess:
        if not self.checks or self.bench.out_of_time:
            return self._one_by_one()
        if reads_ahead(self.checks[0]):
            return self._assembled(self.checks[0])
        return self._grown(self.checks[0])

    def _assembled(self, check: Check) -> Guess:
        """Sentences of a model that reads the whole sentence at every token."""
        choices = self._choices([])
        if choices is None:
            return self._one_by_one()
        mixing = mixing_of(check) if self.by_position else None
        blends = Blends(mixing, check, choices) if mixing else None
        rng = self.bench.streams_of(self.observation).child("assembly").generator()
        search = Assembly(check, choices, self._choices, blends, self.settings.attempts, self.settings.tries, rng, self._explains)
        steps = search.run(self.settings.steps, self._going_on)
        sentences, left = list(search.found), search.left
        complete = left == 0
        for sentence in search.unfinished():
            if check.tokens([sentence]) <= left:  # the best there is for what was not found
                sentences.append(sentence)
                left -= check.tokens([sentence])
        return Guess(sentences or search.unfinished()[:1], complete, steps)

    def _explains(self, found: Sequence[Sentence]) -> bool:
        """Whether sentences make up the whole update."""
        return fits(self.observation, found)

    def _choices(self, found: Sequence[Sentence]) -> Choices | None:
        """What there is to choose from beside sentences that were found; none where it makes no sentence."""
        left = self.remainder.without(found) if found and self.remainder else None
        known = self._used([] if left is not None else found)
        likely = weights(self.space, self.pairs.coordinates, left).masked_fill(known, 0.0)
        return choices_of(self.pairs, likely, known, self.observation.target.vocabulary, self.positions, self.by_position)

    def _used(self, sentences: Sequence[Sentence]) -> Bool[Tensor, "pairs"]:
        """Which pairs are words of these sentences."""
        used = {(word, place) for sentence in sentences for place, word in enumerate(sentence)}
        each = zip(self.pairs.words.tolist(), self.pairs.positions.tolist(), strict=True)
        found = [self.by_position and pair in used for pair in each]
        return torch.tensor(found, dtype=torch.bool, device=self.pairs.words.device)

    def _grown(self, check: Check) -> Guess:
        """Sentences of a model that reads only what came before."""
        growth = Prefixes(check, self.pairs, self.settings.beam, self.by_position)
        longest = self.positions if self.by_position else min(self.settings.longest, check.space.rank)
        sentences = growth.grow(longest, self._going_on)
        if not sentences:
            return self._one_by_one()
        if self.observation.target.labels_are_tokens:  # the last word is predicted and never read: it is in no span
            sentences = with_last_words(self.observation, sentences)
        return Guess(sentences, growth.directions == check.space.rank, longest)

    def _one_by_one(self) -> Guess:
        """The nearest word at every position: all there is without a deeper layer or an exact span."""
        vocabulary = self.observation.target.vocabulary
        inside = range(len(vocabulary.prefix), max(self.positions - len(vocabulary.suffix), len(vocabulary.prefix) + 1))
        words = [self._nearest(place if self.by_position else 0) for place in inside]
        return Guess([(*vocabulary.prefix, *words, *vocabulary.suffix)], complete=False)

    def _nearest(self, place: int) -> int:
        vocabulary = self.observation.target.vocabulary
        frame = torch.tensor([*vocabulary.prefix, *vocabulary.suffix, vocabulary.pad], device=self.pairs.words.device)
        here = (self.pairs.positions == place) & ~torch.isin(self.pairs.words, frame)
        if not bool(here.any()):
            return vocabulary.pad
        return int(self.pairs.words[here][self.pairs.distances[here].argmin()])

    def _going_on(self, step: int, score: float) -> bool:
        progress = self.bench.progress
        progress.report(progress.done, progress.total, score)
        return not self.bench.out_of_time
