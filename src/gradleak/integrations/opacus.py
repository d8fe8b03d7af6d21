"""Captures what an optimiser of Opacus applies: clipped, noised, and divided as it divides."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradleak.core.errors import GradleakError
from gradleak.integrations.steps import StepRecorder


@contextmanager
def capture_private_steps(
    model: Any,
    optimizer: Any,
    folder: str | Path,
    *,
    every: int = 1,
    know: Sequence[str] = (),
    client: str = "",
    sampling_rate: float | None = None,
    steps: int | None = None,
    delta: float | None = None,
) -> Iterator[None]:
    """Writes what leaves a client of DP-SGD into a folder, one file a step, while the block runs.

    `model` and `optimizer` are those that `PrivacyEngine.make_private` returned. The defense is
    read off the optimiser at each step. `sampling_rate`, `steps` and `delta` go into it for its ε,
    which the optimiser does not know; `know` is that of `gradleak.capture`.
    """
    _refuse_strange(optimizer)
    recorder = StepRecorder(model, folder, every, know, client)
    accounting = {"sampling_rate": sampling_rate, "steps": steps, "delta": delta}

    def record(*_: Any) -> None:
        scale = scale_of(optimizer, recorder.notes.size if "batch_size" in know else None)
        recorder.record([state_defense(optimizer, accounting)], scale, private=True)

    handle = optimizer.original_optimizer.register_step_pre_hook(record)
    try:
        with recorder.notes.watch():
            yield
    finally:
        handle.remove()


def state_defense(optimizer: Any, accounting: dict[str, float | int | None]) -> str:
    """Returns what the optimiser does as a `dp_sgd`, whose noise and clip are on the sum."""
    fields = {"clip": optimizer.max_grad_norm, "noise_multiplier": optimizer.noise_multiplier}
    given = {name: value for name, value in accounting.items() if value is not None}
    written = [f"{name}={value}" for name, value in (fields | given).items()]
    return f"dp_sgd:{','.join(written)}"


def scale_of(optimizer: Any, batch_size: int | None) -> float:
    """Returns what our mean over the batch is multiplied by to be what Opacus sends.

    It divides the sum by the size that it expects of a batch, which with Poisson sampling is not
    the size of this one. Where an attacker does not know that either, what arrives counts as the
    sum, as of one example.
    """
    divisor = 1.0
    if optimizer.loss_reduction == "mean":
        divisor = optimizer.expected_batch_size * optimizer.accumulated_iterations
    return (batch_size or 1) / divisor


def _refuse_strange(optimizer: Any) -> None:
    inner = getattr(optimizer, "original_optimizer", None)
    if inner is None:
        raise GradleakError(
            f"capture_private_steps() wants the optimiser that make_private() returned, not a"
            f" {type(optimizer).__name__}: of other loops use capture_steps()."
        )
    if not isinstance(optimizer.max_grad_norm, (int, float)):
        raise GradleakError(
            "This optimiser clips layer by layer, and dp_sgd clips each example's gradient as a"
            " whole: use flat clipping, or gradleak.observe() with a defense of your own."
        )
