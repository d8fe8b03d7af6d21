"""What a medium brings to be inverted: lessons that clients are made up from, and a network.

Texts have both in text_attacks.py and text_network.py, pictures in picture_attacks.py; all that is
done with them is the same (inversion.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.core.attack import Bench, Reconstruction
from gradleak.core.batch import Batch, Example
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target

HELD_OUT = 0.05  # of the public examples, to judge by, but no more than
MOST_HELD_OUT = 512


Public = TypeVar("Public", bound="PublicExamples")


class PublicExamples(ABC):
    """Public texts or pictures as tensors."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns how many there are."""

    @abstractmethod
    def __getitem__(self: Public, rows: slice | Tensor) -> Public:
        """Returns some of them."""

    @property
    @abstractmethod
    def shape(self) -> list[int]:
        """Of one example: its tokens, or channels, height and width."""

    @abstractmethod
    def batch(self, examples: int) -> Batch:
        """Returns all, in order, as clients of so many examples hold them; a rest is left out."""


class ClientSource(ABC):
    """Where the examples of the attacker's own clients come from."""

    @abstractmethod
    def draw(self, clients: int, examples: int, generator: torch.Generator) -> Batch:
        """Returns as many clients' batches."""


@dataclass(frozen=True, eq=False)
class Lessons:
    """What an attacker learns from: clients that a source makes up from public examples."""

    training: PublicExamples
    held_out: PublicExamples  # real examples to judge by, whatever the attack learns from
    source: ClientSource
    blind_guess: Tensor  # what is likely before anything is seen

    def hold_out(self, examples: int) -> Batch:
        """Returns the held-out examples as clients of so many hold them."""
        # Where too few were held out, those it learns from have to do.
        enough = len(self.held_out) >= examples
        return (self.held_out if enough else self.training[:examples]).batch(examples)


def split(public: Public, noun: str, fewest: int) -> tuple[Public, Public]:
    """Returns examples to learn from, and others to judge by."""
    count = len(public)
    if count < fewest:
        raise GradleakError(
            f"{count} public {noun} are too few to learn from: give more with --public."
        )
    held = max(1, min(MOST_HELD_OUT, int(count * HELD_OUT)))
    return public[: count - held], public[count - held :]


def draw_rows(public: Public, count: int, generator: torch.Generator) -> Public:
    """Returns so many of the examples, drawn with replacement."""
    device = generator.device
    return public[torch.randint(len(public), (count,), generator=generator, device=device)]


def number_labels(
    target: Target, examples: Sequence[Example], places: Sequence[int]
) -> Int[Tensor, "examples"]:
    """Returns the classes of the examples at these places.

    One without a label gets the class of its place in turn: the attacker may pair them as it likes.
    """
    labels = []
    try:
        for place in places:
            label = examples[place].label
            labels.append(place % target.classes if label is None else target.class_of(label))
    except GradleakError as error:
        raise GradleakError(
            f"The public data has labels outside the {target.classes} classes of this target:"
            f" {error}"
        ) from error
    return torch.tensor(labels).to(target.device)


@dataclass(frozen=True, eq=False)
class SeenClients:
    """What is seen of some clients, and what they hold."""

    features: Float[Tensor, "clients features"]
    clients: Batch


@dataclass(frozen=True)
class ReadingScore:
    """How well some held-out clients were read."""

    error: float  # by which learning rates are compared
    right: float  # tokens of texts, or labels of pictures
    total: int  # of them


class Network(nn.Module, ABC):
    """Turns features of updates into guesses.

    A client may hold several examples, and the network has a slot for each. An update says nothing
    of their order, so that each slot is held against the example that it is nearest to.
    """

    measured_with_noise: ClassVar[bool]  # whether `measure` wants features as noise leaves them

    @abstractmethod
    def start_from(self, blind_guess: Tensor) -> None:
        """Begins with what is likely before anything is seen."""

    @abstractmethod
    def measure(
        self,
        features: Float[Tensor, "clients features"],
        groups: Sequence[int] | None,
        noise: Float[Tensor, "features"] | None,
    ) -> None:
        """Finds how to scale features: each alone, or in groups of neighbours."""

    @abstractmethod
    def loss(self, seen: SeenClients, dtype: torch.dtype) -> Float[Tensor, ""]:
        """Returns what training minimises; products are made in `dtype`."""

    @abstractmethod
    def judge(self, seen: SeenClients, dtype: torch.dtype) -> ReadingScore:
        """Returns how well held-out clients are read."""

    @abstractmethod
    def read(
        self, features: Float[Tensor, "clients features"], bench: Bench
    ) -> list[Reconstruction]:
        """Returns a guess at every client's data."""


def assign_slots(costs: Float[Tensor, "clients slots slots"]) -> Int[Tensor, "clients slots"]:
    """Returns for each slot its example, each once, so that costs are least in sum (Hungarian)."""
    from scipy.optimize import linear_sum_assignment  # takes a while to import

    chosen = np.stack([linear_sum_assignment(cost)[1] for cost in costs.cpu().numpy()])
    return torch.from_numpy(chosen).to(costs.device)
