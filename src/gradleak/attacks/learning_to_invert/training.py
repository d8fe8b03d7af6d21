"""The training loop of any inverter: steps with Adam, what is learnt kept on disk now and then, news on a blackboard."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.core.attack import Bench
from gradleak.records.files import written_aside

NEWS = 25  # steps from one look at the loss to the next: looking makes a GPU wait
KEEP_SECONDS = 60.0  # from one checkpoint to the next


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to learn."""

    steps: int
    learning_rate: float
    decay: float = 0.5  # the share of the steps, the last ones, over which the rate falls to nothing; 0: never
    drops: bool = False  # it is a tenth in these last steps instead, all at once

    def rate(self, step: int) -> float:
        if self.drops:
            return self.learning_rate * (0.1 if step >= round((1 - self.decay) * self.steps) else 1.0)
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.learning_rate * min(1.0, left)


def train(
    model: nn.Module, loss: Callable[[int], Tensor], schedule: Schedule, bench: Bench, described: dict[str, Any] | None = None
) -> int:
    """Runs the steps that are left; `loss(step)` draws its own data by the step's number, so that a second run draws the same.

    `described` says what a checkpoint belongs to; another's is ignored. Returns how many steps the model has had.
    """
    device = next(model.parameters()).device
    learnt = [value for value in model.parameters() if value.requires_grad]
    optimiser = torch.optim.Adam(learnt, lr=schedule.learning_rate, fused=device.type in ("cuda", "cpu"))
    path = bench.checkpoint if described is not None else None
    step = _resume(path, described, model, optimiser)
    kept, running = time.monotonic(), torch.zeros((), device=device)
    while step < schedule.steps and not bench.out_of_time:
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate(step)
        optimiser.zero_grad(set_to_none=True)
        found = loss(step)
        found.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        running += found.detach()
        step += 1
        if step % NEWS == 0 or step == schedule.steps:
            bench.progress.report(step, schedule.steps, float(running) / ((step - 1) % NEWS + 1))
            running.zero_()
            if path is not None and time.monotonic() - kept > KEEP_SECONDS and step < schedule.steps:
                _keep(path, {"of": described, "step": step, "model": model.state_dict(), "optimiser": optimiser.state_dict()})
                kept = time.monotonic()
    return step


def _keep(path: Path, state: dict[str, Any]) -> None:
    with written_aside(path) as aside:
        torch.save(state, aside)


def _resume(path: Path | None, described: dict[str, Any] | None, model: nn.Module, optimiser: torch.optim.Optimizer) -> int:
    if path is None or not path.is_file():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["of"] != described:
        return 0
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"])


def checkpoint_note(path: Path | None) -> dict[str, Any] | None:
    """What the checkpoint there belongs to, if there is one."""
    if path is None or not path.is_file():
        return None
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["of"]
    return found
