"""Fits an inverter of pictures: gradients made on the fly, a learning rate by trial, then the training itself."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradleak.attacks.learning_to_invert.features import Simulated, on_device
from gradleak.attacks.learning_to_invert.picture_fitted import FittedPictureInverter, features_of, new_inverter
from gradleak.attacks.learning_to_invert.picture_inverter import PictureInverter
from gradleak.attacks.learning_to_invert.picture_lessons import Errors, PictureLesson, errors_of
from gradleak.attacks.learning_to_invert.pictures import Gallery, gallery_of
from gradleak.attacks.learning_to_invert.precision import as_float, dtype_of, peak_memory
from gradleak.attacks.learning_to_invert.rates import LONGEST_TRIAL, best_rate
from gradleak.attacks.learning_to_invert.simulation import Simulation
from gradleak.attacks.learning_to_invert.training import Schedule, train
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch, Example
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.trainable import Setting

if TYPE_CHECKING:
    from gradleak.attacks.learning_to_invert.picture_attack import LtiPictures

RATES = (1e-3, 3e-4, 1e-4)  # the last is the paper's, for its batches of 256
PAPER_BATCH = 256
SHORTEST_PROBE = 30  # steps, where the public pictures are few
MEASURED = 2048  # clients by which features are scaled, at least; twice as many as directions are to be found
AT_ONCE = 512  # of these and of held-out ones


class PictureFitting:
    """One fit, from public pictures to an attack."""

    def __init__(self, attack: "LtiPictures", setting: Setting, public: Sequence[Example], bench: Bench) -> None:
        self.attack, self.setting, self.bench, self.target = attack, setting, bench, setting.target
        gallery = gallery_of(self.target, public)
        if len(gallery) < 2 * setting.batch_size + 1:
            raise GradleakError(f"{len(gallery)} public pictures are too few to learn from: give more with --public.")
        self.training, self.held_out = gallery.split()
        self.streams = bench.streams.child("fit")
        self.features = features_of(attack, setting)
        self.simulated = Simulated(Simulation(setting), self.features, bench)

    def run(self) -> FittedPictureInverter:
        began, attack = time.monotonic(), self.attack
        mean = (self.training.pixels.float() / 255).mean(0)
        seed = int.from_bytes(self.streams.child("weights").key[:6], "little")
        model = new_inverter(attack, self.setting, self.features.size, mean, seed)
        model.measure(0, self._measured(), self.features.groups, self.simulated.noise)
        facts: dict[str, Any] = {"attack": attack.learnt(), "setting": self.setting.described(), "shape": list(mean.shape)}
        with as_float(attack.precision, self.target.device):
            rate = self._rate(model, facts)
            trained = time.monotonic()
            schedule = Schedule(self._steps(attack.epochs, attack.steps), rate, attack.decay, attack.drops)
            done = train(model, self._loss(model, "training"), schedule, self.bench, {**facts, "rate": rate})
            facts |= {"clients_per_second": done * attack.training_batch / (time.monotonic() - trained)}
            error, right = self._held_out_errors(model)
        facts |= {"rate": rate, "steps": done, "features": self.features.size, "peak_memory": peak_memory(self.target.device)}
        facts |= {"pictures": len(self.training), "held_out": len(self.held_out)}
        facts |= {"held_out_error": error, "held_out_labels": right, "seconds": time.monotonic() - began}
        return FittedPictureInverter(attack, self.setting, self.features, model, facts)

    def _steps(self, epochs: float | None, otherwise: int) -> int:
        if epochs is None:
            return otherwise
        return max(1, math.ceil(epochs * len(self.training) / (self.attack.training_batch * self.setting.batch_size)))

    def _rate(self, model: PictureInverter, facts: dict[str, Any]) -> float:
        """The rate that is given, or leaves the least squared error on held-out pictures after a short training."""
        attack = self.attack
        if attack.learning_rate is not None:
            return attack.learning_rate
        steps = max(SHORTEST_PROBE, self._steps(attack.probe_epochs, 1))
        rates = [rate * math.sqrt(attack.training_batch / PAPER_BATCH) for rate in RATES]
        return best_rate(
            model,
            self._loss(model, "probe"),
            lambda: self._held_out_errors(model)[0],
            [Schedule(steps, rate, attack.decay, attack.drops) for rate in rates],
            self.bench,
            facts,
            attack.name,
            longest=self._steps(attack.epochs, attack.steps) // LONGEST_TRIAL,
        )

    def _loss(self, model: PictureInverter, purpose: str) -> Callable[[int], Tensor]:
        def loss(step: int) -> Tensor:
            streams = self.streams.child(purpose, step)
            batches = self._drawn(self.training, self.attack.training_batch, streams)
            return self._errors(model, batches, streams).loss(self.attack.variation_weight)

        return loss

    def _errors(self, model: PictureInverter, batches: Batch, streams: Streams) -> Errors:
        assert batches.pixels is not None
        lesson = PictureLesson(self._features(batches, streams)[None], batches.pixels[None], batches.labels[None])
        return errors_of(model, lesson, dtype_of(self.attack.precision, self.target.device))

    def _features(self, batches: Batch, streams: Streams) -> Tensor:
        with as_float("float32", self.target.device):
            return self.simulated(batches, streams)

    def _drawn(self, gallery: Gallery, clients: int, streams: Streams) -> Batch:
        generator = on_device(streams.child("pictures"), gallery.pixels)
        return gallery.draw(clients, self.setting.batch_size, self.attack.changes(self.target), generator)

    def _measured(self) -> Tensor:
        found = []
        clients = max(MEASURED, 2 * (self.attack.directions or 0))
        for piece in range(math.ceil(clients / AT_ONCE)):
            streams = self.streams.child("measured", piece)
            with as_float("float32", self.target.device):
                found.append(self.simulated.quiet(self._drawn(self.training, AT_ONCE, streams), streams))
        return torch.cat(found)

    @torch.no_grad()
    def _held_out_errors(self, model: PictureInverter) -> tuple[float, float]:
        """The squared error of held-out pictures, and the share of their labels that is right."""
        squared = right = total = 0.0
        for start, batches in self._held_out_batches():
            found, clients = self._errors(model, batches, self.streams.child("held out", start)), batches.lead[0]
            squared += clients * float(found.squared)
            right += clients * float(found.labels_right)
            total += clients
        return squared / total, right / total

    def _held_out_batches(self) -> Iterator[tuple[int, Batch]]:
        size = self.setting.batch_size
        whole = (self.held_out if len(self.held_out) >= size else self.training[:size]).batch(size)
        for start in range(0, whole.lead[0], AT_ONCE):
            yield start, whole[start : start + AT_ONCE]
