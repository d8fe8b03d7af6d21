"""Where a search begins."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.gradient_matching.problems import Rows
from gradleak.core.attack import Bench


class Start(ABC):
    """Gives the first embeddings of every row, each from the stream of its own observation."""

    @abstractmethod
    def embeddings(self, rows: Rows, bench: Bench) -> Float[Tensor, "rows examples tokens hidden"]:
        """The first embeddings, padding included."""


@dataclass(frozen=True)
class OneGaussian(Start):
    """One draw from the standard normal distribution, unscaled (DLG, TAG as in LAMP's released code)."""

    def embeddings(self, rows: Rows, bench: Bench) -> Float[Tensor, "rows examples tokens hidden"]:
        drawn = torch.zeros(*rows.mask.shape, rows.target.hidden_size)
        for row, problem in enumerate(rows.problems):
            stream = bench.streams_of(problem.observation).child("start", problem.number)
            # Drawn at the problem's own size: the numbers do not depend on who shares the pass.
            for place, length in enumerate(problem.hypothesis.lengths):
                drawn[row, place, :length] = torch.randn(length, drawn.shape[-1], generator=stream.child(place).generator())
        return drawn.to(rows.target.device, rows.target.dtype)
