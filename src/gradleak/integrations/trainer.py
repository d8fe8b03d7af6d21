"""A callback of Hugging Face's Trainer that captures what its optimiser is about to apply."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gradleak.core.errors import GradleakError
from gradleak.integrations.pytorch import refuse_unknown_facts
from gradleak.integrations.steps import StepRecorder, refuse_steps


class CaptureCallback(TrainerCallback):  # type: ignore[misc]
    """Writes gradients before steps of the optimiser, after accumulation and clipping.

    `CaptureCallback("captures", every=100, know=["batch_size"])` keeps every hundredth step, each
    in a file named by its round: the number of steps before it, so that round 100 was computed at
    the weights of `checkpoint-100`. The Trainer adds up the losses of accumulated batches of a
    classifier where it takes the mean of others; which it was is noted as the update's `scale`, and
    its clipping, which is on unless `max_grad_norm=0`, as a defense. Training is the same with it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int = 1,
        know: Sequence[str] = (),
        defense: str | Sequence[str] = (),
        scale: float | None = None,
        client: str = "",
    ) -> None:
        refuse_steps(every)
        refuse_unknown_facts(know)
        self.folder, self.every, self.know, self.client = Path(folder), every, tuple(know), client
        self.stated = (defense,) if isinstance(defense, str) else tuple(defense)
        self.scale = scale
        self.recorder: StepRecorder | None = None
        self.watching = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Listens to the model while the batches of a step are read, if its turn has come."""
        self.watching.close()  # a training before that was broken off
        if not state.is_world_process_zero or state.global_step % self.every:
            return
        if args.fp16 and self.scale is None:
            raise GradleakError(
                "Training in fp16 multiplies the loss by a number that changes: train in bf16, or"
                " state scale= (1, or the number of accumulated batches of a classifier)."
            )
        self.recorder = StepRecorder(
            given["model"], self.folder, self.every, self.know, self.client
        )
        self.recorder.round = state.global_step
        self.watching.enter_context(self.recorder.notes.watch())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Writes what the optimiser is about to apply."""
        self.watching.close()
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return
        scale = recorder.notes.scale(self.scale)
        clipped = []
        if args.max_grad_norm and args.max_grad_norm > 0:
            # Clipping comes after the sum: of the mean it is that much smaller
            clipped.append(f"clipping:clip={args.max_grad_norm / scale}")
        recorder.record([*self.stated, *clipped], scale)
