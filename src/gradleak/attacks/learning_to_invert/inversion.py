"""Learning to invert, whatever the medium: the attack, how it learns, how it then reads updates.

`Inversion` is the attack before it has learnt. `InverterFit` plays clients of one setting on public
examples and trains a network on what they would send. `Inverter` is what comes of it.
"""

import json
import math
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradleak.attacks.learning_to_invert.features import Features, SimulatedFeatures
from gradleak.attacks.learning_to_invert.medium import Lessons, Network, ReadingScore, SeenClients
from gradleak.attacks.learning_to_invert.simulation import Simulation, open_generator
from gradleak.attacks.learning_to_invert.training import (
    LONGEST_TRIAL,
    Precision,
    TrainingSchedule,
    choose_dtype,
    find_learning_rate,
    multiply_in,
    train,
)
from gradleak.core.attack import (
    Bench,
    ClientSetting,
    Cost,
    FittedAttack,
    Reconstruction,
    TrainableAttack,
)
from gradleak.core.batch import Batch, Example
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.streams import Streams
from gradleak.core.update import Update
from gradleak.records.files import written_aside

PAPER = "Wu, Chen, Guo & Weinberger, Learning to Invert, UAI 2023"
FORMAT = "gradleak.fit/2"  # of a saved fit: a safetensors file whose header says what was learnt
READ_AT_ONCE = 64  # clients


