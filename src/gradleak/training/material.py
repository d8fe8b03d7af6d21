"""What a target learns from and is judged on, read from datasets: a split of its own, or a part
held out at random."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError
from gradleak.core.specs import to_string
from gradleak.core.streams import Streams
from gradleak.core.target import TargetSpec
from gradleak.datasets import Cola, Sst2
from gradleak.targets.text_classifier import TextClassifier
from gradleak.training.finetune import Material, lessons

FRACTIONS = {10: "tenth", 3: "third"}


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
