"""Gradients of single sentences in double precision, never as matrices: what a certificate is
computed from.

The gradient of a linear layer is Σ_t δ_t x_tᵀ. Two such gradients have the product Σ_{t,s}
(δ_t·δ_s)(x_t·x_s), and one with an observed matrix G has Σ_t δ_tᵀ G x_t. So how far any weighted
sum of sentences' gradients is from what was seen follows from small tables of products, tensor by
tensor, for the whole of every tensor. Word embeddings are among them, since sentences are given as
words; so is a table that predicts words too, whose gradient is the sum of both. What has no such
form (other tied weights, unknown modules) is left to autograd, one sentence at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.core.batch import Batch
from gradleak.core.parts import Part
from gradleak.core.target import Target
from gradleak.matching.kinds import (
    Kind,
    Slopes,
    Use,
    call_shapes,
    capture_calls,
    compute_terms,
    copy_parameters,
    differentiate_each,
    find_slopes,
    kind_of,
    leave_out_padding,
    owners_of,
)

ROWS_AT_ONCE = 1024  # of an observed matrix, turned to double precision
PRODUCTS_AT_ONCE = 2**23  # of tokens with tokens
KNOWN = (Kind.LINEAR, Kind.CONV1D, Kind.LAYER_NORM, Kind.RMS_NORM, Kind.EMBEDDING)


Same = TypeVar("Same", bound="Gradients")


class Gradients(ABC):
    """One tensor's gradients, of several sentences."""

    @abstractmethod
    def along(self, observed: Tensor) -> Float[Tensor, "sentences"]:
        """Returns their products with a tensor that was seen."""

    @abstractmethod
    def products(self: Same, other: Same) -> Float[Tensor, "sentences others"]:
        """Returns their products with those of other sentences, in the same tensor."""

    @abstractmethod
    def summands(self) -> Float[Tensor, "sentences"]:
        """Returns the sizes of the terms each is a sum of: what rounding is relative to, also where
        terms cancel."""

    @abstractmethod
    def take(self, rows: Int[Tensor, "some"]) -> "Gradients":
        """Returns those of some sentences."""

    @abstractmethod
    def pair_up(self: Same, other: Same) -> Float[Tensor, "sentences"]:
        """Returns the product of each with the other's at the same place; with itself, the squared
        norms."""


@dataclass(frozen=True, eq=False)
class OuterSums(Gradients):
    """Σ_t δ_t x_tᵀ of a linear layer; of Conv1D the tensor is the transpose."""

    inputs: Float[Tensor, "sentences tokens inputs"]
    deltas: Float[Tensor, "sentences tokens outputs"]
    turned: bool

    def along(self, observed: Tensor) -> Float[Tensor, "sentences"]:
        matrix = observed.mT if self.turned else observed
        found = self.inputs.new_zeros(len(self.inputs))
        pieces = torch.split(matrix, ROWS_AT_ONCE), torch.split(self.deltas, ROWS_AT_ONCE, dim=2)
        for rows, deltas in zip(*pieces, strict=True):
            found = found + ((deltas @ rows.to(deltas.dtype)) * self.inputs).sum((1, 2))
        return found

    def products(self, other: "OuterSums") -> Float[Tensor, "sentences others"]:
        def compare_inputs(some: slice) -> Tensor:
            return torch.einsum("stx,oux->sotu", self.inputs[some], other.inputs)

        return _multiply_by_token(self.deltas, other.deltas, compare_inputs)

    def pair_up(self, other: "OuterSums") -> Float[Tensor, "sentences"]:
        return ((self.inputs @ other.inputs.mT) * (self.deltas @ other.deltas.mT)).sum((1, 2))

    def summands(self) -> Float[Tensor, "sentences"]:
        return torch.sum(self.inputs.norm(dim=2) * self.deltas.norm(dim=2), 1)

    def take(self, rows: Int[Tensor, "some"]) -> "OuterSums":
        return OuterSums(self.inputs[rows], self.deltas[rows], self.turned)


