"""Step 4: what of the update is explained by the sentences found so far, and what is left of it.

A batch's gradient is a sum of its sentences' own, each with a share. Two things follow from that.

`Remainder` takes found sentences out of the first layer's gradient, which leaves the gradient of a
smaller batch: the words of the sentences still missing stand out of it (step 2 begins again there).

`append_last_words` finds what no layer's input holds: the last word of a text that a language model
learned from, which is predicted and never read. What is left when all read words are accounted for
is the gradient of predicting it.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.span.row_space import Check, RowSpace
from gradleak.core.attack import TokenIds
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.parts import ATTENTION_INPUTS, Part
from gradleak.core.target import Target
from gradleak.matching.inputs import matrix_of, visible_linear_parts

CLEAREST = 8  # tokens of a sentence with the strongest gradient, which say what its share is
# How far the tokens' shares may be apart: rounding leaves 1e-3, and a wrong label is far off.
AGREE = 0.05
MOST_LABELS = 8

ENTRIES = 2**18  # of the gradient that are compared, small tensors first
TRIED = 16  # last words whose gradient is computed, by promise
# And so many that the model itself expects: their gradients are small, and so is their promise.
EXPECTED = 8
SWEEPS = 3  # over the sentences of a batch


class Remainder:
    """Takes sentences out of the first layer's gradient of one observation.

    A matrix of the gradient is Σ_t δ_t x_tᵀ. Where the inputs x_t are independent, a known x_t
    picks out its δ_t, and this held against the sentence's own δ_t gives the sentence's share.
    """

    def __init__(self, observation: Observation, space: RowSpace, check: Check) -> None:
        self.observation, self.space, self.check = observation, space, check
        self.first = visible_linear_parts(observation, 1, ATTENTION_INPUTS)
        # Where tokens have mixed and their inputs are independent.
        self.mixed = visible_linear_parts(observation, 1, ("ffn_in",))
        seen = {name: tensor[0] for name, tensor in observation.update.tensors.items()}
        self.seen = self._stack(self.mixed, seen)
        self.left = self._stack(self.first, seen) @ space.basis
        self.taken: list[TokenIds] = []

    def subtract(self, sentences: Sequence[TokenIds]) -> Float[Tensor, "outputs rank"] | None:
        """Returns the gradient without these sentences, along the directions of its span.

        None where the share of one of them does not show.
        """
        for sentence in sentences:
            if sentence not in self.taken:
                part = self._compute_part(sentence)
                if part is None:
                    return None
                self.left = self.left - part
                self.taken.append(sentence)
        return self.left

    def _compute_part(self, sentence: TokenIds) -> Float[Tensor, "outputs rank"] | None:
        """Computes a sentence's own part of the gradient, with the label that agrees."""
        target, parts = self.observation.target, [*self.mixed, *self.first]
        for label in range(min(target.classes, MOST_LABELS)):
            flat = compute_gradient(target, parts, sentence, label)
            pieces = zip(parts, torch.split(flat, [part.size for part in parts]), strict=True)
            own = {part.name: piece.view(part.shape) for part, piece in pieces}
            share = self._find_share(sentence, self._stack(self.mixed, own))
            if share is not None:
                return share * self._stack(self.first, own) @ self.space.basis
        return None

    def _find_share(self, sentence: TokenIds, own: Float[Tensor, "outputs inputs"]) -> float | None:
        """Finds how much of a sentence's gradient with some label is in what was seen.

        None where the tokens disagree: the sentence did not have this label.
        """
        space = self.check.space
        inputs = self.check.compute_inputs([sentence]).double() @ space.basis
        # Rows that pick out one token each: their products with what was seen are the inputs.
        duals = (inputs / space.strengths.square()) @ (self.seen @ space.basis).mT
        clearest = duals.norm(dim=1).argsort()[:CLEAREST]
        # If the sentence is in the batch with share s, G = s·own + others, and the duals leave the
        # others out: duals·own should be the inputs over s.
        images, inputs = duals[clearest] @ (own @ space.basis), inputs[clearest]
        inverse = (images * inputs).sum() / inputs.square().sum()
        apart = float((images - inverse * inputs).norm() / images.norm())
        return float(1 / inverse) if apart < AGREE else None

    def _stack(
        self, parts: Sequence[Part], tensors: dict[str, Tensor]
    ) -> Float[Tensor, "outputs inputs"]:
        target = self.observation.target
        return torch.cat([matrix_of(target, part, tensors[part.name]) for part in parts]).double()


def open_remainder(observation: Observation, space: RowSpace, check: Check) -> Remainder | None:
    """Opens the remainder of an observation; none where the gradient cannot be taken apart.

    That is where the update is not one gradient, where padding is a token too, and where the place
    that the check looks at is not the one where tokens have just mixed.
    """
    target = observation.target
    if not observation.protocol.one_gradient or target.labels_are_tokens or target.attend_padding:
        return None
    if target.labels_are_open:  # with any label a sentence's own part is another one
        return None
    first = visible_linear_parts(observation, 1, ATTENTION_INPUTS)
    if any(part.cut for part in first) or not visible_linear_parts(observation, 1, ("ffn_in",)):
        return None
    return Remainder(observation, space, check)


