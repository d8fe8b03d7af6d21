"""Records without their long parts, for whoever reads thousands: guesses, traces and secrets
stay on disk."""

import contextlib
import fnmatch
import gc
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradleak.records.errors import RecordError
from gradleak.records.plain import from_plain
from gradleak.records.schema import AttackRecord, Details, Record

# Beside records: what they say of single examples, by id and by a hash of the content
DETAILS = "details"
NUMBER = re.compile("[0-9a-f]{16}")
# A record is called by the hash of its spec; other files (map.json) may lie beside
RECORD = "[0-9a-f]" * 16 + ".json"
NO_RECORDS = (DETAILS, "parts", "claims", "keys", "fits")  # folders of a run that never hold one
TRAININGS = "training"  # a folder whose files are called as records are
Column = list[float | None]  # one value an example


@dataclass(frozen=True)
class Columns:
    """What one attack scored, example by example."""

    batches: tuple[int, ...]  # of each example
    values: Mapping[str, Column]  # by metric
    blind: Mapping[str, Column]
    certified: tuple[bool, ...] = ()  # of each example; nothing where it is not known
    beyond_luck: tuple[bool, ...] = ()
    draws: Mapping[str, Column] = field(default_factory=dict)  # as blind, of the attack's own draw


@dataclass(frozen=True)
class Summary:
    """A record whose attacks have no examples and no batches, and their scores as columns."""

    path: Path
    record: Record
    columns: Mapping[str, Columns]  # by the attack's key
    details: str = ""  # the hash of its details; none of what was published

    @classmethod
    def of(cls, path: Path, record: Record, details: str = "") -> "Summary":
        """Returns the summary of a whole record."""
        columns = {key: columns_of(attack) for key, attack in record.attacks.items()}
        return cls(path, record.with_details(Details()), columns, details)

    @property
    def id(self) -> str:
        """The record's, by the name of its file: quicker than to hash its spec again."""
        return self.path.stem

    @property
    def details_path(self) -> Path:
        """Where its details lie, if they were not lost."""
        return self.path.parent / DETAILS / f"{self.record.id}-{self.details}.json"

    @property
    def has_details(self) -> bool:
        return bool(self.details) and self.details_path.is_file()

    def whole(self) -> Record:
        """Reads the details too."""
        where = self.details_path
        try:
            content = where.read_bytes()
        except OSError as error:
            raise RecordError(
                f"{self.path} holds scores only. Its guesses and searches are in {where}, which"
                f" cannot be read: {error.strerror}. Put it back, or run the audit again."
            ) from error
        if hash_of(content) != self.details:
            raise RecordError(
                f"{where} is not what {self.path} was written with: it was changed or broken. Put"
                " the old one back, or run the audit again."
            )
        return self.record.with_details(from_plain(Details, json.loads(content), "details"))


def hash_of(content: bytes) -> str:
    """Returns what a record calls its details by."""
    return hashlib.sha256(content).hexdigest()[:16]


def walk(run: Path) -> Iterator[Path]:
    """A folder and all below it that may hold records, each once, behind links too."""
    seen = set[str]()
    for name, inner, _ in os.walk(run, followlinks=True):
        inner[:] = sorted(
            folder for folder in inner if folder not in NO_RECORDS and not folder.startswith(".")
        )
        real = os.path.realpath(name)
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        yield Path(name)


def record_files(run: Path) -> Iterator[Path]:
    """Records in a folder and in all below it, by their name or, of files that were renamed, by
    what they begin with."""
    for folder in walk(run):
        for path in sorted(folder.glob("*.json")):
            if is_record(path):
                yield path


def is_record(path: Path) -> bool:
    """Whether a file is a record, by its name or, where it was renamed, by what it begins with."""
    if path.suffix != ".json" or path.name.startswith(".") or not path.is_file():
        return False
    return (is_record_name(path) and path.parent.name != TRAININGS) or _begins_as_record(path)


def is_record_name(path: Path) -> bool:
    """Whether a file is called as records are."""
    return fnmatch.fnmatchcase(path.name, RECORD)


def _begins_as_record(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return b'"gradleak.record/' in file.read(100)
    return False


def record_paths(run: Path) -> list[Path]:
    """The records of a run: one file, or those of a folder and of all folders below it."""
    if run.is_file():
        return [run]
    if not run.is_dir():
        raise RecordError(
            f"{run} is not there. Name a record, or the folder that an audit or a study wrote its"
            " records into."
        )
    paths = list(record_files(run))
    if not paths:
        raise RecordError(
            f"{run} holds no records. Name the folder that an audit or a study wrote its records"
            " into."
        )
    return paths


def read_summaries(run: Path) -> list[Summary]:
    """Reads the records of a run, without their details."""
    with no_collector():
        return [read_summary(path) for path in record_paths(run)]


def read_summary(path: Path) -> Summary:
    """Reads one record without its details; a file that is none is refused in a sentence."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(
            f"Cannot read {path}: {error.strerror}. Name a record file that an audit wrote."
        ) from error
    except ValueError as error:  # broken JSON, or bytes that are no text
        raise RecordError(
            f"{path} is not a whole JSON file ({error}). Delete it and run its audit again."
        ) from error
    try:
        record = Record.from_json({"secrets": [], **plain} if isinstance(plain, dict) else plain)
        beside: _Beside = from_plain(_Beside, plain, "record")
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
    if beside.columns.keys() != record.attacks.keys() or not NUMBER.fullmatch(beside.details):
        raise RecordError(
            f"{path}: record.columns or record.details does not belong to its attacks; the record"
            " was changed or broken, run the audit again."
        )
    return Summary(path, record, beside.columns, beside.details)


@dataclass(frozen=True)
class _Beside:
    """What a record's file holds beside the record."""

    columns: dict[str, Columns]
    details: str


def columns_of(attack: AttackRecord) -> Columns:
    """The scores of a whole attack as columns."""
    metrics = list(attack.examples[0].values) if attack.examples else []
    return Columns(
        tuple(example.batch for example in attack.examples),
        {name: [example.values.get(name) for example in attack.examples] for name in metrics},
        {name: [example.blind_values.get(name) for example in attack.examples] for name in metrics},
        tuple(example.certified for example in attack.examples),
        tuple(example.beyond_luck for example in attack.examples),
        _columns_by_name([example.draw_values for example in attack.examples], metrics),
    )


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Nothing that is read holds a cycle, and looking for some takes a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _columns_by_name(
    values: Sequence[Mapping[str, float | None]],
    metrics: Sequence[str],
) -> dict[str, Column]:
    return {name: [one.get(name) for one in values] for name in metrics}