class Inversion(TrainableAttack):
    """Abstract: a subclass has fields, and says what its medium brings."""

    steps: int
    epochs: float | None
    training_batch: int
    learning_rate: float | None
    decay: float
    precision: Precision
    # A medium that has no such field learns with these.
    probe_steps: int = 30
    probe_epochs: float | None = None
    drops: bool = False

    noun: ClassVar[str]  # of public examples; the random stream that draws them has this name too
    rates: ClassVar[tuple[float, ...]]  # that are tried
    batch_of_rates: ClassVar[int]  # clients in a step that these rates are meant for
    only_for_reading: ClassVar[tuple[str, ...]] = ("weights",)  # fields that decide nothing before

    @property
    def requires(self) -> frozenset[Fact]:
        return frozenset({Fact.BATCH_SIZE})

    def adapts_to(self, channel: Channel) -> bool:
        return True  # it learnt from updates that went through the same defense

    @property
    @abstractmethod
    def clients_at_once(self) -> int:
        """Of those by which features are scaled, and of held-out ones."""

    @property
    @abstractmethod
    def clients_measured(self) -> int:
        """By how many clients features are scaled, at least."""

    @abstractmethod
    def make_lessons(self, setting: ClientSetting, public: Sequence[Example]) -> Lessons:
        """Returns what clients are made up from."""

    def measure_bases(
        self, setting: ClientSetting, lessons: Lessons, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Returns what features need that has to be measured; most need nothing."""
        return {}

    @abstractmethod
    def make_features(
        self, setting: ClientSetting, shape: Sequence[int], bases: Mapping[str, Tensor]
    ) -> Features:
        """Returns what the network is fed with; `shape` is that of an example."""

    @abstractmethod
    def make_network(
        self, setting: ClientSetting, features: Features, shape: Sequence[int]
    ) -> Network:
        """Returns a network that has learnt nothing; layers draw from the global generator."""

    @abstractmethod
    def describe_score(self, facts: dict[str, Any]) -> str:
        """Says how well held-out examples are read."""

    def open_network(
        self, setting: ClientSetting, features: Features, shape: Sequence[int], seed: int = 0
    ) -> Network:
        """Returns a network that has learnt nothing: the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_network(setting, features, shape).to(setting.target.device)

    def fit(self, setting: ClientSetting, public: Sequence[Example], bench: Bench) -> "Inverter":
        return InverterFit(self, setting, public, bench).run()

    def describe_learning(self) -> dict[str, Any]:
        described = super().describe_learning().items()
        return {name: value for name, value in described if name not in self.only_for_reading}

    def load(self, path: Path, setting: ClientSetting) -> "Inverter":
        tensors, facts = load_tensors(path)
        setting.refuse_another(f"{self.name} ({path})", facts["setting"])
        if facts["attack"] != self.describe_learning():
            raise GradleakError(
                f"{path} holds another {self.name} than this one: {facts['attack']}. Write the same"
                " fields, or fit again."
            )
        learnt, bases = (
            {name.removeprefix(part): one for name, one in tensors.items() if name.startswith(part)}
            for part in ("network.", "bases.")
        )
        features = self.make_features(setting, facts["shape"], bases)
        network = self.open_network(setting, features, facts["shape"])
        network.load_state_dict(learnt)
        return Inverter(self, setting, features, network, facts)


class InverterFit:
    """One fit: what is known of clients, and public examples, become an inverter."""

    def __init__(
        self,
        attack: Inversion,
        setting: ClientSetting,
        public: Sequence[Example],
        bench: Bench,
    ) -> None:
        self.attack, self.setting, self.bench = attack, setting, bench
        self.device = setting.target.device
        self.dtype = choose_dtype(attack.precision, self.device)  # of the network's products
        self.lessons = attack.make_lessons(setting, public)
        self.shape = self.lessons.training.shape
        self.streams = bench.streams.child("fit")
        generator = open_generator(self.streams.child("bases"), self.device)
        bases = attack.measure_bases(setting, self.lessons, generator)
        self.features = attack.make_features(setting, self.shape, bases)
        self.simulated = SimulatedFeatures(Simulation(setting), self.features, bench)

    def run(self) -> "Inverter":
        """Returns what was learnt."""
        began, attack = time.monotonic(), self.attack
        facts: dict[str, Any] = {
            "attack": attack.describe_learning(),
            "shape": self.shape,
            "setting": self.setting.describe(),
        }
        # Layers draw from torch's global generator, which takes a number.
        seed = int.from_bytes(self.streams.child("weights").key[:6], "little")
        network = attack.open_network(self.setting, self.features, self.shape, seed)
        network.start_from(self.lessons.blind_guess)
        self.measure(network)
        with multiply_in(attack.precision, self.device):
            given = attack.learning_rate
            facts["rate"] = rate = self.find_rate(network, facts) if given is None else given
            schedule = TrainingSchedule(self.steps, rate, attack.decay, attack.drops)
            trained = time.monotonic()
            done = train(network, self.make_loss(network, "training"), schedule, self.bench, facts)
            seconds = time.monotonic() - trained
            scores = self.judge(network, self.observe_held_out())
        total = max(1, sum(score.total for score in scores))  # texts of padding alone have none
        return Inverter(
            attack,
            self.setting,
            self.features,
            network,
            facts
            | {
                "steps": done,
                "features": self.features.size,
                "examples": len(self.lessons.training),
                "held_out": len(self.lessons.held_out),
                "held_out_error": sum(score.error for score in scores) / total,
                "held_out_right": sum(score.right for score in scores) / total,
                "clients_per_second": done * attack.training_batch / seconds,
                # Of all at once, on a GPU; nobody counts them on a CPU
                "peak_memory": torch.cuda.max_memory_allocated(self.device)
                if self.device.type == "cuda"
                else None,
                "seconds": time.monotonic() - began,
            },
        )

    @property
    def steps(self) -> int:
        """How many steps the training has."""
        epochs = self.attack.epochs
        return self.attack.steps if epochs is None else self.count_steps(epochs)

    def count_steps(self, epochs: float) -> int:
        """Returns the steps in which clients hold all public examples so many times."""
        step = self.attack.training_batch * self.setting.batch_size
        return max(1, math.ceil(epochs * len(self.lessons.training) / step))

    def measure(self, network: Network) -> None:
        """Lets the network find how to scale features, by clients that are drawn for it."""
        clients, noisy = self.attack.clients_at_once, network.measured_with_noise
        pieces = range(math.ceil(self.attack.clients_measured / clients))
        every = (self.streams.child("measured", piece) for piece in pieces)
        found = [self.observe(self.draw(clients, one), one, noisy).features for one in every]
        network.measure(torch.cat(found), self.features.groups, self.simulated.noise)

    def find_rate(self, network: Network, facts: dict[str, Any]) -> float:
        """Returns the learning rate that leaves the least error on held-out examples."""
        attack, held_out = self.attack, self.observe_held_out()
        steps = attack.probe_steps
        if attack.probe_epochs is not None:
            steps = max(steps, self.count_steps(attack.probe_epochs))
        # Of more clients in a step the mean slope is surer, and a step may be longer.
        larger = math.sqrt(attack.training_batch / attack.batch_of_rates)
        rates = [rate * larger for rate in attack.rates]
        return find_learning_rate(
            network,
            self.make_loss(network, "probe"),
            lambda: sum(score.error for score in self.judge(network, held_out)),
            [TrainingSchedule(steps, rate, attack.decay, attack.drops) for rate in rates],
            self.bench,
            facts,
            attack.name,
            longest=self.steps // LONGEST_TRIAL,
        )

    def make_loss(self, network: Network, purpose: str) -> Any:
        """Returns a function from a step's number to its loss."""

        def compute_loss(step: int) -> Tensor:
            streams = self.streams.child(purpose, step)
            seen = self.observe(self.draw(self.attack.training_batch, streams), streams)
            return network.loss(seen, self.dtype)

        return compute_loss

    def draw(self, clients: int, streams: Streams) -> Batch:
        """Returns clients to learn from."""
        generator = open_generator(streams.child(self.attack.noun), self.device)
        return self.lessons.source.draw(clients, self.setting.batch_size, generator)

    def observe(self, clients: Batch, streams: Streams, noisy: bool = True) -> SeenClients:
        """Returns what is seen of these clients; gradients are computed in full precision."""
        with multiply_in("float32", self.device):
            return SeenClients(self.simulated(clients, streams, noisy), clients)

    def observe_held_out(self) -> list[SeenClients]:
        """Returns what is seen of held-out clients, the same each time."""
        clients, most = self.lessons.hold_out(self.setting.batch_size), self.attack.clients_at_once
        return [
            self.observe(clients[start : start + most], self.streams.child("held out", start))
            for start in range(0, clients.lead[0], most)
        ]

    def judge(self, network: Network, held_out: Sequence[SeenClients]) -> list[ReadingScore]:
        """Returns how well these clients are read, some at a time."""
        return [network.judge(seen, self.dtype) for seen in held_out]


class Inverter(FittedAttack):
    """Reads updates of one setting, each in a single pass."""

    def __init__(
        self,
        attack: Inversion,
        setting: ClientSetting,
        features: Features,
        network: Network,
        facts: dict[str, Any],
    ) -> None:
        self.attack, self.setting, self.features = attack, setting, features
        self.network, self.facts = network.eval(), facts
        # Learning is a part of the cost: the first guesses carry it.
        self.unpaid = float(facts["seconds"])

    @property
    def requires(self) -> frozenset[Fact]:
        return self.attack.requires

    def adapts_to(self, channel: Channel) -> bool:
        return self.attack.adapts_to(channel)

    @property
    def summary(self) -> str:
        facts, noun = self.facts, self.attack.noun
        clients = facts["steps"] * self.attack.training_batch
        epochs = clients * self.setting.batch_size / facts["examples"]
        memory = facts["peak_memory"]
        held = "" if memory is None else f", peak memory {memory / 2**30:.1f} GiB"
        return (
            f"learnt from {clients} clients in {facts['steps']} steps ({epochs:.1f} epochs of "
            f"{facts['examples']} public {noun}) and {facts['seconds']:.0f} s "
            f"({facts['clients_per_second']:.0f} clients a second{held}), "
            f"learning rate {facts['rate']:.3g}; on {facts['held_out']} held-out {noun} "
            f"{self.attack.describe_score(facts)}"
        )

    @torch.no_grad()
    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        found: list[Reconstruction] = []
        for start in range(0, len(observations), READ_AT_ONCE):
            began = time.monotonic()
            some = observations[start : start + READ_AT_ONCE]
            for observation in some:
                self.refuse_another(observation)
            tensors = {
                name: torch.cat([observation.update.tensors[name] for observation in some])
                for name in some[0].update.tensors
            }
            guesses = self.network.read(self.features(Update(tensors)), bench)
            cost = Cost((time.monotonic() - began + self.unpaid) / len(some), 1)
            self.unpaid = 0.0  # later guesses cost only their own reading
            found += [replace(guess, cost=cost) for guess in guesses]
            bench.progress.report(len(found), len(observations))
        return found

    def refuse_another(self, observation: Observation) -> None:
        """Refuses an update of another setting than this one, by what differs."""
        setting, seen = self.setting, observation.target
        # Another object may be the same model: its weights decide.
        same = seen is setting.target or all(
            path in seen.parameters and torch.equal(value, seen.parameters[path])
            for path, value in setting.target.parameters.items()
        )
        for is_ours, otherwise in (
            (same, "to another target: fit it to this one"),
            (
                observation.knows.defenses in (None, setting.defenses),
                "through other defenses: fit it through these",
            ),
            (
                tuple(observation.update.tensors) == setting.view.visible(setting.target),
                "to another view: fit it to this one",
            ),
            (
                observation.batch_size == setting.batch_size,
                f"to batches of {setting.batch_size}, not of {observation.batch_size}: fit it anew",
            ),
        ):
            if not is_ours:
                raise GradleakError(f"This {self.attack.name} was fitted {otherwise}.")

    def save(self, path: Path) -> None:
        tensors = {f"network.{name}": one for name, one in self.network.state_dict().items()}
        tensors |= {f"bases.{name}": one for name, one in self.features.bases.items()}
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        header = {"format": FORMAT, "facts": json.dumps(self.facts, sort_keys=True)}
        with written_aside(path) as aside:
            save_file(whole, aside, header)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns tensors and facts of a saved fit."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        if header.get("format") != FORMAT:
            raise GradleakError(
                f"{path} is not a {FORMAT}: name a file that an audit left under fits, or remove"
                " this one to fit anew."
            )
        return load_file(path), json.loads(header["facts"])
    except (OSError, SafetensorError) as error:
        raise GradleakError(f"Cannot read the fit {path}: {error}.") from error
