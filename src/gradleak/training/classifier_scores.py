"""How well a classifier does: accuracy, F1 and Matthews correlation, all from one table of
counts."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.records.statistics import Interval, clopper_pearson

Counts = Float[Tensor, "true predicted"]
CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Scores:
    """A classifier on labelled sentences. `f1` is that of class 1 where there are two classes,
    otherwise the classes' mean."""

    mcc: float
    f1: float
    accuracy: float
    examples: int


def count_pairs(
    labels: Int[Tensor, "examples"], predictions: Int[Tensor, "examples"], classes: int
) -> Counts:
    """How often each class, 0 to classes − 1, was taken for each."""
    return (
        torch.bincount(labels * classes + predictions, minlength=classes**2)
        .view(classes, classes)
        .double()
    )


def score_counts(counts: Counts) -> Scores:
    """All scores, from the table alone."""
    return Scores(
        matthews(counts), f1(counts), float(counts.trace() / counts.sum()), int(counts.sum())
    )


def intervals(counts: Counts) -> dict[str, Interval]:
    """Every score with its interval over the examples: exact for accuracy, bootstrapped for the
    others.

    One made-up example a class, spread over what it may be taken for, is drawn along with the real
    ones: without it a model that errs nowhere, or always says the same, would get an interval of no
    width, which a finite sample never earns.
    """
    found, examples, classes = score_counts(counts), int(counts.sum()), len(counts)
    chances = (counts + 1 / classes).flatten() / (examples + classes)
    drawn = np.random.default_rng(0).multinomial(examples, chances.numpy(), size=RESAMPLES)
    tables = torch.from_numpy(drawn).double().view(RESAMPLES, classes, classes)
    made = {"mcc": _ends(found.mcc, [matthews(table) for table in tables], examples)}
    made["f1"] = _ends(found.f1, [f1(table) for table in tables], examples)
    return made | {"accuracy": clopper_pearson(round(float(counts.trace())), examples, CONFIDENCE)}


def _ends(value: float, redrawn: list[float], examples: int) -> Interval:
    low, high = np.quantile(redrawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, min(float(low), value), max(float(high), value), examples)


def matthews(counts: Counts) -> float:
    """Matthews correlation for any number of classes (Gorodkin 2004); 0 where one class alone is
    true or predicted."""
    true, predicted, total = counts.sum(1), counts.sum(0), counts.sum()
    covariance = counts.trace() * total - true @ predicted
    spread = ((total**2 - true @ true) * (total**2 - predicted @ predicted)).sqrt()
    return float(covariance / spread) if spread > 0 else 0.0


def f1(counts: Counts) -> float:
    """Of class 1 for two classes; otherwise the mean over the classes that are true or predicted
    anywhere."""
    appearances = counts.sum(0) + counts.sum(1)
    of_class = 2 * counts.diagonal() / appearances.clamp(min=1)
    return float(of_class[1] if len(counts) == 2 else of_class[appearances > 0].mean())
