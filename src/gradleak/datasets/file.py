"""Private examples by name: from a file of one's own, from the Hugging Face hub, or held beside an
update or by the clients of a federated run."""

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
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

# A file of one client, or of one of its rounds
CLIENTS_FILE = re.compile(r"client-(?P<client>.+?)(?:-round-(?P<round>\d+))?")
ROW = ("text", "label", "client", "round")


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


@register("dataset", "client_texts")
@dataclass(frozen=True)
class ClientTexts(Dataset):
    """The truth about the updates of one round of a federated run; no file of ours holds it.

    Records name the round and its clients, in the order of their batches.
    """

    round: int = 0
    clients: tuple[str, ...] = ()
    updates: str = ""  # their hash
    framework: str = ""
    beside: tuple[str, ...] = ()  # what left the clients beside the arrays, by name
    budgets: tuple[str, ...] = ()  # what the framework says of its own privacy
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        raise GradleakError(
            "These texts were given to gradleak federated audit and are kept nowhere: run that"
            " again."
        )

    def remarks(self) -> tuple[str, ...]:
        """Says what an attack on the arrays alone does not measure."""
        beside = (
            f"Beside the arrays left: {', '.join(self.beside)}. These leak too, and are not scored"
            " here."
        )
        stated = tuple(f"{self.framework} states of itself: {one}." for one in self.budgets)
        return (*((beside,) if self.beside else ()), *stated)


@dataclass(frozen=True)
class HeldText:
    """A text of a client; none for the client or the round is every one."""

    example: Example
    client: str | None
    round: int | None


@dataclass(frozen=True)
class HeldTexts:
    """Texts of clients and rounds."""

    path: Path
    texts: tuple[HeldText, ...]

    def find(self, names: Sequence[str], round: int) -> list[Example]:
        """Returns what a client trained on in a round; it may have several names."""
        return [
            held.example
            for held in self.texts
            if held.client in (None, *names) and held.round in (None, round)
        ]


def read_client_texts(path: Path) -> HeldTexts:
    """Reads a jsonl file whose rows may name a client and a round beside text and label, or a
    folder of files `client-NAME.csv` and `client-NAME-round-3.csv`."""
    if not path.exists():
        raise GradleakError(f"There is no {path}. --truth names a jsonl file or a folder.")
    found = tuple(_read_folder(path) if path.is_dir() else _read_rows(path))
    if not found:
        raise GradleakError(
            f"{path} holds no texts. Name a jsonl file with text, label, client and round, or a"
            " folder of files client-NAME.csv."
        )
    return HeldTexts(path, found)


def _read_folder(folder: Path) -> Iterator[HeldText]:
    for path in sorted(folder.iterdir()):
        named = CLIENTS_FILE.fullmatch(path.stem)
        if named is not None and known_format(path) is not None:
            round = None if named["round"] is None else int(named["round"])
            for example in File(str(path)).load():
                yield HeldText(example, named["client"], round)


def _read_rows(path: Path) -> list[HeldText]:
    if path.suffix != ".jsonl":
        return [HeldText(example, None, None) for example in File(str(path)).load()]
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return [_read_row(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def _read_row(line: str, where: str) -> HeldText:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise GradleakError(f"{where} is no JSON: write one object a line.") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str) or not row["text"].strip():
        raise GradleakError(f'{where} has no text: write {{"client": "1", "text": …, "label": 0}}.')
    if strange := [key for key in row if key not in ROW]:
        raise GradleakError(f"{where} has {strange[0]!r}, and a row has {', '.join(ROW)}.")
    label, client, round = row.get("label"), row.get("client"), row.get("round")
    if not isinstance(label, (int, str, type(None))) or isinstance(label, bool):
        raise GradleakError(f"{where} has a label that is neither a number nor a name.")
    if not isinstance(client, (int, str, type(None))) or not isinstance(round, (int, type(None))):
        raise GradleakError(f"{where}: client is a name or a number, and round a number.")
    example = Example(row["text"], label, where=where)
    return HeldText(example, None if client is None else str(client), round)


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
