"""Step 3: words are put together to sentences that fit the span of a deeper layer.

`Assembly` serves models in which every token reads the whole sentence. Many sentences are searched
at once. They begin as blends (blend.py) where the model's layer can be written out. The slope at
each says which exchanges of words may help, the best are tried beside other orders of the worst
words, and a sentence that is stuck begins anew or has a part of its words drawn again.

`PrefixGrowth` serves models in which a token reads only what came before. A deeper input depends on
the prefix alone there, so that a wrong word shows at once, and prefixes grow word by word.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.span.account import append_last_words
from gradleak.attacks.span.blend import BlendSearch, KeepGoing
from gradleak.attacks.span.choose import Choices
from gradleak.attacks.span.row_space import Check
from gradleak.attacks.span.scan import Pairs
from gradleak.core.attack import TokenIds
from gradleak.core.observation import Observation
from gradleak.matching.linear_algebra import count_rank, decompose, find_singular_values

REDRAWN = (0.1, 0.5)  # share of the words of a stuck sentence that are drawn anew, from and to
LIKELY = 0.03  # weight, of a position's likeliest word, from which a word is tried first
PATIENCE = 4  # redraws without gain after which a search begins anew
TOGETHER = 8  # changes at different positions taken in one step
# Decades of mean miss under which the order of words is worth a look: the batch's words are there.
NEARLY = -1.7
WORST, NEAR = 6, 3  # words whose place is doubted, and how far from it they are tried
BLENDED = 8  # attempts at once where they begin with blends, of which most lead somewhere
# Steps without a new sentence after which the search hands over. Of the searches that went on for
# longer none found another.
FRUITLESS = 48
BETTER = 1e-4  # decades

PREFIXES_AT_ONCE = 512
NEW = 1e-4  # what unit inputs must have outside of others to count as a direction of their own

# Returns what there is to choose from beside sentences that were found.
Choose = Callable[[Sequence[TokenIds]], Choices | None]
Explains = Callable[[Sequence[TokenIds]], bool]  # whether sentences make up the whole update


@dataclass
class Attempt:
    """One sentence on its way."""

    sentence: TokenIds
    score: float
    best: TokenIds = ()
    best_score: float = float("inf")
    redraws: int = 0  # since the best was found

    def keep_best(self) -> None:
        """Notes the sentence if it is better than all before it."""
        if self.score < self.best_score - BETTER:
            self.best, self.best_score, self.redraws = self.sentence, self.score, 0


class Assembly:
    """Searches the sentences of one observation, several attempts at a time."""

    def __init__(
        self,
        check: Check,
        choices: Choices,
        choose: Choose,
        blends: BlendSearch | None,
        attempts: int,
        tries: int,
        rng: torch.Generator,
        explains: Explains,
    ) -> None:
        self.check, self.choices, self.choose, self.blends = check, choices, choose, blends
        self.tries, self.rng, self.explains = tries, rng, explains
        self.patience = 0 if blends else PATIENCE
        self.found: list[TokenIds] = []
        self.complete = False  # what was found explains the whole update
        self.fruitless = 0  # steps since the last sentence was found
        lengths = choices.lengths.flip(0)[:attempts].tolist()
        starts = [choices.take_likeliest(length) for length in lengths]
        starts += [choices.draw(rng) for _ in range(attempts - len(starts))]
        self.attempts = [Attempt(*start) for start in zip(starts, check.score(starts), strict=True)]

    def search(self, steps: int, keep_going: KeepGoing) -> int:
        """Searches until what was found has all tokens; returns how many steps that took."""
        self._collect_fitting(keep_going)
        if self.blends and self.left > 0:
            self.attempts = self.attempts[:BLENDED]
            self._restart(self.attempts, keep_going)
            self._collect_fitting(keep_going)
        for step in range(steps):
            lowest = min(attempt.best_score for attempt in self.attempts)
            if self.left <= 0 or self.fruitless == FRUITLESS or not keep_going(step, lowest):
                return step
            self.fruitless += 1
            improved = zip(self.attempts, self._improve(), strict=True)
            stuck = [attempt for attempt, better in improved if not better]
            self._collect_fitting(keep_going)
            self._shake([one for one in stuck if one.sentence not in self.found], keep_going)
        return steps

    @property
    def left(self) -> int:
        """Tokens not accounted for: each has a direction of its own where tokens have mixed.

        How many directions there are is an estimate. What was found may explain the whole update
        before they are used up.
        """
        return 0 if self.complete else self.check.space.rank - self.check.count_tokens(self.found)

    @property
    def unfinished(self) -> list[TokenIds]:
        """The best sentences that were not proved, best first."""
        order = sorted(self.attempts, key=lambda attempt: attempt.best_score)
        return [best for best in dict.fromkeys(one.best for one in order) if best not in self.found]

    def _improve(self) -> list[bool]:
        """Tries changes of every sentence and takes the best; says which sentences got better."""
        proposals = zip(self._propose_exchanges(), self._propose_orders(), strict=True)
        scored = self._score_groups([[*exchanges, *orders] for exchanges, orders in proposals])
        several = [
            _combine_gains(attempt, tried)
            for attempt, tried in zip(self.attempts, scored, strict=True)
        ]
        moved = []
        for attempt, tried in zip(self.attempts, self._score_groups(several), strict=True):
            score, sentence = min(tried, default=(0.0, attempt.sentence))
            moved.append(score < attempt.score - BETTER)
            if moved[-1]:
                attempt.sentence, attempt.score = sentence, score
        return moved

    def _propose_exchanges(self) -> list[list[TokenIds]]:
        slopes = self.check.compute_slopes([attempt.sentence for attempt in self.attempts])
        pairs = zip(self.attempts, slopes, strict=True)
        return [self._follow_slope(attempt.sentence, slope) for attempt, slope in pairs]

    def _follow_slope(
        self, sentence: TokenIds, slope: Float[Tensor, "tokens hidden"]
    ) -> list[TokenIds]:
        """Returns the exchanges that the slope likes best: most to likely words, some to any."""
        table = self.check.target.vocabulary.embeddings
        gains, likely, where = [], list[bool](), list[tuple[int, int]]()
        for place in self.choices.inside(len(sentence)):
            words, current = self.choices.words[place], sentence[place]
            gains += ((table[words.to(table.device)] - table[current]) @ slope[place]).tolist()
            likely += (self.choices.weights[place] >= LIKELY).tolist()
            where += [(place, word) for word in words.tolist()]
        order = sorted(range(len(gains)), key=gains.__getitem__)
        order = [trial for trial in order if sentence[where[trial][0]] != where[trial][1]]
        chosen = [trial for trial in order if likely[trial]][: self.tries]
        others = [trial for trial in order if not likely[trial]]
        chosen += others[: max(self.tries // 4, self.tries - len(chosen))]
        return [_replace_word(sentence, *where[trial]) for trial in chosen]

    def _propose_orders(self) -> list[list[TokenIds]]:
        """Proposes other orders of the words of sentences that are not far from fitting."""
        misses = self.check.score_tokens([attempt.sentence for attempt in self.attempts])
        return [
            (
                reorder_worst(attempt.sentence, row, self.choices.inside(len(attempt.sentence)))
                if attempt.score < NEARLY
                else []
            )
            for attempt, row in zip(self.attempts, misses, strict=True)
        ]

    def _score_groups(self, groups: list[list[TokenIds]]) -> list[list[tuple[float, TokenIds]]]:
        scores = iter(self.check.score([sentence for group in groups for sentence in group]))
        return [[(next(scores), sentence) for sentence in group] for group in groups]

    def _collect_fitting(self, keep_going: KeepGoing) -> None:
        """Notes sentences that fit exactly; their attempts begin anew, and with luck end at once.

        This goes on only while it finds new sentences, of which there are no more than directions.
        """
        while True:
            new = self._note_fitting()
            known = [attempt for attempt in self.attempts if attempt.sentence in self.found]
            lowest = min(attempt.score for attempt in self.attempts)
            if not known or self.left <= 0 or not keep_going(0, lowest):
                return
            if new:
                self.choices = (self.choose(self.found) or self.choices).limit_to(self.left)
                # What is left is clearer now: no attempt stays long with an old start.
                for attempt in self.attempts:
                    attempt.redraws = self.patience
            self._restart(known, keep_going)
            if not new:
                return

    def _note_fitting(self) -> bool:
        """Notes sentences that fit; says whether any was not found before."""
        before = len(self.found)
        for attempt in self.attempts:
            attempt.keep_best()
            promising = attempt.score < self.check.threshold
            if (
                promising
                and attempt.sentence not in self.found
                and self.check.holds(attempt.sentence)
            ):
                self.found.append(attempt.sentence)
        if len(self.found) == before:
            return False
        self.fruitless = 0
        self.complete = self.left <= 0 or self.explains(self.found)
        return True

    def _shake(self, stuck: list[Attempt], keep_going: KeepGoing) -> None:
        """Draws some words of stuck sentences anew; after a while they begin anew altogether."""
        others = [attempt for attempt in stuck if attempt.redraws < self.patience]
        self._restart([one for one in stuck if one.redraws >= self.patience], keep_going)
        shares = torch.empty(len(others)).uniform_(*REDRAWN, generator=self.rng).tolist()
        redrawn = [
            self.choices.redraw(attempt.best, share, self.rng)
            for attempt, share in zip(others, shares, strict=True)
        ]
        scores = self.check.score(redrawn)
        for attempt, sentence, score in zip(others, redrawn, scores, strict=True):
            attempt.sentence, attempt.score = sentence, score
            attempt.redraws += 1

    def _restart(self, attempts: list[Attempt], keep_going: KeepGoing) -> None:
        starts = [attempt.sentence for attempt in attempts]
        if self.left > 0:
            starts = self._draw_starts(len(attempts), keep_going)
        for attempt, sentence, score in zip(
            attempts, starts, self.check.score(starts), strict=True
        ):
            attempt.sentence, attempt.score = sentence, score
            attempt.best, attempt.best_score, attempt.redraws = sentence, score, 0

    def _draw_starts(self, count: int, keep_going: KeepGoing) -> list[TokenIds]:
        if self.blends is None or not count:
            return [self.choices.draw(self.rng) for _ in range(count)]
        lengths = [self.choices.draw_length(self.rng) for _ in range(count)]
        return self.blends.search(self.choices, lengths, self.rng, keep_going)


def reorder_worst(sentence: TokenIds, misses: Sequence[float], inside: range) -> list[TokenIds]:
    """Returns the sentence in other orders, in each of which one of its worst words goes elsewhere.

    The word is swapped with another near it or among the worst, or moved a few places.
    """
    worst = sorted(inside, key=lambda place: -misses[place])[:WORST]
    pairs = [(one, two) for one in worst for two in (*worst, *range(one - NEAR, one + NEAR + 1))]
    swaps = {tuple(sorted(pair)) for pair in pairs}
    trials = [
        _swap_words(sentence, *pair) for pair in swaps if pair[0] in inside and pair[1] in inside
    ]
    steps = [by for by in range(-NEAR, NEAR + 1) if abs(by) > 1]  # a step of one is a swap
    moves = [(one, one + by) for one in worst for by in steps if one + by in inside]
    trials += [_move_word(sentence, *move) for move in moves]
    return [trial for trial in dict.fromkeys(trials) if trial != sentence]


def _replace_word(sentence: TokenIds, place: int, word: int) -> TokenIds:
    return (*sentence[:place], word, *sentence[place + 1 :])


def _swap_words(sentence: TokenIds, one: int, other: int) -> TokenIds:
    return _replace_word(_replace_word(sentence, one, sentence[other]), other, sentence[one])


def _move_word(sentence: TokenIds, start: int, end: int) -> TokenIds:
    rest = [*sentence[:start], *sentence[start + 1 :]]
    return (*rest[:end], sentence[start], *rest[end:])


def _combine_gains(attempt: Attempt, tried: list[tuple[float, TokenIds]]) -> list[TokenIds]:
    """Returns the best change, the best two at different positions, and so on."""
    combined, current, taken = list[TokenIds](), list(attempt.sentence), set[int]()
    for score, sentence in sorted(tried):
        if score >= attempt.score or len(combined) == TOGETHER:
            break
        places = {place for place, word in enumerate(sentence) if word != attempt.sentence[place]}
        if not places & taken:
            taken |= places
            for place in places:
                current[place] = sentence[place]
            # Changes at other positions mostly add up; scores decide how many were too many.
            combined.append(tuple(current))
    return combined


class PrefixGrowth:
    """Grows the sentences of one observation."""

    def __init__(
        self, observation: Observation, check: Check, pairs: Pairs, beam: int, by_position: bool
    ) -> None:
        self.observation, self.check, self.pairs = observation, check, pairs
        self.beam, self.by_position = beam, by_position
        self.directions = 0  # of the deeper layer that the sentences use

    def grow(self, longest: int, keep_going: KeepGoing) -> list[TokenIds]:
        """Returns sentences whose every prefix fits and that cannot be made longer.

        At most `beam` of them are alive at a time.
        """
        alive: list[TokenIds] = [()]
        ended: list[TokenIds] = []
        for place in range(longest):
            words = self.pairs.at(place if self.by_position else 0).tolist()
            longer = [(*prefix, word) for prefix in alive for word in words]
            if not longer or not keep_going(place, 0.0):
                break
            grown = self._keep_fitting(longer)
            parents = {sentence[:-1] for sentence in grown}
            ended += [prefix for prefix in alive if prefix and prefix not in parents]
            alive = grown
        sentences = self._drop_redundant([*ended, *(prefix for prefix in alive if prefix)])
        # In a language model the last word is predicted and never read: it is in no span.
        if sentences and self.observation.target.labels_are_tokens:
            return append_last_words(self.observation, sentences)
        return sentences

    def _keep_fitting(self, prefixes: Sequence[TokenIds]) -> list[TokenIds]:
        """Keeps the prefixes whose last word feeds what is in the span, nearest first."""
        found = []
        for start in range(0, len(prefixes), PREFIXES_AT_ONCE):
            piece = prefixes[start : start + PREFIXES_AT_ONCE]
            fed = self.check.compute_inputs(piece).view(len(piece), len(piece[0]), -1)[:, -1]
            found.append(self.check.space.measure_distances(fed))
        distances = torch.cat(found)
        inside = int((distances < self.check.space.tolerance).sum())
        return [prefixes[row] for row in distances.argsort().tolist()[: min(inside, self.beam)]]

    def _drop_redundant(self, sentences: list[TokenIds]) -> list[TokenIds]:
        """Keeps only sentences that add directions, those that add most first.

        A first word said over and over feeds the same all along, and would fit for ever.
        """
        kept: list[TokenIds] = []
        left = {}
        for sentence in sentences:
            inputs = self.check.compute_inputs([sentence]).double()
            left[sentence] = torch.nn.functional.normalize(inputs, dim=-1)
        while left:
            ranks = {
                sentence: int(count_rank(find_singular_values(inputs), NEW))
                for sentence, inputs in left.items()
            }
            best = max(ranks, key=lambda sentence: (ranks[sentence], -len(sentence)))
            if ranks[best] == 0:
                break
            kept.append(best)
            self.directions += ranks[best]
            basis = decompose(left.pop(best)).right[: ranks[best]]
            # What sentences feed beside the directions of those kept is all that they can add.
            left = {
                sentence: inputs - (inputs @ basis.mT) @ basis for sentence, inputs in left.items()
            }
        return kept
