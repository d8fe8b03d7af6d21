"""Guesses one word or one exchange of two words away, and how many of them give back what was seen as well.

There are as many as places times words. A word whose own embedding has a gradient, and which stands nowhere else, is not changed:
without it there would be none. Three more sieves leave few of them to compute, each only ever throwing out what cannot fit:
where the first layer is seen, what a word would feed it (first_layer.py); then a forward pass, since the rows of a linear layer's
gradient lie in the span of its inputs; and for what is left the gradient itself. Where the first layer is not seen, or sees
nothing of a place, the words tried are those nearest to the word that is there, which change least, and one far away, which shows
a place that does not matter at all.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.certificate.columns import Columns, along_seen, batch_of, lay_out
from gradleak.attacks.certificate.counting import CLEAR, Count
from gradleak.attacks.certificate.first_layer import first_layer_of
from gradleak.core.attack import Bench, Sentences
from gradleak.core.batch import Batch
from gradleak.core.parts import FUSED, Part
from gradleak.matching.exact import ExactGradients, Lookups, OuterSums, gradients_of
from gradleak.matching.inputs import ModuleInputs, linear_parts, matrix_of, module_of
from gradleak.matching.linear_algebra import orthonormalise

NEAREST = 2  # words tried at a place of which the first layer tells nothing, and one far away
MOST_FORWARD = 40_000  # guesses that a forward pass is spent on; of 16 messages of one form there are 21,000
MOST_EXACT = 600  # guesses whose gradient is computed
TOKENS_AT_ONCE = 2**12
TOO_MANY = "Too many words fit as well as those of the guess for all of them to be tried."
NO_TIME = "There was no time to hold the guess against the update."
LABELS_TRIED = 4  # another label may go with another word: all are tried where there are no more than this
UNMIXED = ("query", "key", "value", FUSED)

Sentence = tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """Other sentences at one or two places of the guess; one copy of each is changed."""

    places: tuple[int, ...]
    sentences: Sentences

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sentences))


class CannotTell(Exception):
    """Why the guesses next to one were not all tried."""


class Neighbourhood:
    """The guesses next to one that gives back all that was seen."""

    def __init__(self, columns: Columns, count: Count, bench: Bench | None = None) -> None:
        self.columns, self.count, self.bench = columns, count, bench
        self.observation, self.target = columns.observation, columns.observation.target
        self.shares, self.floors = count.shares(), columns.floors(count.scale)
        self.first = first_layer_of(columns, count, self.floors)

    def others(self) -> int:
        """How many of them fit as well, of those whose gradient was computed. Where not all could be tried it cannot tell."""
        changes: list[Change] = []
        for change in self._changes():
            if len(changes) == MOST_FORWARD:
                raise CannotTell(TOO_MANY)
            changes.append(change)
        left = self._after_forward(changes)
        if len(left) > MOST_EXACT:
            raise CannotTell(TOO_MANY)
        return sum(misfit <= CLEAR for misfit in self._misfits(left))

    def _changes(self) -> Iterator[Change]:
        """Other words and orders that pass the first sieve."""
        free = [self._free(sentence) for sentence in self.columns.sentences]
        bound = self._bound_words()
        for place, sentence in enumerate(self.columns.sentences):
            for token in free[place]:
                words = () if sentence[token] in bound else self._words(place, token)
                yield from (Change((place,), (_exchanged(sentence, token, word),)) for word in words if word != sentence[token])
            for one, two in itertools.combinations(free[place], 2):
                if sentence[one] != sentence[two] and self._may_swap(place, one, place, two):
                    swapped = _exchanged(_exchanged(sentence, one, sentence[two]), two, sentence[one])
                    yield Change((place,), (swapped,))
        for place, other in itertools.combinations(range(len(free)), 2):
            here, there = self.columns.sentences[place], self.columns.sentences[other]
            for one, two in itertools.product(free[place], free[other]):
                if here[one] != there[two] and self._may_swap(place, one, other, two):
                    changed = (_exchanged(here, one, there[two]), _exchanged(there, two, here[one]))
                    if set(changed) != {here, there}:  # the two sentences themselves, the other way round
                        yield Change((place, other), changed)

    def _bound_words(self) -> set[int]:
        """Words that stand at one place of the batch and whose embedding has a gradient: without them it would be zero."""
        pairs = zip(self.columns.sentences, self.count.totals, strict=True)
        counts = Counter(word for sentence, total in pairs for word in total * sentence)
        alone = [word for word, count in counts.items() if count == 1]
        bound: set[int] = set()
        for name in self.target.groups["word_embedding"]:
            tensor = self.observation.update.tensors.get(name)
            if tensor is not None and isinstance(self.columns.gradients[name], Lookups):
                sizes = tensor[0][alone].double().norm(dim=1) / self.observation.gradient_scale
                floor = CLEAR * float(self.floors[self.columns.names.index(name)])
                bound |= {word for word, size in zip(alone, sizes.tolist(), strict=True) if size > floor}
        return bound

    def _free(self, sentence: Sentence) -> range:
        vocabulary = self.target.vocabulary
        before, after = vocabulary.prefix, vocabulary.suffix
        start = len(before) if sentence[: len(before)] == before else 0
        framed = bool(after) and sentence[len(sentence) - len(after) :] == after
        return range(start, len(sentence) - len(after) if framed else len(sentence))

    def _words(self, place: int, token: int) -> list[int]:
        """Words that may stand at a place instead."""
        if self.first is not None and self.first.sees(place, token):
            return self.first.words(place, token)
        return self._probes(self.columns.sentences[place][token])

    def _probes(self, word: int) -> list[int]:
        """The nearest words by their embeddings, and one in the middle of all; by those a language model predicts with too."""
        allowed = self.target.vocabulary.allowed.nonzero()[:, 0]
        allowed = allowed[allowed != word]
        found: list[int] = []
        for table in self._tables():
            order = (table[allowed] - table[word]).square().sum(1).argsort()
            found += [int(allowed[place]) for place in (*order[:NEAREST], order[len(order) // 2])]
        return list(dict.fromkeys(found))

    def _tables(self) -> list[Float[Tensor, "words _"]]:
        read, predicts = self.target.vocabulary.embeddings, getattr(self.target.module, "get_output_embeddings", None)
        output = predicts() if self.target.labels_are_tokens and predicts is not None else None
        return [read] if output is None or output.weight.shape[0] != len(read) else [read, output.weight]

    def _may_swap(self, place: int, one: int, other: int, two: int) -> bool:
        first, sentences = self.first, self.columns.sentences
        if first is None or not first.sees(place, one) or not first.sees(other, two):
            return True
        return first.may_stand(sentences[other][two], place, one) and first.may_stand(sentences[place][one], other, two)

    # The second sieve

    def _after_forward(self, changes: Sequence[Change]) -> list[Change]:
        """Changes whose inputs of a layer where tokens have mixed can explain that layer's gradient."""
        parts = self._mixed_parts()
        if not parts or not changes:
            return list(changes)
        inputs = ModuleInputs(self.target, parts[:1])
        tensors, scale = self.observation.update.tensors, self.observation.gradient_scale
        seen = torch.cat([matrix_of(self.target, part, tensors[part.name])[0] for part in parts]).double() / scale
        floor = float(torch.tensor([self._floor(part) for part in parts]).norm())
        kept = self._fed(inputs, self.columns.sentences)
        left: list[Change] = []
        for places, tokens in dict.fromkeys((change.places, change.tokens) for change in changes):
            alike = [change for change in changes if (change.places, change.tokens) == (places, tokens)]
            basis = self._basis_of_others(kept, places)
            beside = seen - (seen @ basis) @ basis.mT
            for start in range(0, len(alike), max(1, TOKENS_AT_ONCE // tokens)):
                if self.bench is not None and self.bench.out_of_time:
                    raise CannotTell(NO_TIME)
                some = alike[start : start + max(1, TOKENS_AT_ONCE // tokens)]
                fed = self._fed(inputs, [sentence for change in some for sentence in change.sentences])
                rows = torch.stack([torch.cat(fed[at : at + len(places)]) for at in range(0, len(fed), len(places))])
                missed = _unexplained(beside, rows - (rows @ basis) @ basis.mT)
                left += [change for change, miss in zip(some, missed.tolist(), strict=True) if miss <= CLEAR * floor]
        return left

    def _mixed_parts(self) -> list[Part]:
        """The visible linear modules of the earliest place where tokens have mixed that are fed by one tensor."""
        linear = linear_parts(self.target, list(self.observation.update.tensors))
        mixed = [part for part in linear if (part.layer or 0) > 1 or part.module not in UNMIXED]
        mixed = [part for part in mixed if isinstance(self.columns.gradients[part.name], OuterSums)]
        if not mixed:
            return []
        order = ("query", "key", "value", FUSED, "attention_output", "ffn_in", "ffn_out")
        first = min(mixed, key=lambda part: (part.layer or 0, order.index(part.module) if part.module in order else 9))
        alike = UNMIXED if first.module in UNMIXED else (first.module,)
        return [part for part in mixed if part.layer == first.layer and part.module in alike and _same_inputs(part, first)]

    def _floor(self, part: Part) -> float:
        return float(self.floors[self.columns.names.index(part.name)])

    @torch.no_grad()
    def _fed(self, inputs: ModuleInputs, sentences: Sequence[Sentence]) -> list[Float[Tensor, "tokens width"]]:
        batch = batch_of(self.target, tuple(sentences), 1, self.columns.width)
        rows = next(iter(inputs(batch).values())).double()
        read = [rows.shape[1] if self.target.attend_padding else len(sentence) for sentence in sentences]
        return [row[:tokens] for row, tokens in zip(rows, read, strict=True)]

    def _basis_of_others(self, kept: Sequence[Tensor], changed: tuple[int, ...]) -> Float[Tensor, "width rank"]:
        """An orthonormal basis of what all other sentences feed in, and the changed ones where they are there twice."""
        totals = self.count.totals
        rows = [fed for place, fed in enumerate(kept) if place not in changed or totals[place] > 1]
        if not rows:
            return kept[0].new_zeros(kept[0].shape[1], 0)
        return orthonormalise(torch.cat(rows).mT)

    # The last

    def _misfits(self, changes: Sequence[Change]) -> Iterator[float]:
        """How far each is from what was seen at the best weight it can have, in floors."""
        if not changes:
            return
        exact = gradients_of(self.target, self.columns.names)
        longest = max(len(sentence) for change in changes for sentence in change.sentences)
        step = max(1, TOKENS_AT_ONCE // (2 * longest))
        for start in range(0, len(changes), step):
            some = changes[start : start + step]
            found = [self._distances(some, exact, shift) for shift in self._other_labels()]
            yield from torch.stack(found).amin(0).tolist()

    def _other_labels(self) -> range:
        """By how much the label of a changed sentence moves on: where there are two the sign of its weight stands for it."""
        labels = self.columns.labels
        return range(labels) if 2 < labels <= LABELS_TRIED else range(1)

    def _distances(self, changes: Sequence[Change], exact: ExactGradients, shift: int) -> Float[Tensor, "changes"]:
        columns = self.columns
        flat = [(place, sentence) for change in changes for place, sentence in zip(change.places, change.sentences, strict=True)]
        batch = self._labelled(flat, shift)
        made = exact.of(batch)
        owner = torch.tensor([row for row, change in enumerate(changes) for _ in change.places])
        firsts = torch.tensor([number for number, row in enumerate(owner.tolist()) if row not in owner.tolist()[:number]])
        lasts = torch.tensor([len(owner) - 1 - owner.flip(0).tolist().index(row) for row in range(len(changes))])
        kept = self.shares.repeat(len(changes), 1)
        for row, change in enumerate(changes):
            for place in change.places:
                kept[row, self._column(place)] -= self.count.scale / self.count.size
        squares, products, left = [], [], []
        for number, name in enumerate(columns.names):
            gradients = made[name]
            along = along_seen(self.observation, name, gradients)
            across = gradients.products(columns.gradients[name]).cpu()
            inner = along - (across * kept[owner]).sum(1)
            products.append(torch.zeros(len(changes), dtype=torch.float64).index_add(0, owner, inner))
            own = torch.zeros(len(changes), dtype=torch.float64).index_add(0, owner, gradients.paired(gradients).cpu())
            twice = gradients.take(firsts).paired(gradients.take(lasts)).cpu()
            squares.append(own + 2 * twice * (firsts != lasts))
            table = columns.products[number]
            left.append(columns.seen_squared[number] - 2 * kept @ columns.along[number] + ((kept @ table) * kept).sum(1))
        inner, square, rest = (torch.stack(parts) for parts in (products, squares, left))
        weights = 1 / self.floors.square()[:, None]
        best = (weights * inner).sum(0) / (weights * square).sum(0).clamp_min(1e-300)
        distances = (rest - 2 * best * inner + best.square() * square).clamp_min(0).sqrt()
        return (distances / self.floors[:, None]).amax(0)

    def _column(self, place: int) -> int:
        """The column of a sentence with the label it has most often."""
        numbers = self.count.numbers[place]
        return place * self.columns.labels + max(range(len(numbers)), key=numbers.__getitem__)

    def _labelled(self, flat: Sequence[tuple[int, Sentence]], shift: int) -> Batch:
        count = self.columns.labels
        labels = [(self._column(place) % count + shift) % count for place, _ in flat]
        return lay_out(self.target, [sentence for _, sentence in flat], labels, self.columns.width)


def _unexplained(seen: Float[Tensor, "outputs width"], rows: Float[Tensor, "changes tokens width"]) -> Float[Tensor, "changes"]:
    """The norm of what was seen outside the span of each change's inputs."""
    inside = (seen @ orthonormalise(rows.mT)).square().sum((-1, -2))  # no ridge: it would leave out what weak inputs explain
    return (seen.square().sum() - inside).clamp_min(0).sqrt()


def _exchanged(sentence: Sentence, place: int, word: int) -> Sentence:
    return (*sentence[:place], word, *sentence[place + 1 :])


def _same_inputs(part: Part, other: Part) -> bool:
    return module_of(part).rpartition(".")[0] == module_of(other).rpartition(".")[0]
