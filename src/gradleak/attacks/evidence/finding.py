"""What is read off an update, and how the rows that a batch touched are told from the others."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradleak.core.observation import Observation
from gradleak.matching.rounding import cancelled_share

ABOVE_FLOOR = 10.0  # a row this many times above the quiet rows' size was touched by the batch


@dataclass(frozen=True)
class Finding:
    """Numbers read off an update, and whether they are certain or an estimate."""

    name: str
    values: tuple[int, ...]
    exact: bool
    source: str


def seen(observation: Observation, group: str) -> Tensor | None:
    """The tensor of a role (`head_bias`, `word_embedding` …) as it was seen; none if it was not."""
    names = [name for name in observation.target.groups[group] if name in observation.update.tensors]
    return observation.update.tensors[names[0]][0] if names else None


def noisy(observation: Observation) -> bool:
    """Whether the attacker knows of noise in the update."""
    return observation.channel.noisy


def certain(observation: Observation) -> bool:
    """Whether what was seen is, as far as the attacker knows, the gradient up to its size."""
    return observation.channel.only_scaled and observation.protocol.one_gradient


def touched(rows: Float[Tensor, "rows width"], through_noise: bool) -> Bool[Tensor, "rows"]:
    """Rows larger than rounding and, through noise, than the noise: most rows are untouched, hence of its size."""
    norms = torch.linalg.vector_norm(rows, dim=1)
    floor = norms.quantile(0.25) if through_noise else 0.0
    above: Tensor = (norms > ABOVE_FLOOR * floor) & (norms > cancelled_share(rows.dtype) * norms.max())
    return above
