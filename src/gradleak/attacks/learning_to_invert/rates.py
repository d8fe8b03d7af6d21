"""A learning rate by trial: short trainings from one start, judged on examples that were held out."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.attacks.learning_to_invert.training import Schedule, checkpoint_note, train
from gradleak.core.attack import Bench
from gradleak.core.errors import GradleakError


def best_rate(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    judged: Callable[[], float],
    schedules: Sequence[Schedule],
    bench: Bench,
    facts: dict[str, Any],
    name: str,
) -> float:
    """The rate found before an interruption, or the one that leaves the least loss; the model ends as it began."""
    note = checkpoint_note(bench.checkpoint)
    if note is not None and {**note, "rate": None} == {**facts, "rate": None}:
        return float(note["rate"])
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = {}
    for schedule in schedules:
        train(model, loss, schedule, bench)
        with torch.no_grad():
            losses[schedule.learning_rate] = judged()
        model.load_state_dict(first)
    finite = {rate: found for rate, found in losses.items() if math.isfinite(found)}
    if not finite:
        raise GradleakError(f"{name} diverged at every learning rate it tried: give learning_rate.")
    return min(finite, key=lambda rate: finite[rate])
