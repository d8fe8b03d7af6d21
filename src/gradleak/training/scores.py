"""How well a classifier does: accuracy, F1 and Matthews correlation, all from one table of counts."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """A classifier on labelled sentences. `f1` is that of class 1 where there are two classes, otherwise the classes' mean."""

    mcc: float
    f1: float
    accuracy: float
    examples: int


def score(labels: Int[Tensor, "examples"], predictions: Int[Tensor, "examples"], classes: int) -> Scores:
    """Compares predicted with true class numbers, 0 to classes − 1."""
    counts = torch.bincount(labels * classes + predictions, minlength=classes**2).view(classes, classes).double()
    return Scores(matthews(counts), f1(counts), float(counts.trace() / counts.sum()), len(labels))


def matthews(counts: Float[Tensor, "true predicted"]) -> float:
    """Matthews correlation for any number of classes (Gorodkin 2004); 0 where one class alone is true or predicted."""
    true, predicted, total = counts.sum(1), counts.sum(0), counts.sum()
    covariance = counts.trace() * total - true @ predicted
    spread = ((total**2 - true @ true) * (total**2 - predicted @ predicted)).sqrt()
    return float(covariance / spread) if spread > 0 else 0.0


def f1(counts: Float[Tensor, "true predicted"]) -> float:
    """Of class 1 for two classes; otherwise the mean over the classes that are true or predicted anywhere."""
    appearances = counts.sum(0) + counts.sum(1)
    of_class = 2 * counts.diagonal() / appearances.clamp(min=1)
    return float(of_class[1] if len(counts) == 2 else of_class[appearances > 0].mean())
