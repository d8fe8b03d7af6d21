"""Putting words together to sentences where every token sees the whole sentence: search over words that fit each position.

A deeper layer's span says how well a whole sentence fits. Many sentences are searched at once. They begin as blends where the
model's layer can be written out. The slope at each says which exchanges of words may help, the best are tried beside other orders
of the worst words, and a sentence that is stuck begins anew or has a part of its words drawn again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.span.blends import Blends
from gradleak.attacks.span.checks import Check, Sentence
from gradleak.attacks.span.choices import Choices

REDRAWN = (0.1, 0.5)  # share of the words of a stuck sentence that are drawn anew, from and to
LIKELY = 0.03  # weight, of a position's likeliest word, from which a word is tried first
PATIENCE = 4  # redraws without gain after which a search begins anew
TOGETHER = 8  # changes at different positions taken in one step
NEARLY = -1.7  # decades of mean miss, under which the order of words is worth a look: a batch's words are there
WORST, NEAR = 6, 3  # words whose place is doubted, and how far from it they are tried
BLENDED = 8  # attempts at once where they begin with blends, of which most lead somewhere
FRUITLESS = 48  # steps without a new sentence after which the search hands over: of those that ended later none was found
BETTER = 1e-4  # decades

Going = Callable[[int, float], bool]  # whether to go on, after so many steps and with such a score
Choose = Callable[[Sequence[Sentence]], Choices | None]  # what there is to choose from beside sentences that were found


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

    def __init__(
        self,
        check: Check,
        choices: Choices,
        choose: Choose,
        blends: Blends | None,
        attempts: int,
        tries: int,
        rng: torch.Generator,
        explains: Callable[[Sequence[Sentence]], bool] = lambda found: False,
    ) -> None:
        self.check, self.choose, self.blends, self.tries, self.rng = check, choose, blends, tries, rng
        self.explains = explains
        self.patience = 0 if blends else PATIENCE
        self.found: list[Sentence] = []
        self.complete = False  # what was found explains the whole update
        self.fruitless = 0  # steps since the last sentence was found
        self.choices = choices
        lengths = self.choices.lengths.flip(0)[:attempts].tolist()
        starts = [self.choices.likeliest(length) for length in lengths]
        starts += [self.choices.draw(rng) for _ in range(attempts - len(starts))]
        self.attempts = [Attempt(*start) for start in zip(starts, check.scores(starts), strict=True)]

    def run(self, steps: int, going_on: Going) -> int:
        """Searches until the sentences that were found have all tokens together; says how many steps that took."""
        self._collect(going_on)
        if self.blends and self.left > 0:
            self.attempts = self.attempts[:BLENDED]
            self._restart(self.attempts, going_on)
            self._collect(going_on)
        for step in range(steps):
            lowest = min(attempt.best_score for attempt in self.attempts)
            if self.left <= 0 or self.fruitless == FRUITLESS or not going_on(step, lowest):
                return step
            self.fruitless += 1
            stuck = [attempt for attempt, moved in zip(self.attempts, self._move(), strict=True) if not moved]
            self._collect(going_on)
            self._shake([attempt for attempt in stuck if attempt.sentence not in self.found], going_on)
        return steps

    @property
    def left(self) -> int:
        """Tokens not accounted for: each has a direction of its own where tokens have mixed.

        How many directions there are is an estimate. What was found may explain the whole update before they are used up.
        """
        return 0 if self.complete else self.check.space.rank - self.check.tokens(self.found)

    def unfinished(self) -> list[Sentence]:
        """The best sentences that were not proved, best first."""
        order = sorted(self.attempts, key=lambda attempt: attempt.best_score)
        return [sentence for sentence in dict.fromkeys(attempt.best for attempt in order) if sentence not in self.found]

    def _move(self) -> list[bool]:
        """Tries the most promising changes of every sentence and takes the best; says which sentences got better."""
        slopes = self.check.slopes([attempt.sentence for attempt in self.attempts])
        trials = [self._promising(attempt.sentence, slope) for attempt, slope in zip(self.attempts, slopes, strict=True)]
        scored = self._scored([[*some, *more] for some, more in zip(trials, self._orders(), strict=True)])
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

    def _orders(self) -> list[list[Sentence]]:
        """Other orders of the words, of sentences that are not far from fitting."""
        misses = self.check.by_token([attempt.sentence for attempt in self.attempts])
        inside = [range(len(self.choices.prefix), len(one.sentence) - len(self.choices.suffix)) for one in self.attempts]
        return [
            _reordered(attempt.sentence, row, places) if attempt.score < NEARLY else []
            for attempt, row, places in zip(self.attempts, misses, inside, strict=True)
        ]

    def _scored(self, trials: list[list[Sentence]]) -> list[list[tuple[float, Sentence]]]:
        flat = [sentence for group in trials for sentence in group]
        scores = iter(self.check.scores(flat))
        return [[(next(scores), sentence) for sentence in group] for group in trials]

    def _collect(self, going_on: Going) -> None:
        """Notes sentences that fit exactly; their searches begin anew, and with luck end at once.

        It goes on only while that finds new sentences, of which there are no more than directions.
        """
        while True:
            new = self._note()
            known = [attempt for attempt in self.attempts if attempt.sentence in self.found]
            if not known or self.left <= 0 or not going_on(0, min(attempt.score for attempt in self.attempts)):
                return
            if new:
                self.choices = (self.choose(self.found) or self.choices).within(self.left)
                for attempt in self.attempts:  # what is left is clearer now: nobody stays long with an old start
                    attempt.redraws = self.patience
            self._restart(known, going_on)
            if not new:
                return

    def _note(self) -> bool:
        """Whether any attempt has a sentence that fits and was not found before."""
        before = len(self.found)
        for attempt in self.attempts:
            attempt.keep()
            if attempt.score < self.check.fits and attempt.sentence not in self.found and self.check.holds(attempt.sentence):
                self.found.append(attempt.sentence)
        if len(self.found) == before:
            return False
        self.fruitless = 0
        self.complete = self.left <= 0 or self.explains(self.found)
        return True

    def _shake(self, stuck: list[Attempt], going_on: Going) -> None:
        """Stuck sentences go back to their best with some words drawn anew; after a while they begin anew."""
        others = [attempt for attempt in stuck if attempt.redraws < self.patience]
        self._restart([attempt for attempt in stuck if attempt.redraws >= self.patience], going_on)
        shares = torch.empty(len(others)).uniform_(*REDRAWN, generator=self.rng).tolist()
        redrawn = [self.choices.redraw(attempt.best, share, self.rng) for attempt, share in zip(others, shares, strict=True)]
        for attempt, sentence, score in zip(others, redrawn, self.check.scores(redrawn), strict=True):
            attempt.sentence, attempt.score, attempt.redraws = sentence, score, attempt.redraws + 1

    def _restart(self, attempts: list[Attempt], going_on: Going) -> None:
        starts = self._starts(len(attempts), going_on) if self.left > 0 else [attempt.sentence for attempt in attempts]
        for attempt, sentence, score in zip(attempts, starts, self.check.scores(starts), strict=True):
            attempt.sentence, attempt.score = sentence, score
            attempt.best, attempt.best_score, attempt.redraws = sentence, score, 0

    def _starts(self, count: int, going_on: Going) -> list[Sentence]:
        if self.blends is None or not count:
            return [self.choices.draw(self.rng) for _ in range(count)]
        lengths = [self.choices.draw_length(self.rng) for _ in range(count)]
        return self.blends.search(self.choices, lengths, self.rng, going_on)


def _exchanged(sentence: Sentence, place: int, word: int) -> Sentence:
    return (*sentence[:place], word, *sentence[place + 1 :])


def _reordered(sentence: Sentence, misses: Sequence[float], inside: range) -> list[Sentence]:
    """The sentence with one of its worst words swapped with another near it or among the worst, or moved a few places."""
    worst = sorted(inside, key=lambda place: -misses[place])[:WORST]
    swaps = {tuple(sorted((one, other))) for one in worst for other in (*worst, *range(one - NEAR, one + NEAR + 1))}
    trials = [_swapped(sentence, *pair) for pair in swaps if pair[0] in inside and pair[1] in inside]
    moves = [(one, one + by) for one in worst for by in range(-NEAR, NEAR + 1) if abs(by) > 1 and one + by in inside]
    return [trial for trial in dict.fromkeys([*trials, *(_moved(sentence, *move) for move in moves)]) if trial != sentence]


def _swapped(sentence: Sentence, one: int, other: int) -> Sentence:
    return _exchanged(_exchanged(sentence, one, sentence[other]), other, sentence[one])


def _moved(sentence: Sentence, start: int, end: int) -> Sentence:
    rest = [*sentence[:start], *sentence[start + 1 :]]
    return (*rest[:end], sentence[start], *rest[end:])


def _ladder(attempt: Attempt, tried: list[tuple[float, Sentence]]) -> list[Sentence]:
    """The best change, the best two at different positions, and so on, of those that help."""
    rungs, current, taken = list[Sentence](), list(attempt.sentence), set[int]()
    for score, sentence in sorted(tried):
        if score >= attempt.score or len(rungs) == TOGETHER:
            break
        places = {place for place, pair in enumerate(zip(sentence, attempt.sentence, strict=True)) if pair[0] != pair[1]}
        if not places & taken:
            taken |= places
            current = [sentence[place] if place in places else word for place, word in enumerate(current)]
            rungs.append(tuple(current))
    return rungs
