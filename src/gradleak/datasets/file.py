"""Private examples by name: from a file of one's own, from the Hugging Face hub, or held beside an
update."""

import importlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset, Rows
from gradleak.core.errors import GradleakError
from gradleak.core.not_ours import stay_offline_unless_reachable
from gradleak.core.registry import register
from gradleak.datasets.rows import (
    Content,
    Delimiter,
    Format,
    Row,
    TextColumns,
    known_format,
    read_file,
)
from gradleak.datasets.selection import Selection, select


@register("dataset", "file")
@dataclass(frozen=True)
class File(Dataset):
    """A tsv, csv, jsonl, parquet or plain text file, one example a row.

    `text` and `label` are column names, or column numbers from 1 where there is no header;
    `label=null` for no labels. A label is a number from 0, a name that the target knows (label2id
    in its config.json), or one of `labels`, the names of classes 0, 1, …. A jsonl row may mark its
    secrets as character offsets: `{"text": …, "label": …, "secrets": [[start, end], …]}`.
    """

    added_later: ClassVar[frozenset[str]] = Dataset.added_later | {
        "labels",
        "delimiter",
        "encoding",
        "skip_bad",
    }

    path: str
    text: str = "text"
    label: str | None = "label"
    format: Format = "auto"
    header: bool = True
    selection: Selection = "all"
    rows: Rows = ()
    labels: tuple[str, ...] = ()
    delimiter: Delimiter = "auto"  # of a csv
    encoding: str = "auto"  # UTF-8, else cp1252; or any that Python knows
    skip_bad: bool = False  # leave out rows that cannot be used

    def load(self, count: int | None = None) -> list[Example]:
        return select(
            self._columns().examples(self._content().rows),
            self.selection,
            count,
            self.path,
            self.rows,
        )

    def without_bad_rows(self) -> Dataset:
        return replace(self, skip_bad=True)

    def remarks(self) -> tuple[str, ...]:
        content = self._content()
        said = []
        if self.encoding == "auto" and content.encoding not in ("", "utf-8"):
            said.append(
                f"{self.path} is not UTF-8 and was read as {content.encoding} (to change that:"
                " encoding=…)."
            )
        if self.delimiter == "auto" and content.delimiter not in ("", "comma"):
            said.append(
                f"{self.path} has its columns cut at each {content.delimiter} (to change that:"
                " delimiter=…)."
            )
        return (*said, *self._columns().describe_left_out(content.rows))

    def _content(self) -> Content:
        return read_file(
            Path(self.path).expanduser(), self.format, self.header, self.delimiter, self.encoding
        )

    def _columns(self) -> TextColumns:
        found = known_format(Path(self.path)) if self.format == "auto" else self.format
        label = None if found == "text" else self.label  # plain text has nowhere to keep one
        return TextColumns(
            self.path, self.text, label, found == "jsonl", self.labels, self.skip_bad
        )


@register("dataset", "own_texts")
@dataclass(frozen=True)
class OwnTexts(Dataset):
    """The truth about updates that were attacked from Python or as captures; no file holds it.

    Records name it so that two updates are told apart.
    """

    updates: str  # their hash
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        raise GradleakError(
            "These texts were given to gradleak.score() and are kept nowhere: run that again."
        )


@register("dataset", "hub")
@dataclass(frozen=True)
class Hub(Dataset):
    """A dataset of the hub by its id, such as
    `hub:path=glue,config=cola,text=sentence,selection=lamp_test`.

    `config` is what `load_dataset` calls `name`; here a component's name is the one it is
    registered under.
    """

    added_later: ClassVar[frozenset[str]] = Dataset.added_later | {"labels", "skip_bad"}

    path: str
    config: str | None = None
    split: str = "train"
    text: str = "text"
    label: str | None = "label"
    selection: Selection = "all"
    rows: Rows = ()
    labels: tuple[str, ...] = ()  # names of the classes 0, 1, …
    skip_bad: bool = False  # leave out rows that cannot be used

    def load(self, count: int | None = None) -> list[Example]:
        return select(
            self._columns().examples(self._rows()), self.selection, count, self._source, self.rows
        )

    def without_bad_rows(self) -> Dataset:
        return replace(self, skip_bad=True)

    def remarks(self) -> tuple[str, ...]:
        return self._columns().describe_left_out(self._rows())

    @property
    def _source(self) -> str:
        return (
            f"hub dataset {self.path}"
            + (f"/{self.config}" if self.config else "")
            + f", {self.split} split"
        )

    def _columns(self) -> TextColumns:
        return TextColumns(
            self._source, self.text, self.label, labels=self.labels, skip_bad=self.skip_bad
        )

    def _rows(self) -> list[Row]:
        stay_offline_unless_reachable()
        library = _library()
        try:
            records = library.load_dataset(self.path, self.config, split=self.split)
        except Exception as error:  # the library and the network below it raise dozens of kinds
            raise GradleakError(
                f"Cannot load {self._source}: {error}. Check the id, config and split, and the"
                " network."
            ) from error
        return [
            Row(f"row {number}", dict(values)) for number, values in enumerate(records, start=1)
        ]


def _library() -> Any:
    """The `datasets` library, told not to report who reads what."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    # Imported before: it has read the environment already
    if constants := sys.modules.get("huggingface_hub.constants"):
        vars(constants)["HF_HUB_DISABLE_TELEMETRY"] = True
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise GradleakError(
            "Datasets of the hub need the datasets library: pip install gradleak[hub]."
        ) from error
