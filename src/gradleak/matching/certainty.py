"""How surely each tensor of an update speaks through noise: what a gradient's tensors usually
are beside it."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.target import Target
from gradleak.matching.distances import LEAST_SIGNAL, TINY

# Inverse variance of a tensor's cosine from which on more certainty hardly gives it more weight
SURE = 300.0
USUALLY = 0.5  # how far a tensor's square may be from what it usually is, as a share
LEAST_USUAL = 0.1  # of what is usual


def certainties(
    signal_squared: Float[Tensor, "observations tensors"],
    stds: Float[Tensor, "observations tensors"],
) -> Float[Tensor, "observations tensors"]:
    """Weights of tensors: all alike where noise is small, as their signal where it is large."""
    variances = stds.square() / signal_squared.clamp_min(torch.finfo(signal_squared.dtype).tiny)
    return 1 / (1 + SURE * variances)


def likely_signal(
    ordinary: Float[Tensor, "observations tensors"],
    observed: Float[Tensor, "observations tensors"],
    noise: Float[Tensor, "observations tensors"],
    stds: Float[Tensor, "observations tensors"],
) -> Float[Tensor, "observations tensors"]:
    """The gradient's part of every tensor's square: what is seen less the noise, as far as that is
    sure; else what is usual.

    Usual squares are taken in the shares that ordinary examples have, of the size that is seen in
    all tensors together.
    """
    total = observed.sum(1, keepdim=True)
    signal = torch.maximum(total - noise.sum(1, keepdim=True), LEAST_SIGNAL * total)
    usual = ordinary / ordinary.sum(1, keepdim=True).clamp_min(TINY) * signal
    direct = observed - noise
    # Variance of a sum of squares
    spread_of_direct = 2 * noise * stds.square() + 4 * usual * stds.square()
    spread_of_usual = (USUALLY * usual).square()
    trust = spread_of_usual / (spread_of_usual + spread_of_direct).clamp_min(TINY)
    return torch.maximum(trust * direct + (1 - trust) * usual, LEAST_USUAL * usual)


def ordinary_candidates(target: Target, observations: int) -> Batch:
    """The model's ordinary examples, each a candidate by itself for every observation."""
    batch = target.ordinary()
    if target.labels_are_tokens and batch.ids is not None:
        batch = replace(batch, labels=batch.ids)

    def spread(part: Tensor) -> Tensor:
        return part[None, :, None].expand(observations, -1, 1, *part.shape[1:])

    contents = {name: getattr(batch, name) for name in ("ids", "embeddings", "pixels")}
    given = {name: spread(content) for name, content in contents.items() if content is not None}
    return Batch(mask=spread(batch.mask), labels=spread(batch.labels), **given)
