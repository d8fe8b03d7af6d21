"""An inverter that has learnt, and how it is taught and read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.learning_to_invert.decoding import with_prior
from gradleak.attacks.learning_to_invert.factors import FactorFeatures
from gradleak.attacks.learning_to_invert.features import Features, HashedFeatures
from gradleak.attacks.learning_to_invert.inversion import TextInversion
from gradleak.attacks.learning_to_invert.inverter import ByPosition, Perceptron, Scaling, TextInverter, Words
from gradleak.attacks.learning_to_invert.reading import FittedInverter
from gradleak.attacks.learning_to_invert.saved import save_fit
from gradleak.attacks.learning_to_invert.slots import matched
from gradleak.core.attack import Bench, Reconstruction
from gradleak.core.target import Target
from gradleak.core.trainable import Setting


@dataclass(frozen=True, eq=False)
class Lesson:
    """Features of some clients and what they held."""

    features: Float[Tensor, "clients features"]
    ids: Int[Tensor, "clients slots tokens"]
    labels: Int[Tensor, "clients slots"] | None


def lesson_loss(model: TextInverter, lesson: Lesson, dtype: torch.dtype) -> Float[Tensor, ""]:
    """Cross-entropy of the words, and of the labels where there are any (equation 2), each text in its nearest slot."""
    with torch.autocast(lesson.features.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
        states, scores = model(lesson.features)
        states = model.words.reduce(states)
    ids, labels = lesson.ids, lesson.labels
    if ids.shape[1] > 1:
        order = matched(model, states, scores, ids, labels)
        ids = ids.gather(1, order[..., None].expand_as(ids))
        labels = None if labels is None else labels.gather(1, order)
    loss = model.words.loss(states.float(), ids, dtype)
    if scores is not None and labels is not None:
        loss = loss + F.cross_entropy(scores.float().flatten(0, 1), labels.flatten()) / ids.shape[-1]
    return loss


def new_inverter(
    attack: TextInversion, setting: Setting, features: Features, length: int, shares: Float[Tensor, "words"], seed: int
) -> TextInverter:
    """An inverter that has learnt nothing; the same for the same seed."""
    target, slots = setting.target, setting.batch_size
    known = known_table(target) if attack.words == "known" else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        width = min(attack.token_width, len(shares))  # a small vocabulary needs no more
        body: Perceptron | ByPosition
        if isinstance(features, FactorFeatures):
            body = ByPosition(features.blocks, sum(features.others), [one.cpu() for one in features.unmixing()], slots, width)
        else:
            body = Perceptron(features.size, slots * length, attack.first_width, width)
        words = Words(body.width, shares.cpu(), known)
        classes = None if target.labels_are_tokens else target.classes
        scaling = Scaling(features.size, features.groups)
        return TextInverter(scaling, body, words, slots, classes).to(target.device)


def known_table(target: Target) -> Float[Tensor, "words size"]:
    """What the attacker knows of every word: its row of the model's embeddings and, in a language model, of its output layer."""
    tables = [target.vocabulary.embeddings]
    outputs = target.module.get_output_embeddings() if target.labels_are_tokens else None  # type: ignore[operator]
    if outputs is not None and outputs.weight is not tables[0] and outputs.weight.data_ptr() != tables[0].data_ptr():
        tables.append(outputs.weight.detach())
    whole = torch.cat([table.float() for table in tables], dim=1).cpu()
    scaled: Tensor = (whole - whole.mean(0)) / whole.std(0).clamp_min(1e-6) / whole.shape[1] ** 0.5
    return scaled  # rows of length 1 or so


class FittedTextInverter(FittedInverter):
    """Reads words and, where there are any, labels."""

    def __init__(
        self, attack: TextInversion, setting: Setting, features: Features, model: TextInverter, facts: dict[str, Any]
    ) -> None:
        super().__init__(setting, features, facts)
        self.attack: TextInversion = attack
        self.model: TextInverter = model.eval()

    @property
    def summary(self) -> str:
        facts, clients = self.facts, self.facts["steps"] * self.attack.training_batch
        epochs = clients * self.setting.batch_size / facts["texts"]
        memory = "" if facts["peak_memory"] is None else f", peak memory {facts['peak_memory'] / 2**30:.1f} GiB"
        return (
            f"learnt from {clients} clients in {facts['steps']} steps ({epochs:.1f} epochs of {facts['texts']} public texts) "
            f"and {facts['seconds']:.0f} s "
            f"({facts['clients_per_second']:.0f} clients a second{memory}), learning rate {facts['rate']:.3g}; "
            f"on {facts['held_out']} held-out texts {100 * facts['held_out_accuracy']:.1f} % of the tokens are right"
        )

    @staticmethod
    def from_tensors(
        attack: TextInversion, setting: Setting, tensors: dict[str, Tensor], facts: dict[str, Any]
    ) -> "FittedTextInverter":
        bases = {name.removeprefix("features."): one for name, one in tensors.items() if name.startswith("features.")}
        features: Features
        if attack.features == "factors":
            features = FactorFeatures(setting, int(facts["length"]), bases)
        else:
            features = HashedFeatures(setting, attack.fraction, attack.hashing_seed, attack.signed, attack.largest)
        words = len(setting.target.vocabulary.allowed)
        model = new_inverter(attack, setting, features, int(facts["length"]), torch.full((words,), 1 / words), 0)
        model.load_state_dict(
            {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
        )
        return FittedTextInverter(attack, setting, features, model, facts)

    def save(self, path: Path) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        save_fit(path, tensors | {f"features.{name}": one for name, one in self.features.tensors().items()}, self.facts)

    def read(self, features: Tensor, bench: Bench) -> list[Reconstruction]:
        states, scores = self.model(features)
        ids = torch.cat([self._words(one, bench) for one in torch.split(self.model.words.reduce(states), 8)])
        labels = [None] * len(ids) if scores is None else [tuple(one) for one in scores.argmax(-1).tolist()]
        return [
            Reconstruction(tuple(self._sentence(row) for row in rows), labels=classes)
            for rows, classes in zip(ids.tolist(), labels, strict=True)
        ]

    def _words(self, reduced: Float[Tensor, "clients slots tokens size"], bench: Bench) -> Int[Tensor, "clients slots tokens"]:
        logits = self.model.words.logits(reduced)
        if not self.attack.prior_weight:
            return logits.argmax(-1)
        attack = self.attack
        rows = [
            with_prior(one, bench.prior, attack.prior_weight, attack.beams, attack.candidates) for one in logits.flatten(0, 1)
        ]
        return torch.stack(rows).view(logits.shape[:-1])

    def _sentence(self, ids: list[int]) -> tuple[int, ...]:
        """Up to where the padding begins."""
        pad = self.setting.target.vocabulary.pad
        end = ids.index(pad) if pad in ids else len(ids)
        return tuple(ids[: max(1, end)])
