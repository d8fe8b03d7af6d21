"""What every sentence of a guess, with every label, would have added to the update: products, tensor by tensor, and their floors.

The update of a batch is a weighted sum of such columns. How far any weighting is from what was seen follows from their products
alone. What may stay between the truth and what was seen is the floor: rounding, here computed for the very sentences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.attack import Sentences
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.matching.exact import ExactGradients, Gradients
from gradleak.matching.rounding import gradient_difference, sum_error

# The client's rounding and ours are two draws of one size: ours is measured, and the client's is no more than this many times
# that. For tensors of a few numbers, where a draw may be small by luck, the expected size is added (rounding.py).
TIMES_MEASURED = 4.0
ENTRIES_AT_ONCE = 2**18  # turned to double precision: what a processor keeps near at hand
LEAST = 1e-100  # of a floor: a gradient that is zero has none
HALF_A_STEP = math.sqrt(3)  # the largest error of rounding over its standard deviation, which is a step over √12


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of one observation's guess; place `sentence · labels + label` is a sentence's with a label."""

    observation: Observation
    sentences: Sentences  # each once
    labels: int  # columns a sentence
    names: tuple[str, ...]  # of the tensors compared
    gradients: dict[str, Gradients]
    products: Float[Tensor, "tensors columns columns"]
    along: Float[Tensor, "tensors columns"]  # with what was seen, in the size of a gradient
    seen_squared: Float[Tensor, "tensors"]  # the same with itself
    rounding: Float[Tensor, "tensors"]  # what it may leave of each tensor, of an update that was not scaled down
    beyond: Float[Tensor, "tensors"]  # what else may: a channel's rounding, and that of the products
    predicted: Float[Tensor, "sentences labels"]

    @property
    def width(self) -> int:
        """Tokens of the longest sentence: what all are padded to."""
        return max(map(len, self.sentences))

    def floors(self, scale: float = 1.0) -> Float[Tensor, "tensors"]:
        """How far each tensor of the truth may be from what was seen of it, if the update was scaled down by so much."""
        return (scale * self.rounding + self.beyond).clamp_min(LEAST)

    def misfit(self, shares: Float[Tensor, "columns"], scale: float = 1.0) -> float:
        """The largest distance of a tensor from a weighted sum of columns, in floors; the truth has at most one."""
        squares = self.seen_squared - 2 * self.along @ shares + (self.products @ shares) @ shares
        return float((squares.clamp_min(0).sqrt() / self.floors(scale)).max())


@dataclass(frozen=True, eq=False)
class Made:
    """Gradients of some sentences with every label: in double precision, as the client rounds, and their losses."""

    gradients: dict[str, Gradients]
    rounded: dict[str, Gradients]
    losses: Float[Tensor, "columns"]

    def take(self, rows: Int[Tensor, "some"]) -> "Made":
        """Those of some columns."""
        gradients, rounded = ({name: one.take(rows) for name, one in made.items()} for made in (self.gradients, self.rounded))
        return Made(gradients, rounded, self.losses[rows])


def make_columns(target: Target, sentences: Sentences, exact: ExactGradients) -> Made:
    """Computes what columns of these sentences are made of, those of several observations in one pass."""
    batch = batch_of(target, sentences, labels_of(target))
    gradients, losses = exact.with_losses(batch)
    return Made(gradients, exact.of(batch, double=False), losses)


def labels_of(target: Target) -> int:
    """How many columns a sentence has: one for each label, and one in a language model."""
    return 1 if target.labels_are_tokens else target.classes


def columns_of(observation: Observation, sentences: Sentences, made: Made) -> Columns:
    """The columns of one observation's guess."""
    labels, names = labels_of(observation.target), tuple(made.gradients)
    products = torch.stack([one.products(one) for one in made.gradients.values()]).cpu()
    along = torch.stack([along_seen(observation, name, made.gradients[name]) for name in names])
    sizes = [_size_seen(observation, name) for name in names]
    predicted = torch.ones(len(sentences), 1, dtype=torch.float64)
    if labels > 1:  # the loss of a label is minus the logarithm of what the model gives it
        predicted = (-made.losses).exp().view(len(sentences), labels).cpu()
    rounding = [_rounding(observation, name, made.gradients[name], made.rounded[name]) for name in names]
    beyond = [_beyond(observation, name, made.gradients[name], size) for name, size in zip(names, sizes, strict=True)]
    first, second = (torch.tensor(found, dtype=torch.float64) for found in (rounding, beyond))
    squares = torch.tensor(sizes, dtype=torch.float64).square()
    return Columns(observation, sentences, labels, names, made.gradients, products, along, squares, first, second, predicted)


