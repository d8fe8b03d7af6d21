"""The papers' datasets, read from the folder that the environment variable GRADLEAK_DATA names.

cola/{train,dev}.tsv and sst2/{train.tsv.gz,dev.tsv} as GLUE lays them out (each packed or not),
rotten_tomatoes/rt-polarity.{pos,neg} as Pang & Lee do. With a network, the `hub` dataset gives the
same examples.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset, Rows
from gradleak.core.errors import GradleakError
from gradleak.core.local_data import FOLDER_VARIABLE
from gradleak.core.registry import register
from gradleak.datasets.columns import Columns
from gradleak.datasets.lamp_selection import Selection, select
from gradleak.datasets.rows import Row, decoded, read_rows, text_lines


@register("dataset", "cola")
@dataclass(frozen=True)
class Cola(Dataset):
    """Sentences from linguistics books; label 1: grammatical."""

    cites: ClassVar[str] = "Warstadt, Singh & Bowman 2019, Neural Network Acceptability Judgments"
    is_public: ClassVar[bool] = True

    split: Literal["train", "dev"] = "train"
    selection: Selection = "lamp_test"
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        path = _packed_or_not(f"cola/{self.split}.tsv")
        # source, label, the author's mark, sentence: the only GLUE files without a header
        examples = Columns(str(path), text="4", label="2").examples(
            read_rows(path, "tsv", header=False)
        )
        return select(examples, self.selection, count, f"cola, {self.split} split", self.rows)

    def public(self) -> Dataset | None:
        """All of the split; an audit takes its own secrets out."""
        return replace(self, selection="all", rows=())


@register("dataset", "sst2")
@dataclass(frozen=True)
class Sst2(Dataset):
    """Phrases of film reviews; label 1: positive. Texts keep the trailing space they have on the
    hub."""

    cites: ClassVar[str] = (
        "Socher et al. 2013, Recursive Deep Models for Semantic Compositionality Over a Sentiment"
        " Treebank"
    )
    is_public: ClassVar[bool] = True

    split: Literal["train", "dev"] = "train"
    selection: Selection = "lamp_test"
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        path = _packed_or_not(f"sst2/{self.split}.tsv")
        examples = Columns(str(path), text="sentence", label="label").examples(
            read_rows(path, "tsv")
        )
        return select(examples, self.selection, count, f"sst2, {self.split} split", self.rows)

    def public(self) -> Dataset | None:
        """All of the split; an audit takes its own secrets out."""
        return replace(self, selection="all", rows=())


@register("dataset", "rotten_tomatoes")
@dataclass(frozen=True)
class RottenTomatoes(Dataset):
    """Sentences of film reviews; label 1: positive. The train split of the Hugging Face hub, in
    its order."""

    cites: ClassVar[str] = "Pang & Lee 2005, Seeing Stars"
    is_public: ClassVar[bool] = True

    selection: Selection = "lamp_test"
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        examples = [
            *_reviews("rotten_tomatoes/rt-polarity.pos", 1),
            *_reviews("rotten_tomatoes/rt-polarity.neg", 0),
        ]
        numbered = [replace(example, row=number) for number, example in enumerate(examples)]
        return select(numbered, self.selection, count, "rotten_tomatoes, train split", self.rows)

    def public(self) -> Dataset | None:
        """All of the split; an audit takes its own secrets out."""
        return replace(self, selection="all", rows=())


def _reviews(name: str, label: int) -> list[Example]:
    """The training part of one class."""
    path = _existing(name)
    # Pang & Lee's own files are latin-1, which is how the hub reads them; copies converted to UTF-8
    # are about
    lines = [line.strip() for line in text_lines(decoded(path, fallback="latin-1"))]
    # The hub's train split is the first 80 % of the positive sentences (4265 of 5331), then as many
    # negative ones; the next 10 % of each are its validation split, the last its test split.
    kept = lines[: int(len(lines) * 0.8 + 0.5)]
    rows = [Row(f"line {number}", {"text": line}) for number, line in enumerate(kept, start=1)]
    return [
        Example(example.text, label)
        for example in Columns(str(path), text="text", label=None).examples(rows)
    ]


def _packed_or_not(name: str) -> Path:
    packed = _folder() / f"{name}.gz"
    return packed if packed.is_file() else _existing(name)


def _existing(name: str) -> Path:
    path = _folder() / name
    if not path.is_file():
        raise GradleakError(
            f"There is no {name} in the folder {FOLDER_VARIABLE} names ({path.parents[1]}); put the"
            " file there."
        )
    return path


def _folder() -> Path:
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        fix = (
            f"set {FOLDER_VARIABLE} to the folder that holds cola/, sst2/ and rotten_tomatoes/, or"
            " use the dataset hub"
        )
        raise GradleakError(f"The environment variable {FOLDER_VARIABLE} is not set; {fix}.")
    return Path(folder).expanduser()
