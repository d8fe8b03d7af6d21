"""What every sentence of a guess, with every label, would have added to the update.

The update of a batch is a weighted sum of such contributions, called columns. How far any weighting
is from what was seen follows from the columns' products alone, which are computed tensor by tensor.
What may stay between the truth and what was seen is the floor: rounding, here measured for the very
sentences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.certificate.answers import Answers
from gradleak.core.attack import Sentences
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.matching.exact import Gradients, OuterSums, gradients_of
from gradleak.matching.precision import gradient_difference, sum_error

# The client's rounding and ours are two draws of one size: ours is measured, and the client's is no
# more than this many times that. For tensors of a few numbers, where a draw may be small by luck,
# the expected size is added (precision.py).
TIMES_MEASURED = 4.0
ENTRIES_AT_ONCE = 2**18  # turned to double precision: what a processor keeps near at hand
LEAST = 1e-100  # of a floor: a gradient that is zero has none
# The largest error of rounding over its standard deviation, which is a step over √12
HALF_A_STEP = math.sqrt(3)


@dataclass(frozen=True, eq=False)
class Contributions:
    """The columns of one observation's guess.

    A sentence's column with a label is number `sentence · labels + label`.
    """

    observation: Observation
    sentences: Sentences  # each once
    labels: int  # columns a sentence
    names: tuple[str, ...]  # of the tensors compared
    gradients: dict[str, Gradients]
    products: Float[Tensor, "tensors columns columns"]
    along: Float[Tensor, "tensors columns"]  # with what was seen, in the size of a gradient
    seen_squared: Float[Tensor, "tensors"]  # the same with itself
    # What it may leave of each tensor, of an update that was not scaled down
    rounding: Float[Tensor, "tensors"]
    # The same outside of the span of a linear layer's inputs: errors of δ_t lie within it
    span_rounding: Float[Tensor, "tensors"]
    # What else may: a channel's rounding, and that of the products
    beyond: Float[Tensor, "tensors"]
    predicted: Float[Tensor, "sentences labels"]
    # By which a sentence's own gradient is multiplied in its columns; none where that is one
    weights: Float[Tensor, "columns"] | None = None

    @property
    def width(self) -> int:
        """Tokens of the longest sentence: what all are padded to."""
        return max(map(len, self.sentences))

    def compute_floors(self, scale: float = 1.0) -> Float[Tensor, "tensors"]:
        """Says how far each tensor of the truth may be from what was seen of it.

        `scale` is the factor by which the update was scaled down.
        """
        return (scale * self.rounding + self.beyond).clamp_min(LEAST)

    def compute_span_floors(self, scale: float = 1.0) -> Float[Tensor, "tensors"]:
        """Says how far each tensor of the truth may lie outside of the span of its inputs."""
        return (scale * self.span_rounding + self.beyond).clamp_min(LEAST)

    def measure_misfit(self, shares: Float[Tensor, "columns"], scale: float = 1.0) -> float:
        """Measures the largest distance of a tensor from a weighted sum of columns, in floors.

        The truth has at most one.
        """
        # ‖G − Σ s_c g_c‖² = ‖G‖² − 2 Σ s_c g_c·G + Σ s_c s_d g_c·g_d, tensor by tensor
        squares = self.seen_squared - 2 * self.along @ shares + (self.products @ shares) @ shares
        return float((squares.clamp_min(0).sqrt() / self.compute_floors(scale)).max())


@dataclass(frozen=True, eq=False)
class LabelledGradients:
    """The gradients of some sentences with every label, and their losses.

    They are held in double precision, and as the client rounds.
    """

    gradients: dict[str, Gradients]
    rounded: dict[str, Gradients]
    losses: Float[Tensor, "columns"]
    weights: Float[Tensor, "columns"] | None = None

    def take(self, rows: Int[Tensor, "some"]) -> "LabelledGradients":
        """Returns those of some columns."""
        gradients, rounded = (
            {name: one.take(rows) for name, one in made.items()}
            for made in (self.gradients, self.rounded)
        )
        weights = None if self.weights is None else self.weights[rows]
        return LabelledGradients(gradients, rounded, self.losses[rows], weights)


def compute_gradients(
    observation: Observation, sentences: Sentences, answers: Answers | None = None
) -> LabelledGradients:
    """Computes the gradients of these sentences, those of several observations in one pass."""
    answers = answers or Answers()
    target, names = observation.target, tuple(observation.update.tensors)
    exact = gradients_of(target, names)
    if target.labels_are_open:
        batch = target.batch_of(sentences, answers.labels)
    else:
        batch = lay_out_labels(target, sentences, count_labels(target))
    gradients, losses = exact.with_losses(batch, weights=answers.weights)
    rounded = exact.of(batch, double=False, weights=answers.weights)
    return LabelledGradients(gradients, rounded, losses, answers.weights)


def count_labels(target: Target) -> int:
    """Counts a sentence's columns: one for each label, and one where labels are not tried."""
    return 1 if target.labels_are_tokens or target.labels_are_open else target.classes


