"""Data shaped like a client's, and the secret itself."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One private text with its label and the spans of it (character offsets) that would hurt most."""

    text: str
    label: int | None = None
    secrets: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Batch:
    """Anything shaped like client data; attackers make their own.

    Leading axes are free: [examples] for one client, [clients, examples] for many at once.
    Exactly one of `ids` and `embeddings` is given. `labels` are class numbers or probabilities over the classes; of a language
    model they are the tokens themselves, one a position, as ids or as probabilities over the vocabulary.
    """

    mask: Bool[Tensor, "*lead tokens"]  # positions the model attends to
    labels: (
        Int[Tensor, "*lead"] | Float[Tensor, "*lead classes"] | Int[Tensor, "*lead tokens"] | Float[Tensor, "*lead tokens words"]
    )
    ids: Int[Tensor, "*lead tokens"] | None = None
    embeddings: Float[Tensor, "*lead tokens hidden"] | None = None

    def __post_init__(self) -> None:
        if (self.ids is None) == (self.embeddings is None):
            raise ValueError("a batch holds either ids or embeddings")

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes before the tokens."""
        return tuple(self.mask.shape[:-1])

    def __getitem__(self, index: "int | slice") -> "Batch":
        return Batch(
            mask=self.mask[index],
            labels=self.labels[index],
            ids=None if self.ids is None else self.ids[index],
            embeddings=None if self.embeddings is None else self.embeddings[index],
        )


@dataclass(frozen=True, eq=False)
class PrivateBatch:
    """The secret: one client's batch with its texts and marked spans. Only protocols, metrics and the audit hold one."""

    batch: Batch
    examples: tuple[Example, ...]
    lengths: tuple[int, ...]  # tokens of each example, special ones included
