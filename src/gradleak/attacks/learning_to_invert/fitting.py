"""Fits a text inverter: gradients made on the fly, a learning rate by trial, then the training itself."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradleak.attacks.learning_to_invert.factors import FactorFeatures
from gradleak.attacks.learning_to_invert.features import Features, HashedFeatures, Simulated, on_device
from gradleak.attacks.learning_to_invert.fitted import FittedTextInverter, Lesson, lesson_loss, new_inverter
from gradleak.attacks.learning_to_invert.inversion import TextInversion
from gradleak.attacks.learning_to_invert.inverter import TextInverter
from gradleak.attacks.learning_to_invert.precision import as_float, dtype_of, peak_memory
from gradleak.attacks.learning_to_invert.rates import LONGEST_TRIAL, best_rate
from gradleak.attacks.learning_to_invert.simulation import Simulation
from gradleak.attacks.learning_to_invert.slots import matched
from gradleak.attacks.learning_to_invert.texts import Corpus, as_batch, corpus_of, marginal
from gradleak.attacks.learning_to_invert.training import Schedule, train
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch, Example
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.trainable import Setting

RATES = (1e-3, 1e-4, 1e-5)  # the paper's, for its batches of 64
PAPER_BATCH = 64
BASES = 256  # clients by which the bases of factors are found
MEASURED = 512  # clients by which features are scaled
AT_ONCE = 128  # of these and of held-out ones, if training has smaller batches


class Fitting:
    """One fit, from public texts to an attack."""

    def __init__(self, attack: TextInversion, setting: Setting, public: Sequence[Example], bench: Bench) -> None:
        self.attack, self.setting, self.bench = attack, setting, bench
        self.target = setting.target
        corpus = corpus_of(setting, public, attack.length)
        if len(corpus) < 2 * setting.batch_size:
            raise GradleakError(f"{len(corpus)} public texts are too few to learn from: give more with --public.")
        self.training, self.held_out = corpus.split()
        self.source = attack.source(self.target, self.training)
        self.streams = bench.streams.child("fit")
        self.simulated = Simulated(Simulation(setting), self._features(), bench)

    def run(self) -> FittedTextInverter:
        began = time.monotonic()
        length = self.training.ids.shape[1]
        shares = marginal(self.target, self.training)
        seed = int.from_bytes(self.streams.child("weights").key[:6], "little")
        model = new_inverter(self.attack, self.setting, self.simulated.features, length, shares, seed)
        model.scaling.measure(self._measured())
        facts = {"attack": self.attack.learnt(), "setting": self.setting.described(), "length": length}
        with as_float(self.attack.precision, self.target.device):
            rate = self._rate(model, facts)
            schedule = Schedule(self._steps(), rate, self.attack.decay)
            trained = time.monotonic()
            done = train(model, self._loss(model, "training"), schedule, self.bench, {**facts, "rate": rate})
        training = time.monotonic() - trained
        facts |= {"rate": rate, "steps": done, "features": self.simulated.features.size}
        facts |= {"held_out": len(self.held_out), "texts": len(self.training), "peak_memory": peak_memory(self.target.device)}
        facts |= {"clients_per_second": done * self.attack.training_batch / training}
        facts |= {"held_out_accuracy": self._held_out_accuracy(model), "seconds": time.monotonic() - began}
        return FittedTextInverter(self.attack, self.setting, self.simulated.features, model, facts)

    def _features(self) -> Features:
        attack = self.attack
        if attack.features == "factors":
            generator = on_device(self.streams.child("bases"), self.target.vocabulary.embeddings)
            return FactorFeatures.measured(self.setting, self.source.draw(BASES, self.setting.batch_size, generator))
        return HashedFeatures(self.setting, attack.fraction, attack.hashing_seed, attack.signed, attack.largest)

    def _steps(self) -> int:
        if self.attack.epochs is None:
            return self.attack.steps
        return math.ceil(self.attack.epochs * len(self.training) / (self.attack.training_batch * self.setting.batch_size))

    def _rate(self, model: Any, facts: dict[str, Any]) -> float:
        """The rate that is given, or was found before an interruption, or leaves the least loss on held-out texts."""
        if self.attack.learning_rate is not None:
            return self.attack.learning_rate
        judged = self._held_out_lessons()
        rates = [rate * math.sqrt(self.attack.training_batch / PAPER_BATCH) for rate in RATES]
        return best_rate(
            model,
            self._loss(model, "probe"),
            lambda: sum(float(lesson_loss(model, lesson, self._dtype)) for lesson in judged),
            [Schedule(self.attack.probe_steps, rate, self.attack.decay) for rate in rates],
            self.bench,
            facts,
            self.attack.name,
            longest=self._steps() // LONGEST_TRIAL,
        )

    def _loss(self, model: Any, purpose: str) -> Any:
        def loss(step: int) -> Tensor:
            lesson = self._lesson(self.streams.child(purpose, step), self.attack.training_batch)
            return lesson_loss(model, lesson, self._dtype)

        return loss

    def _lesson(self, streams: Streams, clients: int) -> Lesson:
        generator = on_device(streams.child("texts"), self.target.vocabulary.embeddings)
        batches = self.source.draw(clients, self.setting.batch_size, generator)
        return self._taught(batches, streams)

    def _taught(self, batches: Batch, streams: Streams) -> Lesson:
        assert batches.ids is not None
        with as_float("float32", self.target.device):
            features = self.simulated(batches, streams)
        return Lesson(features, batches.ids, None if self.target.labels_are_tokens else batches.labels)

    def _measured(self) -> Tensor:
        clients = max(self.attack.training_batch, AT_ONCE)
        pieces = [self.streams.child("measured", piece) for piece in range(math.ceil(MEASURED / clients))]
        return torch.cat([self._lesson(streams, clients).features for streams in pieces])

    def _held_out_lessons(self) -> list[Lesson]:
        """Held-out texts as clients' batches; real texts whatever the attack learns from."""
        size = self.setting.batch_size
        whole: Corpus = self.held_out[: len(self.held_out) // size * size] if len(self.held_out) >= size else self.training[:size]
        clients = as_batch(self.target, whole, size)
        most = max(self.attack.training_batch, AT_ONCE)
        starts = range(0, clients.lead[0], most)
        return [self._taught(clients[start : start + most], self.streams.child("held out", start)) for start in starts]

    @torch.no_grad()
    def _held_out_accuracy(self, model: TextInverter) -> float:
        """The share of the tokens of held-out texts that are read right; of several in a batch, by the nearest slot."""
        right = total = 0
        for lesson in self._held_out_lessons():
            states, scores = model(lesson.features)
            reduced, ids = model.words.reduce(states), lesson.ids
            if ids.shape[1] > 1:
                order = matched(model, reduced, scores, ids, lesson.labels)
                ids = ids.gather(1, order[..., None].expand_as(ids))
            for some, truth in zip(torch.split(reduced, 8), torch.split(ids, 8), strict=True):
                counted = truth != self.target.vocabulary.pad
                right += int(((model.words.logits(some).argmax(-1) == truth) & counted).sum())
                total += int(counted.sum())
        return right / max(1, total)

    @property
    def _dtype(self) -> torch.dtype:
        return dtype_of(self.attack.precision, self.target.device)