def make_contributions(
    observation: Observation, sentences: Sentences, made: LabelledGradients
) -> Contributions:
    """Makes the columns of one observation's guess from its gradients."""
    labels, names = count_labels(observation.target), tuple(made.gradients)
    each = [(name, made.gradients[name]) for name in names]
    sizes = [_measure_seen(observation, name) for name in names]
    predicted = torch.ones(len(sentences), 1, dtype=torch.float64)
    if labels > 1:  # the loss of a label is minus the logarithm of what the model gives it
        predicted = (-made.losses).exp().view(len(sentences), labels).cpu()
    rounding = [
        _bound_rounding(observation, name, gradients, made.rounded[name])
        for name, gradients in each
    ]
    spans = [
        min(whole, _bound_span_rounding(observation, name, gradients, made.rounded[name]))
        for (name, gradients), whole in zip(each, rounding, strict=True)
    ]
    beyond = [
        _bound_rest(observation, name, gradients, size)
        for (name, gradients), size in zip(each, sizes, strict=True)
    ]
    return Contributions(
        observation,
        sentences,
        labels,
        names,
        made.gradients,
        products=torch.stack([gradients.products(gradients) for _, gradients in each]).cpu(),
        along=torch.stack([multiply_with_seen(observation, *one) for one in each]),
        seen_squared=torch.tensor(sizes, dtype=torch.float64).square(),
        rounding=torch.tensor(rounding, dtype=torch.float64),
        span_rounding=torch.tensor(spans, dtype=torch.float64),
        beyond=torch.tensor(beyond, dtype=torch.float64),
        predicted=predicted,
        weights=made.weights,
    )


def lay_out_labels(target: Target, sentences: Sentences, labels: int, width: int = 0) -> Batch:
    """Lays out every sentence with each of the first labels, as examples of one batch.

    Where padding is read the batch is at least so wide.
    """
    repeated = [sentence for sentence in sentences for _ in range(labels)]
    return lay_out(target, repeated, [label for _ in sentences for label in range(labels)], width)


def lay_out(
    target: Target, sentences: Sequence[Sequence[int]], labels: Sequence[int], width: int
) -> Batch:
    """Lays out sentences as a client does, beside one of that width where padding is read."""
    if target.labels_are_tokens or target.labels_are_open:
        return target.batch_of(sentences, None)
    if not target.attend_padding:
        return target.batch_of(sentences, labels)
    widest = [target.vocabulary.pad] * width
    return target.batch_of([*sentences, widest], [*labels, 0])[: len(sentences)]


def multiply_with_seen(
    observation: Observation, name: str, gradients: Gradients
) -> Float[Tensor, "columns"]:
    """Multiplies gradients with a tensor that was seen, in the size of a gradient."""
    return gradients.along(observation.update.tensors[name][0]).cpu() / observation.gradient_scale


