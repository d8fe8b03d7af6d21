"""Captures what an optimiser is about to apply, one file a step: plain PyTorch and accelerate."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradleak.captures import (
    Capture,
    CaptureError,
    CaptureHeader,
    ProtocolFacts,
    name_capture,
    write_capture,
)
from gradleak.core.errors import GradleakError
from gradleak.integrations.pytorch import Notes, describe_model, refuse_strange, take_gradients
from gradleak.records.files import make_private_folder
from gradleak.targets.in_memory import unwrap


@contextmanager
def capture_steps(
    model: Any,
    optimizer: Any,
    folder: str | Path,
    *,
    every: int = 1,
    know: Sequence[str] = (),
    defense: str | Sequence[str] = (),
    scale: float | None = None,
    client: str = "",
) -> Iterator[None]:
    """Writes what the optimiser is about to apply into a folder while the block runs.

    That is after accumulation and clipping, whatever the loop does before `optimizer.step()`.
    Rounds count the steps that were taken before, from 0, and every so many of them are kept. An
    optimiser that accelerate prepared steps where gradients are synchronised, and only then.
    `know`, `defense`, `scale` and `client` are those of `gradleak.capture`.
    """
    inner = _unwrap_optimizer(optimizer)
    recorder = StepRecorder(model, folder, every, know, client)
    stated = (defense,) if isinstance(defense, str) else tuple(defense)

    def record(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if any(callable(one) for one in (*arguments, *named.values())):
            raise GradleakError(
                "This optimiser computes gradients within its step (a closure): use"
                " gradleak.capture around backward()."
            )
        recorder.record(stated, scale)

    handle = inner.register_step_pre_hook(record)
    try:
        with recorder.notes.watch():
            yield
    finally:
        handle.remove()


class StepRecorder:
    """Writes gradients as they stand before steps of an optimiser, each into a file of its own."""

    def __init__(
        self, model: Any, folder: str | Path, every: int, know: Sequence[str], client: str
    ) -> None:
        refuse_strange(model, know)
        refuse_steps(every)
        self.model: nn.Module = unwrap(model)
        self.notes = Notes(model, know)
        self.folder, self.every, self.client = Path(folder), every, client
        self.round = 0  # steps that were taken before
        make_private_folder(self.folder)

    def record(
        self, defenses: Sequence[str], scale: float | None = None, private: bool = False
    ) -> None:
        """Writes the update of this step, if its turn has come, and goes on to the next."""
        try:
            if self.round % self.every == 0:
                self._write(tuple(defenses), scale, private)
        finally:
            self.notes.clear()
            self.round += 1

    def _write(self, defenses: tuple[str, ...], scale: float | None, private: bool) -> None:
        header = CaptureHeader(
            "gradients",
            describe_model(self.model),
            ProtocolFacts(
                "fedsgd",
                None,
                None,
                scale=self.notes.scale(scale),
                loss_over=self.notes.loss_over(),
            ),
            self.notes.list_granted(),
            defenses,
            "as .grad held it before the optimiser's step",
            round=self.round,
            client=self.client,
        )
        tensors = take_gradients(self.model, private)
        try:
            write_capture(self.folder / name_capture(header), Capture(header, tensors))
        except CaptureError as error:  # a step that overflowed, a full disk: training goes on
            warnings.warn(f"Step {self.round} was not captured. {error}", stacklevel=2)


def refuse_steps(every: int) -> None:
    """Refuses to keep every so many steps of what cannot be counted."""
    if every < 1:
        raise GradleakError(f"every counts steps from 1, not {every}.")


def _unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Returns the optimiser that accelerate wraps; refuses one of Opacus."""
    if getattr(optimizer, "original_optimizer", None) is not None:
        raise GradleakError(
            "This is an optimiser of Opacus: use"
            " gradleak.integrations.opacus.capture_private_steps, which also states its defense."
        )
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, Optimizer):
        raise GradleakError(
            f"capture_steps() wants a torch optimiser, not a {type(optimizer).__name__}."
        )
    return inner
