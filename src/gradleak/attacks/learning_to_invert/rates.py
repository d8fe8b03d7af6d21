"""A learning rate by trial: short trainings from one start, judged on examples that were held out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.attacks.learning_to_invert.training import Schedule, checkpoint_note, train
from gradleak.core.attack import Bench
from gradleak.core.errors import GradleakError

LONGEST_TRIAL = 8  # of the training's steps, one part in so many
LEARNT = 0.9  # of the loss before training: from there on trials tell rates apart


def best_rate(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    judged: Callable[[], float],
    schedules: Sequence[Schedule],
    bench: Bench,
    facts: dict[str, Any],
    name: str,
    longest: int,
) -> float:
    """The rate found before an interruption, or the one that leaves the least loss; the model ends as it began.

    Where hardly anything was learnt the loss says little of rates: trials are then made twice as long, up to `longest` steps.
    """
    note = checkpoint_note(bench.checkpoint)
    if note is not None and {**note, "rate": None} == {**facts, "rate": None}:
        return float(note["rate"])
    with torch.no_grad():
        untrained = judged()
    while True:
        losses = _trials(model, loss, judged, schedules, bench)
        if not losses:
            raise GradleakError(f"{name} diverged at every learning rate it tried: give learning_rate.")
        best = min(losses, key=lambda rate: losses[rate])
        steps = schedules[0].steps
        if losses[best] < LEARNT * untrained or steps >= longest or bench.out_of_time:
            return best
        schedules = [replace(schedule, steps=min(2 * steps, longest)) for schedule in schedules]


def _trials(
    model: nn.Module, loss: Callable[[int], Tensor], judged: Callable[[], float], schedules: Sequence[Schedule], bench: Bench
) -> dict[float, float]:
    """What each rate leaves of the loss, where that is a number."""
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = {}
    for schedule in schedules:
        train(model, loss, schedule, bench)
        with torch.no_grad():
            losses[schedule.learning_rate] = judged()
        model.load_state_dict(first)
    return {rate: found for rate, found in losses.items() if math.isfinite(found)}