@dataclass(frozen=True, eq=False)
class Lookups(Gradients):
    """Rows of an embedding table: the row of a word is the sum of the δ where it stands."""

    ids: Int[Tensor, "sentences tokens"]
    deltas: Float[Tensor, "sentences tokens width"]

    def along(self, observed: Tensor) -> Float[Tensor, "sentences"]:
        return (observed[self.ids].to(self.deltas.dtype) * self.deltas).sum((1, 2))

    def products(self, other: "Lookups") -> Float[Tensor, "sentences others"]:
        def compare_words(some: slice) -> Tensor:
            return self.ids[some, None, :, None] == other.ids[None, :, None, :]

        return _multiply_by_token(self.deltas, other.deltas, compare_words)

    def pair_up(self, other: "Lookups") -> Float[Tensor, "sentences"]:
        alike = self.ids[:, :, None] == other.ids[:, None, :]
        return ((self.deltas @ other.deltas.mT) * alike).sum((1, 2))

    def summands(self) -> Float[Tensor, "sentences"]:
        return torch.sum(self.deltas.norm(dim=2), 1)

    def take(self, rows: Int[Tensor, "some"]) -> "Lookups":
        return Lookups(self.ids[rows], self.deltas[rows])


@dataclass(frozen=True, eq=False)
class Tied(Gradients):
    """A table of words that are looked up and predicted: the sum of both."""

    read: Lookups
    predicted: OuterSums

    def along(self, observed: Tensor) -> Float[Tensor, "sentences"]:
        return self.read.along(observed) + self.predicted.along(observed)

    def products(self, other: Gradients) -> Float[Tensor, "sentences others"]:
        assert isinstance(other, Tied)
        alike = self.read.products(other.read) + self.predicted.products(other.predicted)
        across = _multiply_across(self.read, other.predicted)
        return alike + across + _multiply_across(other.read, self.predicted).mT

    def pair_up(self, other: Gradients) -> Float[Tensor, "sentences"]:
        assert isinstance(other, Tied)
        alike = self.read.pair_up(other.read) + self.predicted.pair_up(other.predicted)
        across = _pair_across(self.read, other.predicted)
        return alike + across + _pair_across(other.read, self.predicted)

    def summands(self) -> Float[Tensor, "sentences"]:
        return self.read.summands() + self.predicted.summands()

    def take(self, rows: Int[Tensor, "some"]) -> "Tied":
        return Tied(self.read.take(rows), self.predicted.take(rows))


@dataclass(frozen=True, eq=False)
class Vectors(Gradients):
    """Gradients that are short, or that only autograd gives, as they are."""

    values: Float[Tensor, "sentences entries"]
    sizes: Float[Tensor, "sentences"]  # of their terms

    def along(self, observed: Tensor) -> Float[Tensor, "sentences"]:
        return self.values @ observed.flatten().to(self.values.dtype)

    def products(self, other: "Vectors") -> Float[Tensor, "sentences others"]:
        return self.values @ other.values.mT

    def pair_up(self, other: "Vectors") -> Float[Tensor, "sentences"]:
        return (self.values * other.values).sum(1)

    def summands(self) -> Float[Tensor, "sentences"]:
        return self.sizes

    def take(self, rows: Int[Tensor, "some"]) -> "Vectors":
        return Vectors(self.values[rows], self.sizes[rows])


_PLANS: "WeakKeyDictionary[Target, dict[tuple[str, ...], ExactGradients]]" = WeakKeyDictionary()


def gradients_of(target: Target, names: tuple[str, ...]) -> "ExactGradients":
    """Computes gradients of these parts of a model; how is found out once and kept for as long
    as the model is."""
    plans = _PLANS.setdefault(target, {})
    if names not in plans:
        plans[names] = ExactGradients(target, [target.part(name) for name in names])
    return plans[names]


