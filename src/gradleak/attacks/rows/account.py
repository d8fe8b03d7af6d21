"""Step 4: a sentence that was found is taken out of the update, which leaves a smaller batch.

Its gradient is computed as the client did, for each label. How much of it is in what was seen
follows from one matrix G = Σ_s δ_s x_sᵀ whose inputs are independent: taking λ δ xᵀ out of G lowers
its rank by one for a single λ = 1 / (xᵀ G⁺ δ) (Wedderburn 1934), which is the number of times that
the sentence is there, over the size of the batch. A wrong label has another δ, and no such λ.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.rows.embedding_rows import EmbeddingRows
from gradleak.attacks.rows.sentence_spaces import SentenceSpaces
from gradleak.core.attack import TokenIds
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.matching.inputs import matrix_of
from gradleak.matching.linear_algebra import decompose

MOST_LABELS = 8  # tried: with more classes sentences are found, but not taken out
# How far the number of times that a sentence is there may be from a whole number
NEARLY_WHOLE = 0.2


@dataclass(frozen=True, eq=False)
class Contribution:
    """What one sentence with one label adds to the sum of a batch's gradients."""

    label: int
    matrices: Mapping[str, Float[Tensor, "_ _"]]
    vectors: Float[Tensor, "tokens width"]  # to the rows of its words and positions


class Account:
    """What is left of an update when the sentences found so far are taken out of it."""

    def __init__(
        self, observation: Observation, spaces: SentenceSpaces, rows: EmbeddingRows | None
    ) -> None:
        self.parts, self.rows, self.spaces = spaces.parts, rows, spaces
        self.target: Target = observation.target.in_double
        tensors, scale = observation.update.tensors, observation.gradient_scale
        self.left = {
            part.name: matrix_of(observation.target, part, tensors[part.name])[0].double() / scale
            for part in self.parts
        }
        self.batch_size = observation.knows.batch_size or spaces.rank
        self.directions = spaces.rank

    def take_out(self, sentence: TokenIds) -> tuple[int, int] | None:
        """Takes a sentence out; returns its label and how many times it was there.

        None, and nothing is changed, where no label explains its part.
        """
        best: tuple[float, int, Contribution] | None = None
        name = self.parts[0].name
        found = decompose(self.left[name])
        left, values = found.left[:, : self.directions], found.values[: self.directions]
        right = found.right[: self.directions]
        for label in range(min(self.target.classes, MOST_LABELS)):
            made = self._compute(sentence, label)
            matrix = made.matrices[name]
            # xᵀ G⁺ δ is the trace of G⁺ (δ xᵀ).
            inverse = float(((right @ matrix.mT @ left) / values).diagonal().sum())
            times = self.batch_size / inverse if inverse else 0.0
            whole = round(times)
            outside = matrix - left @ (left.mT @ matrix)
            miss = float(outside.norm() / matrix.norm()) + abs(times - whole)
            if whole >= 1 and miss < NEARLY_WHOLE and (best is None or miss < best[0]):
                best = miss, whole, made
        if best is None:
            return None
        _, times, made = best
        share = times / self.batch_size
        self.left = {
            part: matrix - share * made.matrices[part] for part, matrix in self.left.items()
        }
        if self.rows is not None:
            self.rows = self.rows.subtract(sentence, share * made.vectors.cpu())
        self.directions -= 1
        if self.directions:
            self.spaces = self.spaces.without(self.left)
        return made.label, times

    def _compute(self, sentence: TokenIds, label: int) -> Contribution:
        """Computes a sentence's own gradient, in double precision."""
        target = self.target
        copies = {
            part.parameter: target.parameters[part.parameter].detach().requires_grad_()
            for part in self.parts
        }
        ids = torch.tensor([sentence], device=target.device)
        with torch.enable_grad():
            embeddings = target.embed(ids).detach().requires_grad_()
            labels = torch.tensor([label], device=target.device)
            mask = torch.ones_like(ids, dtype=torch.bool)
            loss = target.losses(Batch(mask, labels, embeddings=embeddings), copies).sum()
            made = torch.autograd.grad(loss, [embeddings, *copies.values()])
        whole = dict(zip(copies, made[1:], strict=True))
        return Contribution(
            label,
            {
                part.name: matrix_of(target, part, whole[part.parameter][None])[0]
                for part in self.parts
            },
            made[0][0],
        )
