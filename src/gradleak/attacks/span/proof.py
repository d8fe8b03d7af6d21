"""The last check of a guess: does it, run through the client's own computation, give the gradient that was seen?

A gradient of a batch is the mean of its sentences' gradients. So the shares with which the sentences' gradients make up what was
seen say how often each was in the batch, and with which label.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.span.checks import Sentence
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.target import Target

ENTRIES = 2**18  # of the gradient that are compared, small tensors first
GRADIENTS = 256  # one a sentence and label: more would take longer than the attack
SILENT = 1e-6  # a tensor this far under the largest is rounding
PROVED = 1e-3  # of what was seen may stay unexplained: rounding leaves 1e-5, a wrong word a tenth
BY_CHANNEL = 1.2  # times what a known channel leaves; over so many entries that is met to a percent
HIDES = 0.02  # of what was seen: where a channel leaves more unexplained, a wrong word may hide in it
WHOLE = 0.1  # how far a count may be from a whole number


@dataclass(frozen=True)
class Account:
    """How much of what was seen a guess does not explain, and what the batch was."""

    unexplained: float
    expected: float  # of the truth, by what the attacker knows of the channel
    sentences: tuple[Sentence, ...]  # each as often as it was in the batch
    labels: tuple[int, ...] | None

    @property
    def proved(self) -> bool:
        """Whether only what rounding and the known channel leave is unexplained, and that is too little to hide a wrong word."""
        return self.unexplained < PROVED + BY_CHANNEL * self.expected and self.expected < HIDES


def account(observation: Observation, sentences: Sequence[Sentence]) -> Account | None:
    """The guess held against the gradient; none where the update is not one gradient or there are too many labels to try."""
    target = observation.target
    labels = 1 if target.labels_are_tokens else target.classes
    if not observation.protocol.one_gradient or not sentences or len(sentences) * labels > GRADIENTS:
        return None
    seen = compared(observation)
    scale = torch.cat([_scale(observation, part) for part in seen])
    padded = _padded(target, sentences)
    columns = torch.stack([gradient(target, seen, row, label) for row in padded for label in range(labels)], dim=1)
    columns *= scale[:, None]
    wanted = observed(observation, seen) * scale
    shares = torch.linalg.lstsq(columns.cpu(), wanted[:, None].cpu(), driver="gelsd", rcond=1e-6).solution[:, 0]
    unexplained = float((columns.cpu() @ shares - wanted.cpu()).norm() / wanted.norm())
    errors = observation.channel.errors(observed(observation, seen), observation.knows.batch_size or 1) * scale
    expected = float(errors.norm() / wanted.norm())
    by_label = shares.view(len(sentences), labels)
    if labels > 1:
        by_label = _one_label(target, padded, by_label)
    return _counted(sentences, by_label, (unexplained, expected), target.labels_are_tokens)


def compared(observation: Observation) -> list[Part]:
    """The parts of the gradient that are compared: small ones first, and no word embeddings."""
    words = set(observation.target.groups["word_embedding"])
    parts = [observation.target.part(name) for name in observation.update.tensors]
    chosen, entries = list[Part](), 0
    for part in sorted((part for part in parts if part.parameter not in words), key=lambda part: part.size):
        if not chosen or entries + part.size <= ENTRIES:
            chosen.append(part)
            entries += part.size
    return chosen


def observed(observation: Observation, parts: Sequence[Part]) -> Float[Tensor, "entries"]:
    """What was seen of the parts, in one row."""
    return torch.cat([observation.update.tensors[part.name][0].flatten().double() for part in parts])


def gradient(target: Target, parts: Sequence[Part], sentence: Sentence, label: int) -> Float[Tensor, "entries"]:
    """The gradient of one sentence's loss in the same entries."""
    ids = torch.tensor([sentence], device=target.device)
    labels = ids if target.labels_are_tokens else torch.tensor([label], device=target.device)
    copies = {part.parameter: target.parameters[part.parameter].detach().requires_grad_() for part in parts}
    with torch.enable_grad():
        loss = target.losses(Batch(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), labels=labels), copies).sum()
    found = torch.autograd.grad(loss, list(copies.values()), materialize_grads=True)
    whole = dict(zip(copies, found, strict=True))
    return torch.cat([part.of(whole[part.parameter]).flatten().double() for part in parts])


def _padded(target: Target, sentences: Sequence[Sentence]) -> list[Sentence]:
    """Sentences as the client reads them: with their padding, if it is attended to."""
    width = max(map(len, sentences)) if target.attend_padding else 0
    return [(*sentence, *[target.vocabulary.pad] * (width - len(sentence))) for sentence in sentences]


def _scale(observation: Observation, part: Part) -> Float[Tensor, "entries"]:
    """Makes tensors count alike, except those without signal."""
    largest = max(float(tensor.norm()) for tensor in observation.update.tensors.values())
    size = float(observation.update.tensors[part.name].norm())
    factor = 0.0 if size < SILENT * largest else 1 / size
    return torch.full((part.size,), factor, dtype=torch.float64, device=observation.target.device)


@torch.no_grad()
def _one_label(
    target: Target, sentences: Sequence[Sentence], shares: Float[Tensor, "sentences labels"]
) -> Float[Tensor, "sentences labels"]:
    """The same gradient with as few labels as can be: gradients of all labels, weighted as predicted, cancel."""
    rows = []
    for sentence, share in zip(sentences, shares, strict=True):
        ids = torch.tensor([sentence], device=target.device)
        batch = Batch(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), labels=target.any_labels(*ids.shape))
        predicted = target.probabilities(batch)[0].double().cpu()
        rows.append(share - (share / predicted).min() * predicted)
    return torch.stack(rows)


def _counted(
    sentences: Sequence[Sentence], shares: Float[Tensor, "sentences labels"], left: tuple[float, float], labels_are_tokens: bool
) -> Account:
    """Shares as whole numbers of sentences, where they are."""
    largest, labels = shares.max(dim=1)
    counts = _whole(largest.tolist())
    repeated = tuple(sentence for sentence, count in zip(sentences, counts, strict=True) for _ in range(count))
    of_each = tuple(int(label) for label, count in zip(labels, counts, strict=True) for _ in range(count))
    return Account(*left, repeated, None if labels_are_tokens else of_each)


def _whole(shares: Sequence[float]) -> list[int]:
    """The smallest batch of which all shares are whole numbers of sentences; one each where there is none."""
    if abs(sum(shares) - 1) > WHOLE / len(shares):
        return [1] * len(shares)
    for size in range(len(shares), 2 * len(shares) + 8):
        counts = [round(share * size) for share in shares]
        if min(counts) >= 1 and all(abs(share * size - count) < WHOLE for share, count in zip(shares, counts, strict=True)):
            return counts
    return [1] * len(shares)