class ExactGradients:
    """Computes the gradients of sentences in the visible parts of one model, in double precision
    or the client's own."""

    def __init__(self, target: Target, parts: Sequence[Part]) -> None:
        self._target = ref(target)  # plans are kept by target, and must not keep it
        self.parts = tuple(parts)
        shapes, owners = call_shapes(target), owners_of(target.module)
        words = set(target.groups["word_embedding"])
        self.places: dict[str, tuple[str, Kind]] = {}  # by part: its module, and that module's kind
        self.tied: dict[str, tuple[str, str]] = {}  # by part: the table, and what predicts words
        for part in self.parts:
            kinds = {
                module: kind_of(target.module.get_submodule(module))
                for module, _ in owners[part.parameter]
                if module in shapes or part.parameter in words
            }
            if len(kinds) < len(owners[part.parameter]):
                continue
            module, *others = sorted(kinds, key=lambda one: kinds[one] is not Kind.EMBEDDING)
            kind = kinds[module]
            if kind in KNOWN and not others:
                assert kind is not None
                self.places[part.name] = (module, kind)
            elif kind is Kind.EMBEDDING and [kinds[one] for one in others] == [Kind.LINEAR]:
                self.tied[part.name] = (module, others[0])
        known = self.places.keys() | self.tied.keys()
        self.by_autograd = tuple(part for part in self.parts if part.name not in known)

    @property
    def target(self) -> Target:
        found = self._target()
        assert found is not None
        return found

    def of(
        self,
        batch: Batch,
        double: bool = True,
        sums: torch.dtype = torch.float64,
        weights: Float[Tensor, "examples"] | None = None,
    ) -> dict[str, Gradients]:
        """Returns, by part, the gradients of each example of a batch of words [examples, tokens],
        in double precision.

        With `double` false they are computed as the client does and turned to double precision
        afterwards, or to that of `sums`.
        """
        return self.with_losses(batch, double, sums, weights)[0]

    def with_losses(
        self,
        batch: Batch,
        double: bool = True,
        sums: torch.dtype = torch.float64,
        weights: Float[Tensor, "examples"] | None = None,
    ) -> tuple[dict[str, Gradients], Float[Tensor, "examples"]]:
        """Returns the same, and the loss of each example; gradients are multiplied by weights."""
        # Rounding is measured as the difference between the two: the client's is of that size.
        target = self.target.in_double if double else self.target
        placed = (module for module, _ in self.places.values())
        names = dict.fromkeys((*placed, *(name for pair in self.tied.values() for name in pair)))
        modules = {name: target.module.get_submodule(name) for name in names}
        copies = copy_parameters(target, self.by_autograd)
        with torch.enable_grad():
            with capture_calls(modules, len(batch.mask)) as noted:
                losses = target.losses(batch.apart, copies)[:, 0]
            weighed = losses if weights is None else losses * weights.to(losses)
            calls = find_slopes(weighed.sum(), noted, again=bool(copies))
            with torch.no_grad():
                found = dict(self._by_form(target, calls, sums))
            return found | dict(self._by_autograd(weighed, copies, sums)), losses.detach()

    def _by_form(
        self, target: Target, calls: Slopes, sums: torch.dtype
    ) -> Iterator[tuple[str, Gradients]]:
        for part in self.parts:
            if part.name in self.tied:
                table, head = self.tied[part.name]
                module = target.module.get_submodule(table)
                read = _take_form(part, module, Kind.EMBEDDING, calls[table], sums)
                predicted = _take_form(part, module, Kind.LINEAR, calls[head], sums)
                assert isinstance(read, Lookups)
                assert isinstance(predicted, OuterSums)
                yield part.name, Tied(read, predicted)
            elif part.name in self.places:
                name, kind = self.places[part.name]
                module = target.module.get_submodule(name)
                yield part.name, _take_form(part, module, kind, calls[name], sums)

    def _by_autograd(
        self, losses: Float[Tensor, "examples"], copies: Mapping[str, Tensor], sums: torch.dtype
    ) -> Iterator[tuple[str, Gradients]]:
        each = differentiate_each(losses, copies)
        for part in self.by_autograd:
            # The terms that autograd summed are not known: the gradient's size stands for theirs.
            values = torch.stack([part.of(one[part.parameter]).flatten() for one in each]).to(sums)
            yield part.name, Vectors(values, values.norm(dim=1))


