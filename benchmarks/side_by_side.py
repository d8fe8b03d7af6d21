"""Many inverters of pictures trained in one loop: one for each public set and each defense.

All defenses see the same simulated gradients, and the weights of all inverters are multiplied in
one product. inverter_curves.py draws its figures with it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.learning_to_invert.features import SimulatedFeatures
from gradleak.attacks.learning_to_invert.medium import split
from gradleak.attacks.learning_to_invert.picture_attacks import (
    Errors,
    PictureGallery,
    PictureInversion,
)
from gradleak.attacks.learning_to_invert.simulation import Simulation, open_generator, per_client
from gradleak.attacks.learning_to_invert.training import (
    TrainingSchedule,
    choose_dtype,
    multiply_in,
    train,
)
from gradleak.core.attack import Bench, ClientSetting
from gradleak.core.batch import Batch
from gradleak.core.defense import Defense
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams

MEASURED = 1024  # clients by which features are scaled, at least
AT_ONCE = 512
# Looks at held-out pictures on the way, and at every power of two before the first: small sets are
# soon learnt by heart.
LOOKS = 12


class SideBySide:
    """Inverters for every defense × every gallery, in this order."""

    def __init__(
        self,
        attack: PictureInversion,
        setting: ClientSetting,
        defenses: Sequence[tuple[Defense, ...]],
        galleries: Sequence[PictureGallery],
        bench: Bench,
    ) -> None:
        protocol = setting.protocol
        if not protocol.one_gradient or protocol.dropout or setting.batch_size != 1:
            raise GradleakError(
                "Inverters side by side are for clients that send one gradient of one picture."
            )
        if attack.learning_rate is None:
            raise GradleakError("Inverters side by side learn at one rate: give learning_rate.")
        self.attack, self.bench, self.target = attack, bench, setting.target
        self.rate = attack.learning_rate
        halves = [split(gallery, attack.noun, fewest=2) for gallery in galleries]
        self.sources = [attack.make_source(self.target, training) for training, _ in halves]
        self.held_out = [held for _, held in halves]
        self.streams = bench.streams.child("side by side")
        self.gradients = per_client(setting.target)
        shape = galleries[0].shape
        settings = [replace(setting, defenses=chain) for chain in defenses]
        self.simulated = [
            SimulatedFeatures(Simulation(one), attack.make_features(one, shape, {}))
            for one in settings
        ]
        self.features = attack.make_features(setting, shape, {})
        self.count = len(defenses) * len(galleries)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(self.streams.child("weights").key[:6], "little"))
            network = attack.make_network(setting, self.features, shape, self.count)
        self.network = network.to(self.target.device)
        means = [training.pixels.float().mean(0) / 255 for training, _ in halves]
        # Each begins with the blind guess of its own gallery.
        self.network.start_from(torch.stack(means).repeat(len(defenses), 1, 1, 1))
        # Squared errors of held-out pictures, and the weights that had them
        self.best = torch.full((self.count,), torch.inf, device=self.target.device)
        weights = self.network.named_parameters()
        self.kept = {name: value.detach().clone() for name, value in weights}

    def run(self, look: Callable[[int, list[float]], None] = lambda step, errors: None) -> int:
        """Trains all of them and returns how many steps it took.

        Each is left in the state that did best on its held-out pictures. What reads labels learns
        by itself, and is left as it is at the end.
        """
        attack = self.attack
        self._measure()
        every = max(1, attack.steps // LOOKS)

        def compute_loss(step: int) -> Tensor:
            if step % every == 0 or (step < every and step.bit_count() == 1):
                look(step, self._keep_better())
            streams = self.streams.child("training", step)
            clients = self._draw(streams, attack.training_batch)
            return self.network.sum_errors(self._compare(clients, streams))

        schedule = TrainingSchedule(attack.steps, self.rate, attack.decay, attack.drops)
        with multiply_in(attack.precision, self.target.device):
            done = train(self.network, compute_loss, schedule, self.bench)
            look(done, self._keep_better())
        with torch.no_grad():
            for name, value in self.network.named_parameters():
                if not name.startswith("labels."):
                    value.copy_(self.kept[name])
        return done

    @torch.no_grad()
    def read(
        self, secrets: Batch, streams: Streams
    ) -> tuple[
        Float[Tensor, "inverters clients channels height width"],
        Int[Tensor, "inverters clients"],
    ]:
        """Returns what every inverter makes of the same clients [clients, 1, …], and their labels.

        Each sees them through its own defense.
        """
        found = []
        with multiply_in(self.attack.precision, self.target.device):
            for start in range(0, secrets.lead[0], AT_ONCE):
                some = secrets[start : start + AT_ONCE]
                features = self._simulate([some], streams.child(start))
                features = features.repeat_interleave(len(self.sources), dim=0)
                pixels, scores = self.network(features)
                found.append((pixels[:, :, 0].float(), scores[:, :, 0].argmax(-1)))
        guesses, labels = zip(*found, strict=True)
        return torch.cat(guesses, dim=1), torch.cat(labels, dim=1)

    def _draw(self, streams: Streams, clients: int) -> list[Batch]:
        """Returns clients of every gallery."""
        return [
            source.draw(
                clients, 1, open_generator(streams.child("pictures", place), self.target.device)
            )
            for place, source in enumerate(self.sources)
        ]

    def _simulate(
        self, batches: Sequence[Batch], streams: Streams, noisy: bool = True
    ) -> Float[Tensor, "inverters clients features"]:
        """Returns features of clients of some galleries, through every defense."""
        pixels = torch.cat([batch.pixels for batch in batches if batch.pixels is not None])
        together = Batch.of_pixels(pixels, torch.cat([batch.labels for batch in batches]))
        with multiply_in("float32", self.target.device):
            update = self.gradients(together)  # once, for all defenses
            rows = []
            for place, one in enumerate(self.simulated):
                own = streams.child("defense", place)
                sent = one.simulation.defend(update, own)
                rows.append(one.add_noise(one.features(sent), own, noisy))
        return torch.cat([row.view(len(batches), -1, row.shape[-1]) for row in rows])

    def _compare(self, batches: Sequence[Batch], streams: Streams) -> Errors:
        times = len(self.simulated)
        pixels = torch.stack([batch.pixels for batch in batches if batch.pixels is not None])
        labels = torch.stack([batch.labels for batch in batches])
        return self.network.compare(
            self._simulate(batches, streams),
            pixels.repeat(times, 1, 1, 1, 1, 1),
            labels.repeat(times, 1, 1),
            choose_dtype(self.attack.precision, self.target.device),
        )

    def _measure(self) -> None:
        clients = max(MEASURED, 2 * (self.attack.directions or 0))
        pieces = range(math.ceil(clients / AT_ONCE))
        streams = [self.streams.child("measured", piece) for piece in pieces]
        found = [self._simulate(self._draw(one, AT_ONCE), one, noisy=False) for one in streams]
        for inverter, features in enumerate(torch.cat(found, dim=1)):
            noise = self.simulated[inverter // len(self.sources)].noise
            self.network.measure(features, self.features.groups, noise, inverter)

    @torch.no_grad()
    def _keep_better(self) -> list[float]:
        """Looks at held-out pictures, and keeps the weights of inverters that never did better."""
        size = max(map(len, self.held_out))  # the few of a small set stand there several times
        places = torch.arange(size, device=self.target.device)
        batches = [held[places % len(held)].batch(1) for held in self.held_out]
        found = self._compare(batches, self.streams.child("held out")).squared
        better = found < self.best
        self.best = torch.where(better, found, self.best)
        for name, value in self.network.named_parameters():
            self.kept[name][better] = value[better]
        return [float(one) for one in found]
