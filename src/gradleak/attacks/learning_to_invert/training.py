"""The training of any inverter: a learning rate found by trial, then steps with Adam.

Both are kept on disk now and then at `bench.checkpoint`, so that a fit that is cut goes on where it
was and comes to the same end: `loss(step)` draws its own data by the step's number.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradleak.core.attack import Bench
from gradleak.core.errors import GradleakError
from gradleak.matching.precision import products_of_10_bits
from gradleak.records.files import write_whole, written_aside

Precision = Literal["float32", "tf32", "bfloat16"]  # of an inverter's products, never of gradients

NEWS = 25  # steps from one look at the loss to the next: looking makes a GPU wait
KEEP_SECONDS = 60.0  # from one checkpoint to the next
TRIALS = ".trials"  # of the file beside a checkpoint
LONGEST_TRIAL = 8  # of the training's steps, one part in so many
LEARNT = 0.9  # of the loss before training: from there on trials tell rates apart


def multiply_in(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Makes float32 products on a GPU in that precision while the block lasts."""
    return products_of_10_bits(precision == "tf32" and device.type == "cuda")


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Returns what products are asked for in; a CPU gains nothing from fewer bits."""
    return torch.bfloat16 if precision == "bfloat16" and device.type == "cuda" else torch.float32


@dataclass(frozen=True)
class TrainingSchedule:
    """How long and how fast to learn."""

    steps: int
    learning_rate: float
    # The last share of the steps, over which the rate falls to nothing; 0: never
    decay: float = 0.5
    drops: bool = False  # the rate is a tenth in these last steps instead, all at once

    def rate(self, step: int) -> float:
        """Returns the learning rate of one step."""
        if self.drops:
            is_last = step >= round((1 - self.decay) * self.steps)
            return self.learning_rate * (0.1 if is_last else 1.0)
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.learning_rate * min(1.0, left)


def find_learning_rate(
    network: nn.Module,
    loss: Callable[[int], Tensor],
    judge: Callable[[], float],
    schedules: Sequence[TrainingSchedule],
    bench: Bench,
    facts: dict[str, Any],
    name: str,
    longest: int,
) -> float:
    """Returns the rate whose trial ends with the least error, and leaves the network as it was.

    A checkpoint of the same fit has found its rate already. Where hardly anything was learnt the
    error says little of rates: trials are then made twice as long, up to `longest` steps.
    """
    if bench.checkpoint is not None and bench.checkpoint.is_file():
        known = torch.load(bench.checkpoint, map_location="cpu", weights_only=True, mmap=True)["of"]
        # All but the rate itself has to agree, which is what a checkpoint is asked for.
        if {**known, "rate": None} == {**facts, "rate": None}:
            return float(known["rate"])
    trials = RateTrials(network, loss, judge, bench, facts)
    with torch.no_grad():
        untrained = judge()
    while True:
        errors = {schedule.learning_rate: trials.run(schedule) for schedule in schedules}
        errors = {rate: error for rate, error in errors.items() if math.isfinite(error)}
        if not errors:
            raise GradleakError(
                f"{name} diverged at every learning rate it tried: give learning_rate."
            )
        best = min(errors, key=lambda rate: errors[rate])
        steps = schedules[0].steps
        if errors[best] < LEARNT * untrained or steps >= longest or bench.out_of_time:
            return best
        schedules = [replace(one, steps=min(2 * steps, longest)) for one in schedules]


class RateTrials:
    """Short trainings from one start, each judged by the error it leaves.

    Errors are on disk beside the checkpoint as soon as they are known, so that a fit that is cut
    makes no trial twice.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[int], Tensor],
        judge: Callable[[], float],
        bench: Bench,
        facts: dict[str, Any],
    ) -> None:
        self.network, self.loss, self.judge, self.bench = network, loss, judge, bench
        self.start = {name: value.clone() for name, value in network.state_dict().items()}
        self.facts = json.loads(json.dumps(facts))  # as they will be read: tuples become lists
        self.path = None if bench.checkpoint is None else bench.checkpoint.with_suffix(TRIALS)
        self.errors: dict[str, float] = {}
        if self.path is not None and self.path.is_file():
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            if kept["of"] == self.facts:  # another fit's errors say nothing of this one
                self.errors = kept["losses"]

    def run(self, schedule: TrainingSchedule) -> float:
        """Returns the error after a training by this schedule, or what is known of it."""
        name = f"{schedule.steps} steps at {schedule.learning_rate!r}"
        if name in self.errors:
            return self.errors[name]
        train(self.network, self.loss, schedule, self.bench)
        with torch.no_grad():
            error = self.judge()
        self.network.load_state_dict(self.start)
        if not self.bench.out_of_time:  # otherwise it is of a shorter trial
            self.errors[name] = error
            if self.path is not None:
                write_whole(self.path, json.dumps({"of": self.facts, "losses": self.errors}))
        return error


def train(
    network: nn.Module,
    loss: Callable[[int], Tensor],
    schedule: TrainingSchedule,
    bench: Bench,
    facts: dict[str, Any] | None = None,
) -> int:
    """Takes the steps that are left and returns how many the network has had.

    `facts` says what a checkpoint belongs to: another's is ignored, and without them none is kept.
    """
    device = next(network.parameters()).device
    learnt = [value for value in network.parameters() if value.requires_grad]
    optimiser = torch.optim.Adam(
        learnt, lr=schedule.learning_rate, fused=device.type in ("cuda", "cpu")
    )
    path = bench.checkpoint if facts is not None else None
    step = resume(path, facts, network, optimiser)
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
            is_due = time.monotonic() - kept > KEEP_SECONDS and step < schedule.steps
            if path is not None and is_due:
                states = {"model": network.state_dict(), "optimiser": optimiser.state_dict()}
                with written_aside(path) as aside:
                    torch.save({"of": facts, "step": step, **states}, aside)
                kept = time.monotonic()
    return step


def resume(
    path: Path | None,
    facts: dict[str, Any] | None,
    network: nn.Module,
    optimiser: torch.optim.Optimizer,
) -> int:
    """Takes up the checkpoint of the same fit, if there is one; returns how many steps it had."""
    if path is None or not path.is_file():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["of"] != facts:
        return 0
    network.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"])