def append_last_words(observation: Observation, sentences: Sequence[TokenIds]) -> list[TokenIds]:
    """Appends to every sentence the last word that explains most of what is left.

    Sentences are unchanged where the update is more than one gradient.
    """
    if not observation.protocol.one_gradient:
        return list(sentences)
    target, parts = observation.target, _select_parts(observation)
    tensors = observation.update.tensors
    seen = torch.cat([tensors[part.name][0].flatten() for part in parts]).double() * len(sentences)
    words = [int(target.vocabulary.allowed.nonzero()[0, 0])] * len(sentences)
    made = [compute_gradient(target, parts, (*one, words[0]), 0) for one in sentences]
    whole = target.batch_of([(*one, words[0]) for one in sentences], None)
    weights = target.weigh(whole) / target.weigh(whole).mean()  # where long texts count more
    # A sentence's last word is found from what the others leave, whose last words change meanwhile.
    for _ in range(1 if len(sentences) == 1 else SWEEPS):
        for place, sentence in enumerate(sentences):
            others = [weights[other] * one for other, one in enumerate(made) if other != place]
            rest = (seen - torch.stack(others or [seen * 0]).sum(0)) / weights[place]
            words[place], made[place] = _find_last_word(target, parts, sentence, rest)
    return [(*sentence, word) for sentence, word in zip(sentences, words, strict=True)]


def _select_parts(observation: Observation) -> list[Part]:
    """Selects the parts of the gradient that are compared: small ones, and no word embeddings."""
    words = set(observation.target.groups["word_embedding"])
    parts = [observation.target.part(name) for name in observation.update.tensors]
    chosen, entries = list[Part](), 0
    inner = (part for part in parts if part.parameter not in words)
    for part in sorted(inner, key=lambda part: part.size):
        if not chosen or entries + part.size <= ENTRIES:
            chosen.append(part)
            entries += part.size
    return chosen


def _find_last_word(
    target: Target, parts: Sequence[Part], sentence: TokenIds, rest: Float[Tensor, "entries"]
) -> tuple[int, Float[Tensor, "entries"]]:
    """Finds the word whose gradient is nearest to what is left, and that gradient."""
    promise = _measure_promise(target, parts, sentence, rest)
    promising = promise.topk(min(TRIED, target.classes)).indices.tolist()
    expected = _predict_next_words(target, sentence)
    likely = list(dict.fromkeys([*target.vocabulary.suffix[-1:], *expected, *promising]))
    made = [compute_gradient(target, parts, (*sentence, word), 0) for word in likely]
    nearest = int(torch.stack([(one - rest).norm() for one in made]).argmin())
    return likely[nearest], made[nearest]


def _predict_next_words(target: Target, sentence: TokenIds) -> list[int]:
    """Returns what the model holds likeliest to come next."""
    ids = torch.tensor([sentence], device=target.device)
    with torch.no_grad():
        batch = Batch(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), labels=ids)
        next_words = target.probabilities(batch)[0]
    return next_words.topk(min(EXPECTED, target.classes)).indices.tolist()


def _measure_promise(
    target: Target, parts: Sequence[Part], sentence: TokenIds, rest: Float[Tensor, "entries"]
) -> Float[Tensor, "words"]:
    """Measures the product of each last word's own gradient with what is left.

    The loss is linear in the label of each position. So one pass back through the gradient gives
    the products of all words, whose labels are taken as unknowns.
    """
    ids = torch.tensor([[*sentence, sentence[-1]]], device=target.device)
    mask, embeddings = torch.ones_like(ids, dtype=torch.bool), target.embed(ids)
    known = torch.nn.functional.one_hot(ids, target.classes).to(target.dtype)
    known[0, -1] = 0
    base = _differentiate(target, parts, Batch(mask, known, embeddings=embeddings))
    last = torch.zeros(target.classes, dtype=target.dtype, device=target.device, requires_grad=True)
    labels = torch.cat([known[:, :-1], last[None, None]], dim=1)
    made = _differentiate(target, parts, Batch(mask, labels, embeddings=embeddings), graph=True)
    # ∂/∂last of ⟨rest − base, ∇loss(last)⟩: the slope in each word's label is its own product.
    return torch.autograd.grad(((rest - base) * made).sum(), last)[0]


def compute_gradient(
    target: Target, parts: Sequence[Part], sentence: TokenIds, label: int
) -> Float[Tensor, "entries"]:
    """Computes the gradient of one sentence's loss in the parts, all entries in one row."""
    ids = torch.tensor([sentence], device=target.device)
    labels = ids if target.labels_are_tokens else torch.tensor([label], device=target.device)
    batch = Batch(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), labels=labels)
    return _differentiate(target, parts, batch)


def _differentiate(
    target: Target, parts: Sequence[Part], batch: Batch, graph: bool = False
) -> Float[Tensor, "entries"]:
    copies = {
        part.parameter: target.parameters[part.parameter].detach().requires_grad_()
        for part in parts
    }
    with torch.enable_grad():
        loss = target.losses(batch, copies).sum()
        found = torch.autograd.grad(
            loss, list(copies.values()), create_graph=graph, materialize_grads=True
        )
    whole = dict(zip(copies, found, strict=True))
    return torch.cat([part.of(whole[part.parameter]).flatten().double() for part in parts])
