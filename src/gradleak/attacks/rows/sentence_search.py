"""Step 3: sentences of the batch are searched one by one, each by its own input to the last layer.

A sentence's score is how far what it feeds lies outside of the spans of step 2. It falls steadily
as words come right, so that a search finds its way from a poor start: several sentences at once are
changed in the way that lowers the score most, of words exchanged (those that its slope promises),
words exchanged for one another, moved, put in and left out. Words and their positions are those of
step 1. A search that is stuck begins anew, as the prior would write with these words.

Each sentence found is taken out (step 4). So the span loses a direction, words are used up, and
words that stood at several positions come to stand at one: what is left is easier.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.rows.account import Account
from gradleak.attacks.rows.embedding_rows import EmbeddingRows
from gradleak.attacks.rows.sentence_spaces import SentenceSpaces
from gradleak.core.attack import Bench, TokenIds
from gradleak.core.observation import Observation
from gradleak.core.prior import pick

PROMISING = -2.5  # decades: below it a sentence is held against the spans in double precision
LESS = 1e-4  # decades: a smaller gain is none
UNLIKELY = 0.02  # the share of a word at a position where least squares sees none of it
MERGED = 6  # of the exchanges that help, so many are tried together
WORDS_A_PLACE = 8  # whose slope promises most
SHORTEST = 3  # tokens of a sentence
SHUFFLES = 2  # of a climb that is stuck, before it begins anew
ARRIVED = 10**6  # idle rounds of a climb that need go no further
INFINITE = float("inf")
ALIKE = 0.8  # of the tokens in common: one of the two is enough as a guess


@dataclass(eq=False)
class Climb:
    """One sentence on its way."""

    words: TokenIds
    score: float = INFINITE
    idle: int = 0  # rounds without a gain
    shuffled: int = 0  # how often it was stuck
    best: TokenIds = ()
    best_score: float = INFINITE

    def take(self, words: TokenIds, score: float) -> None:
        """Goes on from another sentence."""
        self.words, self.score = words, score
        if score < self.best_score:
            self.best, self.best_score = words, score


@dataclass
class Choices:
    """Which words may stand where: at each place its words and how likely each is there."""

    words: list[Int[Tensor, "_"]]
    weights: list[Float[Tensor, "_"]]
    ends: Float[Tensor, "places"]  # how likely a sentence's last token stands there

    @property
    def longest(self) -> int:
        """The most tokens of a sentence."""
        return len(self.words)


@dataclass
class SearchResult:
    """Sentences that hold, with labels, and the best of those that do not."""

    found: dict[TokenIds, tuple[int | None, int]] = field(default_factory=dict)
    unfinished: list[TokenIds] = field(default_factory=list)
    rounds: int = 0


class SentenceSearch:
    """Finds the sentences of one observation."""

    def __init__(
        self,
        observation: Observation,
        spaces: SentenceSpaces,
        rows: EmbeddingRows,
        bench: Bench,
        climbs: int,
        tries: int,
    ) -> None:
        self.target, self.bench, self.tries = observation.target, bench, tries
        self.vocabulary = self.target.vocabulary
        self.spaces = spaces  # of the whole update: what a sentence is held against
        self.account = Account(observation, spaces, rows)
        self.generator = bench.streams_of(observation).child("rows").generator()
        self.choices = self._make_choices()
        self.result = SearchResult()
        self.scored = 0
        self.seeds = list[TokenIds]()
        self.dead = set[TokenIds]()  # where climbs were stuck
        self.climbs = [Climb(words) for words in self._begin(climbs)]
        self._score_all()

    @property
    def left(self) -> int:
        """How many different sentences are not found."""
        return self.spaces.rank - len(self.result.found)

    def run(self, rounds: int, patience: int) -> SearchResult:
        """Climbs until all are found, the rounds are over, or so many found nothing."""
        total, last = self.spaces.rank, 0
        while self.left and self.result.rounds < rounds and not self.bench.out_of_time:
            self.result.rounds += 1
            before = len(self.result.found)
            self._climb()
            if len(self.result.found) > before:
                last = self.result.rounds
            elif self.result.rounds - last >= patience:
                break
            self._begin_anew()
            found = [self.target.decode(one) for one in list(self.result.found)[-4:]]
            scores = [climb.score for climb in self.climbs]
            progress = len(self.result.found)
            self.bench.progress.report(progress, total, sum(scores) / len(scores), found)
        self.result.unfinished = self._list_nearest() if self.left else []
        return self.result

    def _list_nearest(self) -> list[TokenIds]:
        """Returns a guess for each sentence that was not found: the nearest that climbs came to,
        none much like another, and then what the prior would write with these words."""
        tried = {*self.dead, *(climb.best for climb in self.climbs)} - set(self.result.found)
        reached = sorted(one for one in tried if self._may_be(one))
        chosen = list[TokenIds]()
        for _, words in sorted(zip(self._score(reached), reached, strict=True)):
            if all(_measure_overlap(words, other) < ALIKE for other in chosen):
                chosen.append(words)
        missing = self.left - len(chosen)
        return [*chosen[: self.left], *self._draw_sentences(max(0, missing))]

    def _climb(self) -> None:
        """Moves every climb to the best of its changes, and notes those that have arrived."""
        slopes = self.spaces_left.compute_slopes([climb.words for climb in self.climbs]).cpu()
        each = [
            self._change(climb, slope) for climb, slope in zip(self.climbs, slopes, strict=True)
        ]
        tried = self._score([one for changes in each for one in changes])
        merged, start = list[list[TokenIds]](), 0
        scored = list[list[tuple[float, TokenIds]]]()
        for climb, changes in zip(self.climbs, each, strict=True):
            own = list(zip(tried[start : start + len(changes)], changes, strict=True))
            start += len(changes)
            scored.append(own)
            merged.append(_merge(climb, own))
        again, start = self._score([one for changes in merged for one in changes]), 0
        for climb, changes, own in zip(self.climbs, merged, scored, strict=True):
            own += zip(again[start : start + len(changes)], changes, strict=True)
            start += len(changes)
            score, words = min(own, default=(INFINITE, climb.words))
            if score < climb.score - LESS:
                climb.take(words, score)
                climb.idle = 0
            else:
                climb.idle += 1
        met = set[TokenIds]()
        for climb in self.climbs:
            if climb.score < PROMISING:
                self._try_out(climb)
            # Others were here before
            if climb.idle and (climb.words in met or climb.words in self.dead):
                climb.idle = ARRIVED
            met.add(climb.words)

    @property
    def spaces_left(self) -> SentenceSpaces:
        """The spans of what is left when found sentences are taken out."""
        return self.account.spaces

    def _try_out(self, climb: Climb) -> None:
        """Takes a sentence that holds out of the update, and lets its climb begin anew."""
        known = climb.words in self.result.found
        if not known and not self.spaces.hold([climb.words])[0]:
            return
        if not known and self.left:
            taken = self.account.take_out(climb.words)
            self.result.found[climb.words] = taken or (None, 1)
            self.seeds.append(climb.words)
            if taken is not None and self.left:
                self.choices = self._make_choices()
        climb.idle = ARRIVED

    def _begin_anew(self) -> None:
        """Lets climbs that are stuck go on from elsewhere: from a change of their best, or from the
        beginning."""
        stuck = [one for one in self.climbs if one.idle >= 2 or not self._may_be(one.words)]
        if not stuck or not self.left:
            return
        fresh = list[Climb]()
        for climb in stuck:
            climb.shuffled += 1
            if climb.idle >= ARRIVED or not self._may_be(climb.best) or climb.shuffled > SHUFFLES:
                self.dead.add(climb.best)
                fresh.append(climb)
        for climb, words in zip(fresh, self._begin(len(fresh)), strict=True):
            climb.words, climb.best, climb.best_score, climb.shuffled = words, words, INFINITE, 0
        for climb in stuck:
            if climb not in fresh:
                climb.words = self._shuffle(climb.best)
            climb.idle = 0
        self._score_all()

    def _score_all(self) -> None:
        """Scores the climbs as they stand: what was taken out has changed the scores of all."""
        for climb, score in zip(
            self.climbs, self._score([one.words for one in self.climbs]), strict=True
        ):
            climb.take(climb.words, score)

    def _score(self, sentences: Sequence[TokenIds]) -> list[float]:
        self.scored += len(sentences)
        return self.spaces_left.score(sentences).tolist() if sentences else []

    # Changes of a sentence

    def _change(self, climb: Climb, slope: Float[Tensor, "tokens hidden"]) -> list[TokenIds]:
        """Returns sentences one change away: those that the slope promises, and some at random.

        Of a climb that gained nothing last time, all words are left out in turn and exchanged with
        their neighbours too.
        """
        words = climb.words
        first, stop = len(self.vocabulary.prefix), len(words) - len(self.vocabulary.suffix)
        places = range(first, stop)
        made = [_put(words, place, word) for place, word in self._promising(words, slope)]
        some = max(1, self.tries // 6)
        for _ in range(some):
            place, other = first + self._draw(len(places)), first + self._draw(len(places))
            made.append(_put(words, place, self._draw_word(place)))
            swapped = list(words)
            swapped[place], swapped[other] = swapped[other], swapped[place]
            moved = list(words)
            moved.insert(other, moved.pop(place))
            into = first + self._draw(len(places) + 1)
            longer = (
                *words[:into],
                self._draw_word(min(into, self.choices.longest - 1)),
                *words[into:],
            )
            shorter = (*words[:place], *words[place + 1 :])
            run = first + self._draw(len(places)) + 1
            without = (*words[:place], *words[max(run, place + 1) :])
            made += [tuple(swapped), tuple(moved), longer, shorter, without]
        if climb.idle:
            made += [(*words[:place], *words[place + 1 :]) for place in places]
            for place in places[1:]:
                left, right = words[place - 1 : place + 1]
                made.append(_put(_put(words, place - 1, right), place, left))
        return [one for one in dict.fromkeys(made) if one != words and self._may_be(one)]

    def _promising(
        self, words: TokenIds, slope: Float[Tensor, "tokens hidden"]
    ) -> list[tuple[int, int]]:
        """Returns places and words whose exchange lowers the score most, as far as its slope
        says."""
        table = self.vocabulary.embeddings
        promises = list[tuple[float, int, int]]()
        for place in range(len(self.vocabulary.prefix), len(words) - len(self.vocabulary.suffix)):
            choices = self.choices.words[place]
            gains = (table[choices.to(table.device)] - table[words[place]]).cpu() @ slope[place]
            best = gains.topk(min(WORDS_A_PLACE, len(gains)), largest=False)
            promises += [
                (gain, place, int(choices[at]))
                for gain, at in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        return [(place, word) for _, place, word in sorted(promises)[: self.tries]]

    def _shuffle(self, words: TokenIds) -> TokenIds:
        """Returns a sentence with a quarter of its words drawn anew."""
        changed = words
        first, count = len(self.vocabulary.prefix), len(words) - self.vocabulary.frame_length
        for _ in range(max(2, count // 4)):
            place = first + self._draw(count)
            changed = _put(changed, place, self._draw_word(place))
        return changed

    def _may_be(self, words: TokenIds) -> bool:
        """Whether every word may stand where it does."""
        first, stop = len(self.vocabulary.prefix), len(words) - len(self.vocabulary.suffix)
        if len(words) > self.choices.longest or stop <= first:
            return False
        return all(self.allowed[place][words[place]] for place in range(first, stop))

    # Beginnings

    def _begin(self, count: int) -> list[TokenIds]:
        """Returns sentences to begin with: those found last, since texts of one client are often
        alike, and others word by word as the prior believes them."""
        seeds = [words for words in self.seeds if self._may_be(words)][:count]
        self.seeds = self.seeds[len(seeds) :]
        return [*seeds, *self._draw_sentences(count - len(seeds))]

    def _draw_sentences(self, count: int) -> list[TokenIds]:
        """Returns sentences of words that may stand where they do, as the prior believes them;
        without a prior that can tell, by the words' own weights.

        Each holds one of the words whose only position is known, if any is left.
        """
        prefix, suffix = self.vocabulary.prefix, self.vocabulary.suffix
        rows, going = [list(prefix) for _ in range(count)], list(range(count))
        held = [self._draw_placed() for _ in range(count)]
        end = suffix[0] if suffix else -1
        for place in range(len(prefix), self.choices.longest):
            if not going:
                break
            likely = self._ask_prior([rows[row] for row in going])
            choices, weights = self.choices.words[place], self.choices.weights[place]
            last = place >= self.choices.longest - len(suffix)
            may_end = place >= max(SHORTEST - 1, len(prefix) + 1)
            ends = float(self.choices.ends[place]) if may_end else 0.0
            options = torch.cat([choices, torch.tensor([end])])
            odds = torch.cat([weights * (not last), torch.tensor([1.0 if last else ends])])
            table = odds.expand(len(going), -1)
            if likely is not None and end >= 0:
                table = table * likely[:, options].double().exp()
            table = table.clamp_min(1e-300) * (odds > 0)
            drawn = torch.rand(len(going), generator=self.generator, dtype=torch.float64)
            chosen = options[pick(table, drawn)].tolist()
            for row, word in zip(going, chosen, strict=True):
                known = held[row].get(place)
                before = not last and any(place < at for at in held[row])
                if known is None and word == end and before:  # no end before the word it holds
                    known = int(choices[pick(weights[None], drawn[:1])])
                rows[row].append(word if known is None or last else known)
            going = [row for row in going if rows[row][-1] != end]
        return [
            (*row[: row.index(end)], *suffix) if end in row else (*row, *suffix) for row in rows
        ]

    def _draw_placed(self) -> dict[int, int]:
        """Draws a place and the word that stands there and nowhere else."""
        placed = [(at, word) for word, at in self.placed.items() if at < self.choices.longest - 1]
        return dict([placed[self._draw(len(placed))]]) if placed else {}

    def _ask_prior(self, rows: Sequence[Sequence[int]]) -> Float[Tensor, "rows words"] | None:
        if not rows[0]:
            return None
        found = self.bench.words.next_words(torch.tensor(rows, device=self.target.device))
        return None if found is None else found.cpu()

    def _make_choices(self) -> Choices:
        """Says which words may stand where, after what was taken out."""
        rows = self.account.rows
        assert rows is not None
        around = {*self.vocabulary.prefix, *self.vocabulary.suffix, self.vocabulary.pad}
        inside = torch.tensor([word not in around for word in rows.words.tolist()])
        live = (rows.kept > 0) & inside
        placed = torch.tensor([rows.placed.get(word, -1) for word in rows.words.tolist()])
        words, weights, count = list[Tensor](), list[Tensor](), max(rows.positions, SHORTEST)
        for place in range(count):
            may = live & ((placed < 0) | (placed == place))
            may = may if bool(may.any()) else live
            words.append(rows.words[may])
            shares = rows.shares[may, min(place, rows.shares.shape[1] - 1)]
            weights.append((shares + UNLIKELY).double())
        self.placed = {
            word: place
            for word, place in rows.placed.items()
            if word not in around and place >= len(self.vocabulary.prefix)
        }
        self.allowed = []
        for some in words:
            mark = torch.zeros(len(self.vocabulary.embeddings), dtype=torch.bool)
            mark[some] = True
            self.allowed.append(mark)
        ends = torch.full((count,), UNLIKELY, dtype=torch.float64)
        for row, word in enumerate(rows.words.tolist()):
            if word in self.vocabulary.suffix[:1]:
                # Shares are of one word's row; an end stands in every sentence that is left.
                ends += self.account.directions * rows.shares[row, :count]
        return Choices(words, weights, ends)

    def _draw(self, count: int) -> int:
        return int(torch.randint(max(count, 1), (1,), generator=self.generator))

    def _draw_word(self, place: int) -> int:
        drawn = torch.rand(1, generator=self.generator, dtype=torch.float64)
        return int(self.choices.words[place][pick(self.choices.weights[place][None], drawn)])


def _put(words: TokenIds, place: int, word: int) -> TokenIds:
    return (*words[:place], word, *words[place + 1 :])


def _measure_overlap(words: TokenIds, other: TokenIds) -> float:
    """Returns the share of the shorter sentence's tokens that the other has too."""
    return (Counter(words) & Counter(other)).total() / min(len(words), len(other))


def _merge(climb: Climb, scored: Sequence[tuple[float, TokenIds]]) -> list[TokenIds]:
    """Returns the exchanges of one word that help, the best two together, the best three …"""
    places = dict[int, int]()
    merged, words = list[TokenIds](), climb.words
    for score, changed in sorted(scored):
        if score >= climb.score - LESS or len(places) == MERGED:
            break
        if len(changed) != len(words):
            continue
        apart = [place for place, word in enumerate(changed) if word != climb.words[place]]
        if len(apart) != 1 or apart[0] in places:
            continue
        places[apart[0]] = changed[apart[0]]
        words = _put(words, apart[0], changed[apart[0]])
        if len(places) > 1:
            merged.append(words)
    return merged
