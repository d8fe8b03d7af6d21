"""Putting words together to sentences where every token sees the whole sentence: search over words that fit each position.

A deeper layer's span says how well a whole sentence fits. Many sentences are searched at once: the slope at each says which
exchanges of words may help, the best are tried, and a sentence that is stuck has a part of its words drawn anew.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.span.checks import Check, Sentence
from gradleak.attacks.span.choices import Choices

REDRAWN = (0.1, 0.5)  # share of the words of a stuck sentence that are drawn anew, from and to
LIKELY = 0.03  # weight, of a position's likeliest word, from which a word is tried first
PATIENCE = 4  # redraws without gain after which a search begins anew
TOGETHER = 8  # exchanges at different positions taken in one step
BETTER = 1e-4  # decades


@dataclass
class Attempt:
    """One sentence on its way."""

    sentence: Sentence
    score: float
    best: Sentence = ()
    best_score: float = float("inf")
    redraws: int = 0

    def keep(self) -> None:
        if self.score < self.best_score - BETTER:
            self.best, self.best_score, self.redraws = self.sentence, self.score, 0


class Assembly:
    """Searches the sentences of one observation, several attempts at a time."""

    def __init__(self, check: Check, choices: Choices, attempts: int, tries: int, rng: torch.Generator) -> None:
        self.check, self.choices, self.tries, self.rng = check, choices, tries, rng
        self.found: list[Sentence] = []
        starts = [choices.likeliest(int(length)) for length in choices.lengths.flip(0)[:attempts]]
        starts += [choices.draw(rng) for _ in range(attempts - len(starts))]
        self.attempts = [Attempt(*start) for start in zip(starts, check.scores(starts), strict=True)]

    def run(self, steps: int, going_on: Callable[[int, float], bool]) -> int:
        """Searches until the sentences that were found have all tokens together; says how many steps that took."""
        self._collect()
        for step in range(steps):
            lowest = min(attempt.best_score for attempt in self.attempts)
            if self.left <= 0 or not going_on(step, lowest):
                return step
            stuck = [attempt for attempt, moved in zip(self.attempts, self._move(), strict=True) if not moved]
            self._collect()
            self._shake([attempt for attempt in stuck if attempt.sentence not in self.found])
        return steps

    @property
    def left(self) -> int:
        """Tokens not accounted for: each has a direction of its own where tokens have mixed."""
        return self.check.space.rank - self.check.tokens(self.found)

    def unfinished(self) -> list[Sentence]:
        """The best sentences that were not proved, best first."""
        order = sorted(self.attempts, key=lambda attempt: attempt.best_score)
        return [sentence for sentence in dict.fromkeys(attempt.best for attempt in order) if sentence not in self.found]

    def _move(self) -> list[bool]:
        """Tries the most promising exchanges of every sentence and takes the best; says which sentences got better."""
        slopes = self.check.slopes([attempt.sentence for attempt in self.attempts])
        trials = [self._promising(attempt.sentence, slope) for attempt, slope in zip(self.attempts, slopes, strict=True)]
        scored = self._scored(trials)
        ladders = [_ladder(attempt, tried) for attempt, tried in zip(self.attempts, scored, strict=True)]
        moved = []
        for attempt, rungs in zip(self.attempts, self._scored(ladders), strict=True):
            score, sentence = min(rungs, default=(0.0, attempt.sentence))
            moved.append(score < attempt.score - BETTER)
            if moved[-1]:
                attempt.sentence, attempt.score = sentence, score
        return moved

    def _promising(self, sentence: Sentence, slope: Float[Tensor, "tokens hidden"]) -> list[Sentence]:
        """The exchanges that the slope likes best: most of them to likely words, some to any."""
        table = self.check.target.vocabulary.embeddings
        gains, likely, where = [], list[bool](), list[tuple[int, int]]()
        for place in range(len(self.choices.prefix), len(sentence) - len(self.choices.suffix)):
            words, current = self.choices.words[place], sentence[place]
            gains += ((table[words.to(table.device)] - table[current]) @ slope[place]).tolist()
            likely += (self.choices.weights[place] >= LIKELY).tolist()
            where += [(place, word) for word in words.tolist()]
        order = [
            trial for trial in sorted(range(len(gains)), key=gains.__getitem__) if sentence[where[trial][0]] != where[trial][1]
        ]
        chosen = [trial for trial in order if likely[trial]][: self.tries]
        chosen += [trial for trial in order if not likely[trial]][: max(self.tries // 4, self.tries - len(chosen))]
        return [_exchanged(sentence, *where[trial]) for trial in chosen]

    def _scored(self, trials: list[list[Sentence]]) -> list[list[tuple[float, Sentence]]]:
        flat = [sentence for group in trials for sentence in group]
        scores = iter(self.check.scores(flat))
        return [[(next(scores), sentence) for sentence in group] for group in trials]

    def _collect(self) -> None:
        """Notes sentences that fit exactly; their searches begin anew."""
        done, known = [], len(self.found)
        for attempt in self.attempts:
            attempt.keep()
            if attempt.score < self.check.fits and attempt.sentence not in self.found and self.check.holds(attempt.sentence):
                self.found.append(attempt.sentence)
                self.choices.use(attempt.sentence, self.left)
            if attempt.sentence in self.found:
                done.append(attempt)
        self._restart(done, [self.choices.draw(self.rng) for _ in done])
        if len(self.found) > known:  # what is left is clearer now: nobody stays long with an old start
            for attempt in self.attempts:
                attempt.redraws = PATIENCE

    def _shake(self, stuck: list[Attempt]) -> None:
        """Stuck sentences go back to their best with some words drawn anew; after a while they begin anew."""
        tired = [attempt for attempt in stuck if attempt.redraws >= PATIENCE]
        others = [attempt for attempt in stuck if attempt.redraws < PATIENCE]
        self._restart(tired, [self.choices.draw(self.rng) for _ in tired])
        shares = torch.empty(len(others)).uniform_(*REDRAWN, generator=self.rng).tolist()
        redrawn = [self.choices.redraw(attempt.best, share, self.rng) for attempt, share in zip(others, shares, strict=True)]
        for attempt, sentence, score in zip(others, redrawn, self.check.scores(redrawn), strict=True):
            attempt.sentence, attempt.score, attempt.redraws = sentence, score, attempt.redraws + 1

    def _restart(self, attempts: list[Attempt], starts: list[Sentence]) -> None:
        for attempt, sentence, score in zip(attempts, starts, self.check.scores(starts), strict=True):
            attempt.sentence, attempt.score = sentence, score
            attempt.best, attempt.best_score, attempt.redraws = sentence, score, 0


def _exchanged(sentence: Sentence, place: int, word: int) -> Sentence:
    return (*sentence[:place], word, *sentence[place + 1 :])


def _ladder(attempt: Attempt, tried: list[tuple[float, Sentence]]) -> list[Sentence]:
    """The best exchange, the best two at different positions, and so on, of those that help."""
    rungs, current, taken = [], list(attempt.sentence), set[int]()
    for score, sentence in sorted(tried):
        if score >= attempt.score or len(taken) == TOGETHER:
            break
        place = next(place for place, pair in enumerate(zip(sentence, attempt.sentence, strict=True)) if pair[0] != pair[1])
        if place not in taken:
            taken.add(place)
            current[place] = sentence[place]
            rungs.append(tuple(current))
    return rungs
