"""Made-up messages with made-up secrets, and made-up pictures.

There is nothing to download and nobody to harm.
"""

from dataclasses import dataclass
from importlib.resources import files
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset, Rows
from gradleak.core.picture import Picture
from gradleak.core.registry import Medium, register
from gradleak.datasets.rows import TextColumns, parse_jsonl
from gradleak.datasets.selection import take

PUBLIC, PRIVATE = 2000, 1000  # pictures of each part
Part = Literal["private", "public"]


@register("dataset", "canaries")
@dataclass(frozen=True)
class Canaries(Dataset):
    """253 English messages of 3 to 30 words, written for gradleak; 145 carry a secret whose span is
    marked.

    Label 1: the writer asks the reader to do or answer something; 0: the message only tells. Both
    kinds carry secrets, so the label does not give a secret away. Phone numbers are 555-01xx and
    mail addresses example.*, which belong to nobody.
    """

    made_up: ClassVar[bool] = True
    is_public: ClassVar[bool] = True

    secrets_only: bool = False
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        content = files("gradleak.datasets").joinpath("canaries.jsonl").read_text(encoding="ascii")
        examples = TextColumns("canaries", text="text", label="label", marked=True).examples(
            list(parse_jsonl(content))
        )
        return take(
            [example for example in examples if example.secrets or not self.secrets_only],
            count,
            "canaries that carry a secret" if self.secrets_only else "canaries",
            self.rows,
        )


@register("dataset", "shapes")
@dataclass(frozen=True)
class Shapes(Dataset):
    """Coloured discs, squares, crosses and stripes on shaded grounds, drawn for gradleak; the label
    says which shape.

    A private part to attack and a public part, drawn from other seeds, to learn from.
    """

    medium: ClassVar[Medium] = "image"
    made_up: ClassVar[bool] = True
    is_public: ClassVar[bool] = True

    part: Part = "private"
    side: int = 32  # pixels
    rows: Rows = ()

    def __post_init__(self) -> None:
        if not 4 <= self.side <= 256:
            raise ValueError(f"side is between 4 and 256 pixels, not {self.side}.")

    def load(self, count: int | None = None) -> list[Example]:
        size = PRIVATE if self.part == "private" else PUBLIC
        return [
            self._example(number)
            for number in take(range(size), count, f"shapes, {self.part} part", self.rows)
        ]

    def public(self) -> Dataset:
        return Shapes("public", self.side)

    def _example(self, number: int) -> Example:
        random = np.random.default_rng((ord(self.part[1]), self.side, number))
        label = int(random.integers(4))
        pixels = (draw(label, self.side, random) * 255).round().astype(np.uint8)
        return Example(Picture((self.side, self.side, 3), pixels.tobytes()), label, row=number)


def draw(label: int, side: int, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """One picture [height, width, 3] between 0 and 1: a shaded ground, a shape with soft edges,
    a little grain."""
    down, across = np.meshgrid(*[np.linspace(-1, 1, side)] * 2, indexing="ij")
    slope = random.uniform(-0.3, 0.3, (2, 3))
    ground = random.uniform(0.2, 0.8, 3) + down[..., None] * slope[0] + across[..., None] * slope[1]
    centre, size, angle = (
        random.uniform(-0.3, 0.3, 2),
        random.uniform(0.35, 0.65),
        random.uniform(0, np.pi),
    )
    y, x = down - centre[0], across - centre[1]
    along, beside = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    edges = (
        size - np.hypot(x, y),  # disc
        size - np.maximum(abs(along), abs(beside)),  # square
        # Cross
        np.minimum(
            size - np.maximum(abs(along), abs(beside)),
            size / 3 - np.minimum(abs(along), abs(beside)),
        ),
        size * np.sin(along * 6 / size) / 6,  # stripes
    )
    inside = 1 / (1 + np.exp(-edges[label] * side / 1.5))[..., None]
    coloured = ground * (1 - inside) + random.uniform(0, 1, 3) * inside
    grained: npt.NDArray[np.float64] = np.clip(
        coloured + random.normal(0, 0.01, coloured.shape), 0, 1
    )
    return grained
