"""Gradients of single sentences in double precision, never as matrices: what a certificate is
computed from.

The gradient of a linear layer is Σ_t δ_t x_tᵀ. Two such gradients have the product Σ_{t,s}
(δ_t·δ_s)(x_t·x_s), and one with an observed matrix G has Σ_t δ_tᵀ G x_t. So how far any weighted
sum of sentences' gradients is from what was seen follows from small tables of products, tensor by
tensor, for the whole of every tensor. Word embeddings are among them, since sentences are given as
words. What has no such form (tied weights, unknown modules) is left to autograd, one sentence at a
time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.core.batch import Batch
from gradleak.core.parts import Part
from gradleak.core.target import Target
from gradleak.matching.capture import Slopes, call_shapes, capture_calls, find_slopes
from gradleak.matching.kinds import Kind, Use, compute_terms, kind_of, leave_out_padding, owners_of

ROWS_AT_ONCE = 1024  # of an observed matrix, turned to double precision
PRODUCTS_AT_ONCE = 2**23  # of tokens with tokens
KNOWN = (Kind.LINEAR, Kind.CONV1D, Kind.LAYER_NORM, Kind.RMS_NORM, Kind.EMBEDDING)


class Gradients(ABC):
    """One tensor's gradients, of several sentences."""

    @abstractmethod
    def along(self, observed: Tensor) -> Float[Tensor, "sentences"]:
        """Returns their products with a tensor that was seen."""

    @abstractmethod
    def products(self, other: "Gradients") -> Float[Tensor, "sentences others"]:
        """Returns their products with those of other sentences, in the same tensor."""

    @abstractmethod
    def summands(self) -> Float[Tensor, "sentences"]:
        """Returns the sizes of the terms each is a sum of: what rounding is relative to, also where
        terms cancel."""

    @abstractmethod
    def take(self, rows: Int[Tensor, "some"]) -> "Gradients":
        """Returns those of some sentences."""

    @abstractmethod
    def pair_up(self, other: "Gradients") -> Float[Tensor, "sentences"]:
        """Returns the product of each with the other's at the same place; with itself, the squared
        norms."""

    @abstractmethod
    def build(self, shape: tuple[int, ...]) -> Float[Tensor, "sentences *shape"]:
        """Returns them as whole tensors: of few sentences only."""


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

    def products(self, other: Gradients) -> Float[Tensor, "sentences others"]:
        assert isinstance(other, OuterSums)

        def compare_inputs(some: slice) -> Tensor:
            return torch.einsum("stx,oux->sotu", self.inputs[some], other.inputs)

        return _multiply_by_token(self.deltas, other.deltas, compare_inputs)

    def pair_up(self, other: Gradients) -> Float[Tensor, "sentences"]:
        assert isinstance(other, OuterSums)
        return ((self.inputs @ other.inputs.mT) * (self.deltas @ other.deltas.mT)).sum((1, 2))

    def summands(self) -> Float[Tensor, "sentences"]:
        sizes: Tensor = (self.inputs.norm(dim=2) * self.deltas.norm(dim=2)).sum(1)
        return sizes

    def build(self, shape: tuple[int, ...]) -> Float[Tensor, "sentences *shape"]:
        made = self.deltas.mT @ self.inputs
        return made.mT if self.turned else made

    def take(self, rows: Int[Tensor, "some"]) -> "OuterSums":
        return OuterSums(self.inputs[rows], self.deltas[rows], self.turned)


@dataclass(frozen=True, eq=False)
class Lookups(Gradients):
    """Rows of an embedding table: the row of a word is the sum of the δ where it stands."""

    ids: Int[Tensor, "sentences tokens"]
    deltas: Float[Tensor, "sentences tokens width"]

    def along(self, observed: Tensor) -> Float[Tensor, "sentences"]:
        return (observed[self.ids].to(self.deltas.dtype) * self.deltas).sum((1, 2))

    def products(self, other: Gradients) -> Float[Tensor, "sentences others"]:
        assert isinstance(other, Lookups)

        def compare_words(some: slice) -> Tensor:
            return self.ids[some, None, :, None] == other.ids[None, :, None, :]

        return _multiply_by_token(self.deltas, other.deltas, compare_words)

    def pair_up(self, other: Gradients) -> Float[Tensor, "sentences"]:
        assert isinstance(other, Lookups)
        alike = self.ids[:, :, None] == other.ids[:, None, :]
        return ((self.deltas @ other.deltas.mT) * alike).sum((1, 2))

    def summands(self) -> Float[Tensor, "sentences"]:
        sizes: Tensor = self.deltas.norm(dim=2).sum(1)
        return sizes

    def build(self, shape: tuple[int, ...]) -> Float[Tensor, "sentences *shape"]:
        made = self.deltas.new_zeros(len(self.ids), *shape)
        for rows, ids, deltas in zip(made, self.ids, self.deltas, strict=True):
            rows.index_add_(0, ids, deltas)
        return made

    def take(self, rows: Int[Tensor, "some"]) -> "Lookups":
        return Lookups(self.ids[rows], self.deltas[rows])


