"""What is left of the gradient when sentences that were found are taken out: the gradient of a smaller batch.

The gradient is a sum of the sentences' own, each with a share. A matrix of it is Σ_t δ_t x_tᵀ; where the inputs x_t are
independent, a known x_t picks out its δ_t, and this held against the sentence's own δ_t gives the share.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.span.checks import Check, Sentence
from gradleak.attacks.span.row_space import RowSpace, attention_parts, parts_seen
from gradleak.attacks.span.sentence_gradient import gradient
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.matching.inputs import matrix_of

CLEAREST = 8  # tokens of a sentence with the strongest gradient, which say what its share is
AGREE = 0.05  # how far the tokens' shares may be apart: rounding leaves 1e-3, a wrong label is far off
MOST_LABELS = 8


class Remainder:
    """Takes sentences out of the first layer's gradient of one observation."""

    def __init__(self, observation: Observation, space: RowSpace, check: Check) -> None:
        self.observation, self.space, self.check = observation, space, check
        self.first = attention_parts(observation, 1)
        self.mixed = parts_seen(observation, 1, ("ffn_in",))  # where tokens have mixed and are independent
        self.seen = self._matrix(self.mixed, {part.name: observation.update.tensors[part.name][0] for part in self.mixed})
        whole = self._matrix(self.first, {part.name: observation.update.tensors[part.name][0] for part in self.first})
        self.left = whole @ self._span(space)
        self.taken: list[Sentence] = []

    def without(self, sentences: Sequence[Sentence]) -> Float[Tensor, "outputs rank"] | None:
        """The first layer's gradient along the directions of its span without these; none where a share does not show."""
        for sentence in sentences:
            if sentence not in self.taken:
                made = self._part_of(sentence)
                if made is None:
                    return None
                self.left = self.left - made
                self.taken.append(sentence)
        return self.left

    def _part_of(self, sentence: Sentence) -> Float[Tensor, "outputs rank"] | None:
        target = self.observation.target
        for label in range(min(target.classes, MOST_LABELS)):
            flat = gradient(target, [*self.mixed, *self.first], sentence, label)
            pieces = torch.split(flat, [part.size for part in (*self.mixed, *self.first)])
            own = {part.name: piece.view(part.shape) for part, piece in zip((*self.mixed, *self.first), pieces, strict=True)}
            share = self._share(sentence, self._matrix(self.mixed, own))
            if share is not None:
                return share * self._matrix(self.first, own) @ self._span(self.space)
        return None

    def _share(self, sentence: Sentence, own: Float[Tensor, "outputs inputs"]) -> float | None:
        """How much of a sentence's gradient with some label is in what was seen; none where it was not this label."""
        space, span = self.check.space, self._span(self.check.space)
        inputs = self.check.inputs_of([sentence]).double() @ span
        duals = (inputs / space.strengths.square()) @ (self.seen @ span).mT  # their products with what was seen are the inputs
        clearest = duals.norm(dim=1).argsort()[:CLEAREST]
        images, inputs = duals[clearest] @ (own @ span), inputs[clearest]
        inverse = (images * inputs).sum() / inputs.square().sum()
        apart = float((images - inverse * inputs).norm() / images.norm())
        return float(1 / inverse) if apart < AGREE else None

    def _matrix(self, parts: Sequence[Part], tensors: dict[str, Tensor]) -> Float[Tensor, "outputs inputs"]:
        target = self.observation.target
        return torch.cat([matrix_of(target, part, tensors[part.name]) for part in parts]).double()

    @staticmethod
    def _span(space: RowSpace) -> Float[Tensor, "inputs rank"]:
        return space.directions[: space.rank].mT


def remainder_of(observation: Observation, space: RowSpace, check: Check) -> Remainder | None:
    """None where the update is not one gradient, or the check is not where tokens have just mixed."""
    target = observation.target
    alone = observation.protocol.one_gradient and not target.labels_are_tokens and not target.attend_padding
    usable = alone and all(part.cut is None for part in attention_parts(observation, 1))
    return Remainder(observation, space, check) if usable and parts_seen(observation, 1, ("ffn_in",)) else None
