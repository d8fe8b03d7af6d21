"""Guesses one word or one exchange of two words away, and how many of them fit as well.

There are as many as places times words. A word whose own embedding has a gradient, and which stands
nowhere else, is not changed: without it there would be none. Three more sieves leave few of them to
compute, each only ever throwing out what cannot fit. Where the first layer is seen, what a word
would feed it excludes most words (word_sieve.py). Then comes a forward pass, since the rows of a
linear layer's gradient lie in the span of its inputs. For what is left the gradient itself is
computed.

Where the first layer is not seen, or sees nothing of a place, the words tried are those nearest to
the word that is there, which change least, and one far away, which shows a place that does not
matter at all.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.certificate.contributions import (
    Contributions,
    lay_out,
    lay_out_labels,
    multiply_with_seen,
)
from gradleak.attacks.certificate.counting import CLEAR, Occurrences
from gradleak.attacks.certificate.word_sieve import make_word_sieve
from gradleak.core.attack import Bench, Sentences, TokenIds
from gradleak.core.batch import Batch
from gradleak.core.parts import ATTENTION_INPUTS, Part
from gradleak.matching.exact import ExactGradients, Lookups, OuterSums, gradients_of
from gradleak.matching.inputs import ModuleInputs, linear_parts, matrix_of, module_of
from gradleak.matching.linear_algebra import orthonormalise

NEAREST = 2  # words tried at a place of which the first layer tells nothing, and one far away
# Guesses that a forward pass is spent on; of 16 messages of one form there are 21,000.
MOST_FORWARD = 40_000
MOST_EXACT = 600  # guesses whose gradient is computed
TOKENS_AT_ONCE = 2**12
TOO_MANY = "Too many words fit as well as those of the guess for all of them to be tried."
OTHER_LABELS = "Another word might do as well with other labels, which cannot all be tried."
NO_TIME = "There was no time to hold the guess against the update."
# Another label may go with another word: all are tried where there are no more than this.
LABELS_TRIED = 4


@dataclass(frozen=True)
class Neighbour:
    """Other sentences at one or two places of the guess; one copy of each is changed."""

    places: tuple[int, ...]
    sentences: Sentences

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sentences))


class CannotTell(Exception):
    """Says why the guesses next to one were not all tried."""


class Neighbourhood:
    """The guesses next to one that gives back all that was seen."""

    def __init__(
        self, columns: Contributions, count: Occurrences, bench: Bench | None = None
    ) -> None:
        self.columns, self.count, self.bench = columns, count, bench
        self.observation, self.target = columns.observation, columns.observation.target
        self.shares, self.floors = count.shares(), columns.compute_floors(count.scale)
        self.span_floors = columns.compute_span_floors(count.scale)
        self.first = make_word_sieve(columns, count, self.span_floors)

    def count_others(self) -> int:
        """Counts those that fit as well, of those whose gradient was computed.

        Raises CannotTell where not all could be tried.
        """
        changes: list[Neighbour] = []
        for change in self._list_neighbours():
            if len(changes) == MOST_FORWARD:
                raise CannotTell(TOO_MANY)
            changes.append(change)
        left = self._pass_forward(changes)
        if len(left) > MOST_EXACT:
            raise CannotTell(TOO_MANY)
        if left and self.target.labels_are_open:
            raise CannotTell(OTHER_LABELS)
        return sum(misfit <= CLEAR for misfit in self._measure_misfits(left))

    def _list_neighbours(self) -> Iterator[Neighbour]:
        """Yields other words and orders that pass the first sieve."""
        free = [self._list_free_places(sentence) for sentence in self.columns.sentences]
        bound = self._find_bound_words()
        for place, sentence in enumerate(self.columns.sentences):
            for token in free[place]:
                words = () if sentence[token] in bound else self._list_words(place, token)
                for word in words:
                    if word != sentence[token]:
                        yield Neighbour((place,), (_replace_word(sentence, token, word),))
            for one, two in itertools.combinations(free[place], 2):
                if sentence[one] != sentence[two] and self._may_swap(place, one, place, two):
                    swapped = _replace_word(sentence, one, sentence[two])
                    yield Neighbour((place,), (_replace_word(swapped, two, sentence[one]),))
        for place, other in itertools.combinations(range(len(free)), 2):
            here, there = self.columns.sentences[place], self.columns.sentences[other]
            for one, two in itertools.product(free[place], free[other]):
                if here[one] != there[two] and self._may_swap(place, one, other, two):
                    new_here = _replace_word(here, one, there[two])
                    new_there = _replace_word(there, two, here[one])
                    # Two sentences that became each other are the same batch.
                    if {new_here, new_there} != {here, there}:
                        yield Neighbour((place, other), (new_here, new_there))

    def _find_bound_words(self) -> set[int]:
        """Finds words that stand at one place only and whose embedding has a gradient.

        Without them that gradient would be zero.
        """
        pairs = zip(self.columns.sentences, self.count.totals, strict=True)
        counts = Counter(word for sentence, total in pairs for word in total * sentence)
        alone = [word for word, count in counts.items() if count == 1]
        bound: set[int] = set()
        for name in self.target.groups["word_embedding"]:
            tensor = self.observation.update.tensors.get(name)
            if tensor is not None and isinstance(self.columns.gradients[name], Lookups):
                sizes = tensor[0][alone].double().norm(dim=1) / self.observation.gradient_scale
                floor = CLEAR * float(self.floors[self.columns.names.index(name)])
                sized = zip(alone, sizes.tolist(), strict=True)
                bound |= {word for word, size in sized if size > floor}
        return bound

    def _list_free_places(self, sentence: TokenIds) -> range:
        vocabulary = self.target.vocabulary
        before, after = vocabulary.prefix, vocabulary.suffix
        start = len(before) if sentence[: len(before)] == before else 0
        framed = bool(after) and sentence[len(sentence) - len(after) :] == after
        return range(start, len(sentence) - len(after) if framed else len(sentence))

    def _list_words(self, place: int, token: int) -> list[int]:
        """Lists words that may stand at a place instead."""
        if self.first is not None and self.first.sees(place, token):
            return self.first.list_words(place, token)
        return self._list_probes(self.columns.sentences[place][token])

    def _list_probes(self, word: int) -> list[int]:
        """Lists the nearest words by their embeddings, and one in the middle of all.

        In a language model those it predicts with count too.
        """
        allowed = self.target.vocabulary.allowed.nonzero()[:, 0]
        allowed = allowed[allowed != word]
        found: list[int] = []
        for table in self._list_tables():
            order = (table[allowed] - table[word]).square().sum(1).argsort()
            found += [int(allowed[place]) for place in (*order[:NEAREST], order[len(order) // 2])]
        return list(dict.fromkeys(found))

    def _list_tables(self) -> list[Float[Tensor, "words _"]]:
        read = self.target.vocabulary.embeddings
        predicts = getattr(self.target.module, "get_output_embeddings", None)
        output = predicts() if self.target.labels_are_tokens and predicts is not None else None
        if output is None or output.weight.shape[0] != len(read):
            return [read]
        return [read, output.weight]

    def _may_swap(self, place: int, one: int, other: int, two: int) -> bool:
        first, sentences = self.first, self.columns.sentences
        if first is None or not first.sees(place, one) or not first.sees(other, two):
            return True
        mine, theirs = sentences[place][one], sentences[other][two]
        return first.may_stand(theirs, place, one) and first.may_stand(mine, other, two)

    # The second sieve

    def _pass_forward(self, changes: Sequence[Neighbour]) -> list[Neighbour]:
        """Keeps neighbours whose deeper inputs can explain that layer's gradient."""
        parts = self._find_mixed_parts()
        if not parts or not changes:
            return list(changes)
        inputs = ModuleInputs(self.target, parts[:1])
        tensors, scale = self.observation.update.tensors, self.observation.gradient_scale
        matrices = [matrix_of(self.target, part, tensors[part.name])[0] for part in parts]
        seen = torch.cat(matrices).double() / scale
        floor = float(torch.tensor([self._find_floor(part) for part in parts]).norm())
        # What unchanged sentences feed in explains its part in any case: it is taken out of both
        # sides, and the changed ones have to explain the rest.
        kept = self._feed(inputs, self.columns.sentences)
        left: list[Neighbour] = []
        shapes: dict[tuple[tuple[int, ...], int], list[Neighbour]] = {}
        for change in changes:
            shapes.setdefault((change.places, change.tokens), []).append(change)
        for (places, tokens), alike in shapes.items():
            basis = self._find_basis_of_others(kept, places)
            beside = seen - (seen @ basis) @ basis.mT
            for start in range(0, len(alike), max(1, TOKENS_AT_ONCE // tokens)):
                if self.bench is not None and self.bench.out_of_time:
                    raise CannotTell(NO_TIME)
                some = alike[start : start + max(1, TOKENS_AT_ONCE // tokens)]
                fed = self._feed(inputs, [one for change in some for one in change.sentences])
                starts = range(0, len(fed), len(places))
                rows = torch.stack([torch.cat(fed[at : at + len(places)]) for at in starts])
                missed = _measure_unexplained(beside, rows - (rows @ basis) @ basis.mT)
                pairs = zip(some, missed.tolist(), strict=True)
                left += [change for change, miss in pairs if miss <= CLEAR * floor]
        return left

    def _find_mixed_parts(self) -> list[Part]:
        """Finds visible linear modules, fed by one tensor, where tokens have just mixed."""
        linear = linear_parts(self.target, list(self.observation.update.tensors))
        mixed = [
            part for part in linear if (part.layer or 0) > 1 or part.module not in ATTENTION_INPUTS
        ]
        mixed = [part for part in mixed if isinstance(self.columns.gradients[part.name], OuterSums)]
        if not mixed:
            return []
        order = (*ATTENTION_INPUTS, "attention_output", "ffn_in", "ffn_out")
        ranks = {module: rank for rank, module in enumerate(order)}
        first = min(mixed, key=lambda part: (part.layer or 0, ranks.get(part.module, 9)))
        alike = ATTENTION_INPUTS if first.module in ATTENTION_INPUTS else (first.module,)
        return [
            part
            for part in mixed
            if part.layer == first.layer and part.module in alike and _share_inputs(part, first)
        ]

    def _find_floor(self, part: Part) -> float:
        return float(self.span_floors[self.columns.names.index(part.name)])

    @torch.no_grad()
    def _feed(
        self, inputs: ModuleInputs, sentences: Sequence[TokenIds]
    ) -> list[Float[Tensor, "tokens width"]]:
        batch = lay_out_labels(self.target, tuple(sentences), 1, self.columns.width)
        rows = next(iter(inputs(batch).values())).double()
        if self.target.attend_padding:
            return list(rows)
        return [row[: len(sentence)] for row, sentence in zip(rows, sentences, strict=True)]

    def _find_basis_of_others(
        self, kept: Sequence[Tensor], changed: tuple[int, ...]
    ) -> Float[Tensor, "width rank"]:
        """Finds a basis of what all other sentences feed in.

        The changed ones are among them where they are there twice.
        """
        totals = self.count.totals
        rows = [fed for place, fed in enumerate(kept) if place not in changed or totals[place] > 1]
        if not rows:
            return kept[0].new_zeros(kept[0].shape[1], 0)
        return orthonormalise(torch.cat(rows).mT)

    # The last

    def _measure_misfits(self, changes: Sequence[Neighbour]) -> Iterator[float]:
        """Measures how far each is from what was seen at its best weight, in floors."""
        if not changes:
            return
        exact = gradients_of(self.target, self.columns.names)
        longest = max(len(sentence) for change in changes for sentence in change.sentences)
        step = max(1, TOKENS_AT_ONCE // (2 * longest))
        for start in range(0, len(changes), step):
            some = changes[start : start + step]
            shifts = self._list_label_shifts()
            found = [self._measure_distances(some, exact, shift) for shift in shifts]
            yield from torch.stack(found).amin(0).tolist()

    def _list_label_shifts(self) -> range:
        """Lists by how much the label of a changed sentence may move on.

        Where there are two labels the sign of a sentence's weight stands for the other.
        """
        labels = self.columns.labels
        return range(labels) if 2 < labels <= LABELS_TRIED else range(1)

    def _measure_distances(
        self, changes: Sequence[Neighbour], exact: ExactGradients, shift: int
    ) -> Float[Tensor, "changes"]:
        columns = self.columns
        flat = [
            (place, sentence)
            for change in changes
            for place, sentence in zip(change.places, change.sentences, strict=True)
        ]
        batch = self._lay_out_neighbours(flat, shift)
        weights = columns.weights
        if weights is not None:
            weights = weights[[self._find_column(place) for place, _ in flat]]
        made = exact.of(batch, weights=weights)
        # A change of one sentence has one new column, one of two has two: `owner` says whose
        # each is, `firsts` and `lasts` where a change's own begin and end.
        counts = torch.tensor([len(change.places) for change in changes])
        owner = torch.arange(len(changes)).repeat_interleave(counts)
        lasts = counts.cumsum(0) - 1
        firsts = lasts - counts + 1
        kept = self.shares.repeat(len(changes), 1)
        for row, change in enumerate(changes):
            for place in change.places:
                kept[row, self._find_column(place)] -= self.count.scale / self.count.size
        zeros = torch.zeros(len(changes), dtype=torch.float64)
        squares, products, left = [], [], []
        for number, name in enumerate(columns.names):
            gradients = made[name]
            along = multiply_with_seen(self.observation, name, gradients)
            across = gradients.products(columns.gradients[name]).cpu()
            inner = along - (across * kept[owner]).sum(1)
            products.append(zeros.index_add(0, owner, inner))
            # ‖a + b‖² = ‖a‖² + ‖b‖² + 2 a·b of a change of two sentences
            own = zeros.index_add(0, owner, gradients.pair_up(gradients).cpu())
            twice = gradients.take(firsts).pair_up(gradients.take(lasts)).cpu()
            squares.append(own + 2 * twice * (firsts != lasts))
            across_kept = ((kept @ columns.products[number]) * kept).sum(1)
            seen = columns.seen_squared[number]
            left.append(seen - 2 * kept @ columns.along[number] + across_kept)
        inner, square, rest = (torch.stack(parts) for parts in (products, squares, left))
        # The weight of the new columns that fits best, by least squares over all tensors in floors
        weights = 1 / self.floors.square()[:, None]
        best = (weights * inner).sum(0) / (weights * square).sum(0).clamp_min(1e-300)
        distances = (rest - 2 * best * inner + best.square() * square).clamp_min(0).sqrt()
        return (distances / self.floors[:, None]).amax(0)

    def _find_column(self, place: int) -> int:
        """Returns the column of a sentence with the label it has most often."""
        numbers = self.count.numbers[place]
        return place * self.columns.labels + max(range(len(numbers)), key=numbers.__getitem__)

    def _lay_out_neighbours(self, flat: Sequence[tuple[int, TokenIds]], shift: int) -> Batch:
        count = self.columns.labels
        labels = [(self._find_column(place) % count + shift) % count for place, _ in flat]
        return lay_out(self.target, [sentence for _, sentence in flat], labels, self.columns.width)


def _measure_unexplained(
    seen: Float[Tensor, "outputs width"], rows: Float[Tensor, "changes tokens width"]
) -> Float[Tensor, "changes"]:
    """Measures the norm of what was seen outside the span of each neighbour's inputs."""
    # No ridge: it would leave out what weak inputs explain.
    inside = (seen @ orthonormalise(rows.mT)).square().sum((-1, -2))
    return (seen.square().sum() - inside).clamp_min(0).sqrt()


def _replace_word(sentence: TokenIds, place: int, word: int) -> TokenIds:
    return (*sentence[:place], word, *sentence[place + 1 :])


def _share_inputs(part: Part, other: Part) -> bool:
    return module_of(part).rpartition(".")[0] == module_of(other).rpartition(".")[0]
