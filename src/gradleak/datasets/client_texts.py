"""Texts that the clients of a federated run held: who trained on what in which round."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset, Rows
from gradleak.core.errors import GradleakError
from gradleak.core.registry import register
from gradleak.datasets.file import File
from gradleak.datasets.rows import known_format

# A file of one client, or of one of its rounds
CLIENTS_FILE = re.compile(r"client-(?P<client>.+?)(?:-round-(?P<round>\d+))?")
ROW = ("text", "label", "client", "round")


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
    found = _read_folder(path) if path.is_dir() else _read_rows(path)
    if not found:
        raise GradleakError(
            f"{path} holds no texts. Name a jsonl file with text, label, client and round, or a"
            " folder of files client-NAME.csv."
        )
    return HeldTexts(path, tuple(found))


def _read_folder(folder: Path) -> list[HeldText]:
    found = []
    for path in sorted(folder.iterdir()):
        named = CLIENTS_FILE.fullmatch(path.stem)
        if named is None or known_format(path) is None:
            continue
        round = None if named["round"] is None else int(named["round"])
        examples = File(str(path)).load()
        found += [HeldText(example, named["client"], round) for example in examples]
    return found


def _read_rows(path: Path) -> list[HeldText]:
    if path.suffix != ".jsonl":
        return [HeldText(example, None, None) for example in File(str(path)).load()]
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            found.append(_read_row(line, f"{path}, line {number}"))
    return found


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
