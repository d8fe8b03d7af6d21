"""Some entries of the gradient of one sentence, to be held against the same entries of what was seen."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.span.checks import Sentence
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.target import Target

ENTRIES = 2**18  # of the gradient that are compared, small tensors first


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
