"""The last word of a text a language model learned from: it is predicted and never read, so that no layer's input holds it.

The loss is linear in the label of each position: what is left of the gradient when all known words are accounted for is the
gradient of predicting the last one.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.span.checks import Sentence
from gradleak.attacks.span.sentence_gradient import compared, gradient, observed
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.target import Target

TRIED = 16  # last words whose gradient is computed, by promise
EXPECTED = 8  # and so many that the model itself expects: their gradients are small, and so is their promise
SWEEPS = 3  # over the sentences of a batch


def with_last_words(observation: Observation, sentences: Sequence[Sentence]) -> list[Sentence]:
    """Every sentence with the last word that explains most of what is left; unchanged for protocols of more than one gradient."""
    if not observation.protocol.one_gradient:
        return list(sentences)
    target, parts = observation.target, compared(observation)
    seen = observed(observation, parts) * len(sentences)
    words = [int(target.vocabulary.allowed.nonzero()[0, 0])] * len(sentences)
    parts_of_sum = [gradient(target, parts, (*sentence, word), 0) for sentence, word in zip(sentences, words, strict=True)]
    for _ in range(1 if len(sentences) == 1 else SWEEPS):
        for place, sentence in enumerate(sentences):
            rest = seen - torch.stack([made for other, made in enumerate(parts_of_sum) if other != place] or [seen * 0]).sum(0)
            words[place], parts_of_sum[place] = _best_ending(target, parts, sentence, rest)
    return [(*sentence, word) for sentence, word in zip(sentences, words, strict=True)]


def _best_ending(
    target: Target, parts: Sequence[Part], sentence: Sentence, rest: Float[Tensor, "entries"]
) -> tuple[int, Float[Tensor, "entries"]]:
    """The word whose gradient is nearest to what is left, and that gradient."""
    promising = _promise(target, parts, sentence, rest).topk(min(TRIED, target.classes)).indices.tolist()
    likely = list(dict.fromkeys([*target.vocabulary.suffix[-1:], *_expected(target, sentence), *promising]))
    made = [gradient(target, parts, (*sentence, word), 0) for word in likely]
    nearest = int(torch.stack([(one - rest).norm() for one in made]).argmin())
    return likely[nearest], made[nearest]


def _expected(target: Target, sentence: Sentence) -> list[int]:
    """What the model holds likeliest to come next."""
    ids = torch.tensor([sentence], device=target.device)
    with torch.no_grad():
        next_words = target.probabilities(Batch(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), labels=ids))[0]
    return next_words.topk(min(EXPECTED, target.classes)).indices.tolist()


def _promise(target: Target, parts: Sequence[Part], sentence: Sentence, rest: Tensor) -> Float[Tensor, "words"]:
    """For every last word, the product of its own share of the gradient with what is left beside the known words' share."""
    ids = torch.tensor([[*sentence, sentence[-1]]], device=target.device)
    known = torch.nn.functional.one_hot(ids, target.classes).to(target.dtype)
    known[0, -1] = 0
    base = _entries(target, parts, ids, known, graph=False)
    last = torch.zeros(target.classes, dtype=target.dtype, device=target.device, requires_grad=True)
    labels = torch.cat([known[:, :-1], last[None, None]], dim=1)
    made = _entries(target, parts, ids, labels, graph=True)
    return torch.autograd.grad(((rest - base) * made).sum(), last)[0]


def _entries(target: Target, parts: Sequence[Part], ids: Tensor, labels: Tensor, graph: bool) -> Float[Tensor, "entries"]:
    copies = {part.parameter: target.parameters[part.parameter].detach().requires_grad_() for part in parts}
    with torch.enable_grad():
        batch = Batch(embeddings=target.embed(ids), mask=torch.ones_like(ids, dtype=torch.bool), labels=labels)
        loss = target.losses(batch, copies).sum()
        found = torch.autograd.grad(loss, list(copies.values()), create_graph=graph, materialize_grads=True)
    whole = dict(zip(copies, found, strict=True))
    return torch.cat([part.of(whole[part.parameter]).flatten().double() for part in parts])