def _measure_seen(observation: Observation, name: str) -> float:
    """Returns the norm of a tensor that was seen, in the size of a gradient.

    It is summed in pieces, so that no copy of the tensor is made.
    """
    pieces = torch.split(observation.update.tensors[name].flatten(), ENTRIES_AT_ONCE)
    squares = torch.stack([piece.double().square().sum() for piece in pieces]).sum()
    return math.sqrt(float(squares)) / observation.gradient_scale


def list_sum_lengths(target: Target) -> list[int]:
    """Lists the lengths of the sums that a gradient goes through, forward and back.

    These are the inputs and outputs of every linear layer.
    """
    linear = [
        part
        for part in (*target.parts, *target.frozen_parts)
        if len(part.shape) == 2 and part.layer is not None
    ]
    return [size for part in linear for size in part.shape]


def _bound_rounding(
    observation: Observation, name: str, gradients: Gradients, rounded: Gradients
) -> float:
    """Bounds what rounding may leave between one tensor of the truth and what was seen of it.

    A batch's gradient is a mean over its examples, so that its rounding is no more than that of the
    worst column.
    """
    precision = observation.update.tensors[name].dtype
    measured = float(_measure_differences(gradients, rounded).max())
    expected = gradient_difference(list_sum_lengths(observation.target), precision) * float(
        gradients.summands().max()
    )
    return TIMES_MEASURED * measured + expected


def _bound_span_rounding(
    observation: Observation, name: str, gradients: Gradients, rounded: Gradients
) -> float:
    """Bounds what rounding may leave of one tensor outside of the span of the layer's inputs.

    The gradient is Σ_t δ_t x_tᵀ. However wrong a client's δ_t are after a deep pass back, they are
    multiplied with inputs: only errors of these and of the sum itself lie outside.
    """
    if not (isinstance(gradients, OuterSums) and isinstance(rounded, OuterSums)):
        return math.inf
    sizes = gradients.deltas.norm(dim=2)
    measured = float(((rounded.inputs - gradients.inputs).norm(dim=2) * sizes).sum(1).max())
    # Over the tokens of a batch, after a normalisation's sums as long as the layer is wide
    sums = [gradients.inputs.shape[0] * gradients.inputs.shape[1], gradients.inputs.shape[2]]
    precision = observation.update.tensors[name].dtype
    expected = gradient_difference(sums, precision) * float(gradients.summands().max())
    return TIMES_MEASURED * measured + expected


def _bound_rest(observation: Observation, name: str, gradients: Gradients, seen: float) -> float:
    """Bounds what a channel rounds off, and the error of distances that are made of products.

    A product of n terms in double precision is off by √n·u of their size; a distance is the root of
    three of them.
    """
    terms = observation.target.part(name).size
    size = seen + float(gradients.summands().max())
    return 2 * math.sqrt(sum_error(terms, torch.float64)) * size + _bound_channel_rounding(
        observation, name
    )


def _measure_differences(gradients: Gradients, rounded: Gradients) -> Float[Tensor, "columns"]:
    """Measures the norm of what rounding changed in each column."""
    squares = (
        gradients.pair_up(gradients) - 2 * gradients.pair_up(rounded) + rounded.pair_up(rounded)
    )
    return squares.clamp_min(0).sqrt()


def _bound_channel_rounding(observation: Observation, name: str) -> float:
    """Bounds what a declared channel, or the client's weights, cannot hold of a tensor.

    That is at most half a step an entry.
    """
    tensor, target = observation.update.tensors[name][0], observation.target
    left = 0.0
    if observation.channel.rounding:
        sent = replace(observation.channel, weight_rounding=0.0)
        left += HALF_A_STEP * float(sent.errors(tensor, 1).double().norm())
    # One local step: weights before minus weights after, each rounded
    if not observation.protocol.one_gradient:
        part = target.part(name)
        weights = part.of(target.parameters[part.parameter])
        left += observation.protocol.rounding_bound(weights, tensor)
    return left / observation.gradient_scale


def drop_repeats(sentences: Sequence[Sequence[int]]) -> Sentences:
    """Returns each sentence once, in the order of their first places."""
    return tuple(dict.fromkeys(tuple(sentence) for sentence in sentences))
