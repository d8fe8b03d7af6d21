"""Cross-entropy over a vocabulary without ever holding all its logits."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

LOGITS_AT_ONCE = {"cuda": 420_000_000, "cpu": 60_000_000}  # numbers
LEAST_SHARE = 1e-38  # a word less likely than this costs no more: 87 nats
ALIGNED = {"cuda": 64, "cpu": 1}  # rows of a table: products of 2-byte numbers with 50,257 are three times as slow on a GPU


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes slopes together with the loss, some rows at a time; keeps only what is as small as its inputs."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, table: Tensor, bias: Tensor, truth: Tensor, dtype: torch.dtype) -> Tensor:
        wants_states, wants_table, wants_bias = ctx.needs_input_grad[:3]
        words = len(table)
        missing = -words % ALIGNED.get(states.device.type, 1)
        low_table = F.pad(table.to(dtype), (0, 0, 0, missing))
        low_bias = F.pad(bias.to(dtype), (0, missing), value=-torch.inf)  # words that are not there: share and slope are 0
        total = states.new_zeros((), dtype=torch.float32)
        slopes = torch.empty_like(states) if wants_states else None
        table_slope = torch.zeros_like(table) if wants_table else None
        bias_slope = torch.zeros_like(bias) if wants_bias else None
        most = _rows_at_once(states, table)
        for start in range(0, len(states), most):
            piece = slice(start, start + most)
            low_states, right = states[piece].to(dtype), truth[piece, None]
            slope = torch.addmm(low_bias, low_states, low_table.mT).softmax(-1)
            shares = slope.gather(1, right)
            total -= shares.float().clamp_min(LEAST_SHARE).log().sum()
            slope.scatter_(1, right, shares - 1)
            if bias_slope is not None:
                bias_slope += slope.sum(0, dtype=bias_slope.dtype)[:words]
            if slopes is not None:
                slopes[piece] = slope @ low_table
            if table_slope is not None:
                table_slope += (slope.mT @ low_states)[:words]
        ctx.slopes, ctx.rows = (slopes, table_slope, bias_slope), len(states)
        return total / len(states)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        weight = outer[0] / ctx.rows
        return (*(None if slope is None else slope.mul_(weight) for slope in ctx.slopes), None, None)


def linear_cross_entropy(
    states: Float[Tensor, "rows width"],
    table: Float[Tensor, "words width"],
    bias: Float[Tensor, "words"],
    truth: Int[Tensor, "rows"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, ""]:
    """The mean cross-entropy of `states @ table.T + bias`; its logits in `dtype`, its sums in float32."""
    found: Tensor = _LinearCrossEntropy.apply(states, table, bias, truth, dtype)  # type: ignore[no-untyped-call]
    return found


def _rows_at_once(states: Tensor, table: Tensor) -> int:
    return max(1, LOGITS_AT_ONCE.get(states.device.type, LOGITS_AT_ONCE["cpu"]) // len(table))