def batch_of(target: Target, sentences: Sentences, labels: int, width: int = 0) -> Batch:
    """Every sentence with each of the first labels, as examples of one batch; at least so wide where padding is read."""
    repeated = [sentence for sentence in sentences for _ in range(labels)]
    return lay_out(target, repeated, [label for _ in sentences for label in range(labels)], width)


def lay_out(target: Target, sentences: Sequence[Sequence[int]], labels: Sequence[int], width: int) -> Batch:
    """Sentences as a client batches them, beside one of that width where padding is read."""
    if target.labels_are_tokens:
        return target.batch_of(sentences, None)
    if not target.attend_padding:
        return target.batch_of(sentences, labels)
    widest = [target.vocabulary.pad] * width
    return target.batch_of([*sentences, widest], [*labels, 0])[: len(sentences)]


def along_seen(observation: Observation, name: str, gradients: Gradients) -> Float[Tensor, "columns"]:
    """The products of gradients with a tensor that was seen, in the size of a gradient."""
    return gradients.along(observation.update.tensors[name][0]).cpu() / observation.gradient_scale


def _size_seen(observation: Observation, name: str) -> float:
    """The norm of a tensor that was seen, in the size of a gradient; in pieces, so that no copy of it is made."""
    pieces = torch.split(observation.update.tensors[name].flatten(), ENTRIES_AT_ONCE)
    squares = torch.stack([piece.double().square().sum() for piece in pieces]).sum()
    return math.sqrt(float(squares)) / observation.gradient_scale


def depth_of_sums(target: Target) -> list[int]:
    """The lengths of the sums that a gradient goes through, forward and back: every linear layer's inputs and outputs."""
    linear = [part for part in (*target.parts, *target.frozen_parts) if len(part.shape) == 2 and part.layer is not None]
    return [size for part in linear for size in part.shape]


def _rounding(observation: Observation, name: str, gradients: Gradients, rounded: Gradients) -> float:
    """What rounding may leave between one tensor of the truth and what was seen of it.

    A batch's gradient is a mean over its examples, so that its rounding is no more than the worst column's.
    """
    precision = observation.update.tensors[name].dtype
    measured = float(_differences(gradients, rounded).max())
    expected = gradient_difference(depth_of_sums(observation.target), precision) * float(gradients.summands().max())
    return TIMES_MEASURED * measured + expected


def _beyond(observation: Observation, name: str, gradients: Gradients, seen: float) -> float:
    """What a channel is known to round off, and the floor of distances that are differences of products.

    A product of n terms in double precision is off by √n·u of their size; a distance is the root of three of them.
    """
    terms = observation.target.part(name).size
    size = seen + float(gradients.summands().max())
    return 2 * math.sqrt(sum_error(terms, torch.float64)) * size + _rounded_off(observation, name)


def _differences(gradients: Gradients, rounded: Gradients) -> Float[Tensor, "columns"]:
    """The norms of what rounding changed in each column."""
    squares = gradients.paired(gradients) - 2 * gradients.paired(rounded) + rounded.paired(rounded)
    return squares.clamp_min(0).sqrt()


def _rounded_off(observation: Observation, name: str) -> float:
    """What a declared channel, or the client's weights, cannot hold of a tensor: at most half a step an entry."""
    tensor, target = observation.update.tensors[name][0], observation.target
    left = 0.0
    if observation.channel.rounding:
        left += HALF_A_STEP * float(observation.channel.errors(tensor, 1).double().norm())
    if not observation.protocol.one_gradient:  # one local step: weights before minus weights after, each rounded
        part = target.part(name)
        weights = part.of(target.parameters[part.parameter])
        left += observation.protocol.rounding_bound(weights) if weights.numel() else 0.0
    return left / observation.gradient_scale


def distinct(sentences: Sequence[Sequence[int]]) -> Sentences:
    """Each sentence once, in the order of their first places."""
    return tuple(dict.fromkeys(tuple(sentence) for sentence in sentences))
