"""What a target learns from and is judged on, and how well it then does.

Examples are read from data sets: a split of their own, or a part held out at random. Accuracy, F1
and Matthews correlation come from one table of counts.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError
from gradleak.core.specs import to_string
from gradleak.core.streams import Streams
from gradleak.core.target import TargetSpec
from gradleak.datasets import Cola, Sst2
from gradleak.records.statistics import Interval, clopper_pearson
from gradleak.targets.text_classifier import TextClassifier

CHECKED_AT_ONCE = 64  # sentences
FRACTIONS = {10: "tenth", 3: "third"}


@dataclass(frozen=True)
class Lesson:
    """A sentence in tokens, with its class."""

    ids: tuple[int, ...]
    label: int
    dropped: int = field(default=0, repr=False, compare=False)  # tokens that were cut off


@dataclass(frozen=True)
class Material:
    """What is learnt, what it is judged on, and what both are called: `described` is kept with
    the model."""

    training: tuple[Lesson, ...]
    evaluation: tuple[Lesson, ...]
    described: Mapping[str, str]

    def content(self) -> str:
        """A hash of all tokens and classes, so that a checkpoint of other data is not gone on
        from."""
        return hashlib.sha256(repr((self.training, self.evaluation)).encode()).hexdigest()


def read_material(
    spec: TargetSpec,
    opened: TextClassifier,
    training: Sequence[Example],
    data: Dataset,
    judged: Dataset | None,
    streams: Streams,
    one_in: int = 10,
) -> Material:
    """Training and evaluation examples, tokenised, under the names they were asked for by; one
    in so many is held out."""
    judged = judged or dev_split(data)
    if judged is None:
        training, evaluation = hold_out(training, streams, one_in)
    else:
        evaluation = judged.load()
    described = {
        "target": to_string(spec),
        "weights": spec.fingerprint(),
        "data": to_string(data),
        "eval_data": f"held-out {FRACTIONS[one_in]}" if judged is None else to_string(judged),
    }
    return Material(
        lessons(opened, training, "training"), lessons(opened, evaluation, "evaluation"), described
    )


def hold_out(
    examples: Sequence[Example], streams: Streams, one_in: int = 10
) -> tuple[list[Example], list[Example]]:
    """All but one in so many to train on, and the others to judge by, drawn at random; both keep
    their order."""
    if len(examples) < 10:
        raise GradleakError(
            f"The data holds {len(examples)} examples, too few to hold a {FRACTIONS[one_in]} of"
            " them out: use 10 or more, or name others with --eval-data."
        )
    order = torch.randperm(len(examples), generator=streams.child("held out").generator()).tolist()
    held = set(order[: len(examples) // one_in])
    kept = [example for place, example in enumerate(examples) if place not in held]
    return kept, [examples[place] for place in sorted(held)]


def dev_split(data: Dataset) -> Dataset | None:
    """The whole dev split of a dataset that comes with one and is not it."""
    if isinstance(data, (Cola, Sst2)) and data.split == "train":
        return replace(data, split="dev", selection="all", rows=())
    return None


def lessons(target: TextClassifier, examples: Sequence[Example], called: str) -> tuple[Lesson, ...]:
    """Tokenises and truncates; what the target refuses in an audit (empty, no or unknown label)
    it refuses here."""
    if target.labels_are_open:
        raise GradleakError(
            f"{target.name} learns {target.problem.in_words}, and only models that tell one class"
            " of each text are trained here."
        )
    made: list[Lesson] = []
    # Sentences of different lengths may not share a private batch
    size = CHECKED_AT_ONCE if target.padding_is_free else 1
    for start in range(0, len(examples), size):
        group = examples[start : start + size]
        try:
            private = target.private_batch(group)
        except GradleakError as error:
            raise GradleakError(
                f"Batch of examples {start + 1} to {start + len(group)} of the {called} data:"
                f" {error}"
            ) from error
        assert private.batch.ids is not None
        rows = zip(
            private.batch.ids.tolist(), private.lengths, private.batch.labels.tolist(), strict=True
        )
        cut = private.dropped or (0,) * len(group)
        made += [
            Lesson(tuple(row[:length]), label, lost)
            for (row, length, label), lost in zip(rows, cut, strict=True)
        ]
    if not made:
        raise GradleakError(f"There are no examples in the {called} data.")
    return tuple(made)


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
    return {
        "mcc": _ends(found.mcc, [matthews(table) for table in tables], examples),
        "f1": _ends(found.f1, [f1(table) for table in tables], examples),
        "accuracy": clopper_pearson(round(float(counts.trace())), examples, CONFIDENCE),
    }


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