@dataclass(frozen=True, eq=False)
class Vectors(Gradients):
    """Gradients that are short, or that only autograd gives, as they are."""

    values: Float[Tensor, "sentences entries"]
    sizes: Float[Tensor, "sentences"]  # of their terms

    def along(self, observed: Tensor) -> Float[Tensor, "sentences"]:
        return self.values @ observed.flatten().to(self.values.dtype)

    def products(self, other: Gradients) -> Float[Tensor, "sentences others"]:
        assert isinstance(other, Vectors)
        return self.values @ other.values.mT

    def pair_up(self, other: Gradients) -> Float[Tensor, "sentences"]:
        assert isinstance(other, Vectors)
        return (self.values * other.values).sum(1)

    def summands(self) -> Float[Tensor, "sentences"]:
        return self.sizes

    def build(self, shape: tuple[int, ...]) -> Float[Tensor, "sentences *shape"]:
        return self.values.view(len(self.values), *shape)

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
        for part in self.parts:
            (module, _), *others = owners[part.parameter]
            kind = kind_of(target.module.get_submodule(module))
            reached = module in shapes or part.parameter in words
            if kind in KNOWN and not others and reached:
                assert kind is not None
                self.places[part.name] = (module, kind)
        self.by_autograd = tuple(part for part in self.parts if part.name not in self.places)

    @property
    def target(self) -> Target:
        found = self._target()
        assert found is not None
        return found

    def of(
        self, batch: Batch, double: bool = True, sums: torch.dtype = torch.float64
    ) -> dict[str, Gradients]:
        """Returns, by part, the gradients of each example of a batch of words [examples, tokens],
        in double precision.

        With `double` false they are computed as the client does and turned to double precision
        afterwards, or to that of `sums`.
        """
        return self.with_losses(batch, double, sums)[0]

    def with_losses(
        self, batch: Batch, double: bool = True, sums: torch.dtype = torch.float64
    ) -> tuple[dict[str, Gradients], Float[Tensor, "examples"]]:
        """Returns the same, and the loss of each example."""
        # Rounding is measured as the difference between the two: the client's is of that size.
        target = self.target.in_double if double else self.target
        names = dict.fromkeys(module for module, _ in self.places.values())
        modules = {name: target.module.get_submodule(name) for name in names}
        wholes = dict.fromkeys(part.parameter for part in self.by_autograd)
        copies = {name: target.parameters[name].detach().requires_grad_() for name in wholes}
        with torch.enable_grad():
            with capture_calls(modules, len(batch.mask)) as noted:
                losses = target.losses(batch, copies)
            calls = find_slopes(losses.sum(), noted, again=bool(copies))
            with torch.no_grad():
                found = dict(self._by_form(target, calls, sums))
            return found | dict(self._by_autograd(losses, copies, sums)), losses.detach()

    def _by_form(
        self, target: Target, calls: Slopes, sums: torch.dtype
    ) -> Iterator[tuple[str, Gradients]]:
        for part in self.parts:
            if part.name not in self.places:
                continue
            name, kind = self.places[part.name]
            module, used = target.module.get_submodule(name), calls[name]
            if part.parameter.endswith("bias") or kind in (Kind.LAYER_NORM, Kind.RMS_NORM):
                yield part.name, _short(part, module, kind, used, sums)
                continue
            deltas = _join([_by_token(slope) for _, slope in used]).to(sums)
            if kind is Kind.EMBEDDING:
                ids = _join([use.inputs.reshape(len(use.inputs), -1) for use, _ in used])
                yield part.name, Lookups(ids, leave_out_padding(module, ids, deltas))
                continue
            inputs = _join([_by_token(use.inputs) for use, _ in used]).to(sums)
            cut = deltas if part.cut is None else part.cut.of(deltas, axis=-1)
            yield part.name, OuterSums(inputs, cut, kind is Kind.CONV1D)

    def _by_autograd(
        self, losses: Float[Tensor, "examples"], copies: Mapping[str, Tensor], sums: torch.dtype
    ) -> Iterator[tuple[str, Gradients]]:
        if not copies:
            return
        each = [
            torch.autograd.grad(
                loss, list(copies.values()), retain_graph=True, materialize_grads=True
            )
            for loss in losses
        ]
        places = {name: place for place, name in enumerate(copies)}
        for part in self.by_autograd:
            # The terms that autograd summed are not known: the gradient's size stands for theirs.
            values = torch.stack(
                [part.of(one[places[part.parameter]]).flatten() for one in each]
            ).to(sums)
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


def _join(calls: Sequence[Tensor]) -> Tensor:
    """Returns the tokens of a module's calls one after another; of a single call, uncopied."""
    return calls[0] if len(calls) == 1 else torch.cat(list(calls), dim=1)


def _by_token(tensor: Tensor) -> Float[Tensor, "examples tokens width"]:
    return tensor.detach().reshape(len(tensor), -1, tensor.shape[-1])


def _short(
    part: Part,
    module: nn.Module,
    kind: Kind,
    used: Sequence[tuple[Use, Tensor]],
    sums: torch.dtype,
) -> Vectors:
    """Returns the gradient of a bias or of a norm's weight."""
    terms = [compute_terms(module, kind, part.parameter, *use) for use in used]
    cuts = [part.of(_by_token(one).to(sums)) for one in terms]
    values = torch.stack([cut.sum(1) for cut in cuts]).sum(0)
    return Vectors(values, torch.stack([cut.norm(dim=2).sum(1) for cut in cuts]).sum(0))
