"""Many inverters trained in one loop: one for each set of public pictures and each defense.

All defenses see the same simulated gradients, and the weights of all inverters are multiplied in one product.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.learning_to_invert.features import Simulated, on_device
from gradleak.attacks.learning_to_invert.picture_attack import LtiPictures
from gradleak.attacks.learning_to_invert.picture_fitted import features_of, new_inverter
from gradleak.attacks.learning_to_invert.picture_lessons import Errors, PictureLesson, errors_of
from gradleak.attacks.learning_to_invert.pictures import Gallery
from gradleak.attacks.learning_to_invert.precision import as_float, dtype_of
from gradleak.attacks.learning_to_invert.simulation import Simulation
from gradleak.attacks.learning_to_invert.training import Schedule, train
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.defense import Defense
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.trainable import Setting
from gradleak.matching.per_client import per_client

MEASURED = 1024  # clients by which features are scaled, at least
AT_ONCE = 512
LOOKS = 12  # at held-out pictures on the way, and at every power of two before the first: small sets are soon learnt by heart


class SideBySide:
    """Inverters for every defense × every gallery, in this order."""

    def __init__(
        self,
        attack: LtiPictures,
        setting: Setting,
        defenses: Sequence[tuple[Defense, ...]],
        galleries: Sequence[Gallery],
        bench: Bench,
    ) -> None:
        if not setting.protocol.one_gradient or setting.protocol.dropout or setting.batch_size != 1:
            raise GradleakError("Inverters side by side are for clients that send one gradient of one picture.")
        if attack.learning_rate is None:
            raise GradleakError("Inverters side by side learn at one rate: give learning_rate.")
        self.attack, self.setting, self.bench, self.target = attack, setting, bench, setting.target
        self.split = [gallery.split() for gallery in galleries]
        self.streams = bench.streams.child("side by side")
        self.gradients = per_client(setting.target)
        settings = [replace(setting, defenses=chain) for chain in defenses]
        self.features = features_of(attack, setting)
        self.simulated = [Simulated(Simulation(one), features_of(attack, one)) for one in settings]
        self.count = len(defenses) * len(galleries)
        means = torch.stack([training.pixels.float().mean(0) / 255 for training, _ in self.split])
        seed = int.from_bytes(self.streams.child("weights").key[:6], "little")
        self.model = new_inverter(attack, setting, self.features.size, means[0], seed, self.count)
        with torch.no_grad():  # each begins with the blind guess of its own gallery
            self.model.pixels.bias.copy_(means.flatten(1)[:, None].repeat(len(defenses), 1, 1))
        self.best = torch.full((self.count,), torch.inf, device=self.target.device)  # squared error of held-out pictures
        self.kept = {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def run(self, look: Callable[[int, list[float]], None] = lambda step, errors: None) -> int:
        """Trains all of them and leaves each in the state that did best on its held-out pictures; says how many steps it took.

        What reads labels learns by itself, and is left as it is at the end.
        """
        attack, rate = self.attack, self.attack.learning_rate
        assert rate is not None
        self._measure()
        every = max(1, attack.steps // LOOKS)

        def loss(step: int) -> Tensor:
            if step % every == 0 or (step < every and step.bit_count() == 1):
                look(step, self._keep_better())
            streams = self.streams.child("training", step)
            return self._errors(self._drawn(streams, attack.training_batch), streams).loss(attack.variation_weight)

        with as_float(attack.precision, self.target.device):
            done = train(self.model, loss, Schedule(attack.steps, rate, attack.decay, attack.drops), self.bench)
            look(done, self._keep_better())
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                if not name.startswith("labels."):
                    value.copy_(self.kept[name])
        return done

    @torch.no_grad()
    def guesses(
        self, secrets: Batch, streams: Streams
    ) -> tuple[Float[Tensor, "inverters clients channels height width"], Int[Tensor, "inverters clients"]]:
        """What every inverter makes of the same clients [clients, 1, …], each through its defense; and the labels it reads."""
        found = []
        with as_float(self.attack.precision, self.target.device):
            for start in range(0, secrets.lead[0], AT_ONCE):
                some = secrets[start : start + AT_ONCE]
                features = self._features([some], streams.child(start)).repeat_interleave(len(self.split), dim=0)
                pixels, scores = self.model(features)
                found.append((pixels[:, :, 0].float(), scores[:, :, 0].argmax(-1)))
        return torch.cat([pixels for pixels, _ in found], dim=1), torch.cat([labels for _, labels in found], dim=1)

    def _drawn(self, streams: Streams, clients: int) -> list[Batch]:
        """Clients of every gallery."""
        drawn = []
        for place, (training, _) in enumerate(self.split):
            generator = on_device(streams.child("pictures", place), training.pixels)
            drawn.append(training.draw(clients, 1, self.attack.changes(self.target), generator))
        return drawn

    def _features(
        self, batches: Sequence[Batch], streams: Streams, noisy: bool = True
    ) -> Float[Tensor, "inverters clients features"]:
        """Of clients of some galleries, through every defense; their gradients are computed once."""
        together = _joined(batches)
        with as_float("float32", self.target.device):
            update = self.gradients(together)
            rows = [one.defended(update, streams.child("defense", place), noisy) for place, one in enumerate(self.simulated)]
        return torch.cat([row.view(len(batches), -1, row.shape[-1]) for row in rows])

    def _errors(self, batches: Sequence[Batch], streams: Streams) -> Errors:
        times = len(self.simulated)
        pixels = torch.stack([batch.pixels for batch in batches if batch.pixels is not None])
        labels = torch.stack([batch.labels for batch in batches])
        features = self._features(batches, streams)
        lesson = PictureLesson(features, pixels.repeat(times, 1, 1, 1, 1, 1), labels.repeat(times, 1, 1))
        return errors_of(self.model, lesson, dtype_of(self.attack.precision, self.target.device))

    def _measure(self) -> None:
        clients = max(MEASURED, 2 * (self.attack.directions or 0))
        pieces = [self.streams.child("measured", piece) for piece in range(math.ceil(clients / AT_ONCE))]
        measured = torch.cat([self._features(self._drawn(one, AT_ONCE), one, noisy=False) for one in pieces], dim=1)
        for inverter, features in enumerate(measured):
            noise = self.simulated[inverter // len(self.split)].noise
            self.model.measure(inverter, features, self.features.groups, noise)

    @torch.no_grad()
    def _keep_better(self) -> list[float]:
        """Looks at held-out pictures, and keeps the weights of the inverters that never did better."""
        size = max(len(held) for _, held in self.split)  # the few pictures of a small set stand there several times
        batches = [held[torch.arange(size, device=held.pixels.device) % len(held)].batch(1) for _, held in self.split]
        found = self._errors(batches, self.streams.child("held out")).squared
        better = found < self.best
        self.best = torch.where(better, found, self.best)
        for name, value in self.model.named_parameters():
            self.kept[name][better] = value[better]
        return [float(one) for one in found]


def _joined(batches: Sequence[Batch]) -> Batch:
    pixels = torch.cat([batch.pixels for batch in batches if batch.pixels is not None])
    return Batch.of_pixels(pixels, torch.cat([batch.labels for batch in batches]))