def _multiply_by_token(
    deltas: Float[Tensor, "sentences tokens width"],
    others: Float[Tensor, "others tokens width"],
    compare_inputs: Callable[[slice], Tensor],
) -> Float[Tensor, "sentences others"]:
    """Returns Σ_{t,s} (δ_t·δ_s)(x_t·x_s) of every two sentences, a few sentences at a time."""
    step = max(1, PRODUCTS_AT_ONCE // (deltas.shape[1] * others.shape[0] * others.shape[1]))
    rows = []
    for start in range(0, len(deltas), step):
        some = slice(start, start + step)
        # For every two sentences a table of tokens with tokens, of which only the sum is kept
        by_deltas = torch.einsum("stx,oux->sotu", deltas[some], others)
        rows.append((compare_inputs(some) * by_deltas).sum((2, 3)))
    return torch.cat(rows)


def _multiply_across(read: Lookups, predicted: OuterSums) -> Float[Tensor, "sentences others"]:
    """Returns products of looked up rows with predicted ones: Σ_{t,u} δ_u[word t] (δ_t·x_u)."""
    others, places = predicted.inputs.shape[:2]
    step = max(1, PRODUCTS_AT_ONCE // (read.ids.shape[1] * others * places))
    rows = []
    for start in range(0, len(read.ids), step):
        some = slice(start, start + step)
        at_words = predicted.deltas[:, :, read.ids[some]]
        products = torch.einsum("stx,oux->oust", read.deltas[some], predicted.inputs)
        rows.append((at_words * products).sum((1, 3)).mT)
    return torch.cat(rows)


def _pair_across(read: Lookups, predicted: OuterSums) -> Float[Tensor, "sentences"]:
    """Returns the same for the pairs at one place."""
    words = read.ids[:, None].expand(-1, predicted.deltas.shape[1], -1)
    products = predicted.inputs @ read.deltas.mT
    return (predicted.deltas.gather(2, words) * products).sum((1, 2))


def _by_token(tensor: Tensor) -> Float[Tensor, "examples tokens width"]:
    return tensor.detach().reshape(len(tensor), -1, tensor.shape[-1])


def _take_form(
    part: Part,
    module: nn.Module,
    kind: Kind,
    used: Sequence[tuple[Use, Tensor]],
    sums: torch.dtype,
) -> Gradients:
    """Returns the gradients of a part from all uses of its module."""
    if part.parameter.endswith("bias") or kind in (Kind.LAYER_NORM, Kind.RMS_NORM):
        terms = [compute_terms(module, kind, part.parameter, *use) for use in used]
        cuts = [part.of(_by_token(one).to(sums)) for one in terms]
        values = torch.stack([cut.sum(1) for cut in cuts]).sum(0)
        return Vectors(values, torch.stack([cut.norm(dim=2).sum(1) for cut in cuts]).sum(0))
    deltas = torch.cat([_by_token(slope) for _, slope in used], dim=1).to(sums)
    if kind is Kind.EMBEDDING:
        ids = torch.cat([use.inputs.reshape(len(use.inputs), -1) for use, _ in used], dim=1)
        return Lookups(ids, leave_out_padding(module, ids, deltas))
    cut = deltas if part.cut is None else part.cut.of(deltas, axis=-1)
    return OuterSums(
        torch.cat([_by_token(use.inputs) for use, _ in used], dim=1).to(sums),
        cut,
        kind is Kind.CONV1D,
    )
