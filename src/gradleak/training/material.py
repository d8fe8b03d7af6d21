"""What a target learns from and is judged on, read from datasets: a split of its own, or a part
held out at random."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError
from gradleak.core.specs import to_string
from gradleak.core.streams import Streams
from gradleak.core.target import TargetSpec
from gradleak.datasets import Cola, Sst2
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
