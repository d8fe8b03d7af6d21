"""A learning rate by trial: short trainings from one start, judged on examples that were held out."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.attacks.learning_to_invert.training import Schedule, checkpoint_note, train
from gradleak.core.attack import Bench
from gradleak.core.errors import GradleakError
from gradleak.records.files import write_whole

TRIALS = ".trials"  # of the file beside a checkpoint
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
    What each trial left is kept beside the checkpoint, so that a fit that is cut makes none of them twice.
    """
    note = checkpoint_note(bench.checkpoint)
    if note is not None and {**note, "rate": None} == {**facts, "rate": None}:
        return float(note["rate"])
    with torch.no_grad():
        untrained = judged()
    kept = KeptTrials.of(bench.checkpoint, facts)
    while True:
        losses = _trials(model, loss, judged, schedules, bench, kept)
        if not losses:
            raise GradleakError(f"{name} diverged at every learning rate it tried: give learning_rate.")
        best = min(losses, key=lambda rate: losses[rate])
        steps = schedules[0].steps
        if losses[best] < LEARNT * untrained or steps >= longest or bench.out_of_time:
            return best
        schedules = [replace(schedule, steps=min(2 * steps, longest)) for schedule in schedules]


class KeptTrials:
    """What trials of one fit have left of the loss, by their steps and rate; on disk as soon as it is known."""

    def __init__(self, path: Path | None, facts: Any, losses: dict[str, float]) -> None:
        self.path, self.facts, self.losses = path, facts, losses

    @classmethod
    def of(cls, checkpoint: Path | None, facts: dict[str, Any]) -> "KeptTrials":
        """Those beside a checkpoint, if they are of the same fit."""
        path, known = None if checkpoint is None else checkpoint.with_suffix(TRIALS), json.loads(json.dumps(facts))
        if path is not None and path.is_file():
            plain = json.loads(path.read_text(encoding="utf-8"))
            if plain["of"] == known:
                return cls(path, known, plain["losses"])
        return cls(path, known, {})

    def find(self, schedule: Schedule) -> float | None:
        return self.losses.get(self._name(schedule))

    def add(self, schedule: Schedule, loss: float) -> None:
        self.losses[self._name(schedule)] = loss
        if self.path is not None:
            write_whole(self.path, json.dumps({"of": self.facts, "losses": self.losses}))

    def _name(self, schedule: Schedule) -> str:
        return f"{schedule.steps} steps at {schedule.learning_rate!r}"


def _trials(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    judged: Callable[[], float],
    schedules: Sequence[Schedule],
    bench: Bench,
    kept: KeptTrials,
) -> dict[float, float]:
    """What each rate leaves of the loss, where that is a number."""
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = {}
    for schedule in schedules:
        found = kept.find(schedule)
        if found is None:
            train(model, loss, schedule, bench)
            with torch.no_grad():
                found = judged()
            model.load_state_dict(first)
            if not bench.out_of_time:  # otherwise it is of a shorter trial
                kept.add(schedule, found)
        losses[schedule.learning_rate] = found
    return {rate: found for rate, found in losses.items() if math.isfinite(found)}
