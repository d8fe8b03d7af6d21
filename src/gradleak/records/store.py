"""Records on disk: a JSON file each, and one of details beside it, written whole or not at all.

Whoever reads thousands leaves the details where they are: guesses, traces and secrets. The key of
the hashes is kept apart.
"""

import contextlib
import fnmatch
import gc
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradleak.records.files import (
    RecordError,
    explain_refusal,
    make_private_folder,
    write_whole,
    write_whole_bytes,
)
from gradleak.records.plain import from_plain, to_plain
from gradleak.records.schema import AttackRecord, Details, Record

# Beside records: what they say of single examples, by id and by a hash of the content
DETAILS = "details"
NUMBER = re.compile("[0-9a-f]{16}")
# A record is called by the hash of its spec; other files (map.json) may lie beside
RECORD = "[0-9a-f]" * 16 + ".json"
NO_RECORDS = (DETAILS, "parts", "claims", "keys", "fits")  # folders of a run that never hold one
# Of a trade-off: <id>.json holds counts, though it is called as a record is; <id>/ a checkpoint
TRAININGS = "training"
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
        yield from filter(is_record, sorted(folder.glob("*.json")))


def is_record(path: Path) -> bool:
    """Whether a file is a record, by its name or, where it was renamed, by what it begins with."""
    if path.suffix != ".json" or path.name.startswith(".") or not path.is_file():
        return False
    if is_record_name(path) and path.parent.name != TRAININGS:
        return True
    with contextlib.suppress(OSError), path.open("rb") as file:
        return b'"gradleak.record/' in file.read(100)
    return False


def is_record_name(path: Path) -> bool:
    """Whether a file is called as records are."""
    return fnmatch.fnmatchcase(path.name, RECORD)


def record_paths(run: Path) -> list[Path]:
    """The records of a run: one file, or those of a folder and of all folders below it."""
    if run.is_file():
        return [run]
    if not run.is_dir():
        raise RecordError(
            f"{run} is not there. Name a record, or the folder that an audit or a study wrote its"
            " records into."
        )
    if paths := list(record_files(run)):
        return paths
    raise RecordError(
        f"{run} holds no records. Name the folder that an audit or a study wrote its records into."
    )


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
    examples = attack.examples
    values, blind, draws = (
        {name: [one.get(name) for one in rows] for name in (examples[0].values if examples else ())}
        for rows in (
            [example.values for example in examples],
            [example.blind_values for example in examples],
            [example.draw_values for example in examples],
        )
    )
    return Columns(
        tuple(example.batch for example in examples),
        values,
        blind,
        tuple(example.certified for example in examples),
        tuple(example.beyond_luck for example in examples),
        draws,
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


KEY_BYTES = 32


@dataclass(frozen=True)
class SecretKey:
    """What makes hashes of private texts useless to whoever holds the records alone: short texts
    could be guessed and hashed."""

    value: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.value) != KEY_BYTES:
            raise RecordError(
                f"A key has {KEY_BYTES} bytes, not {len(self.value)}; delete the broken key file to"
                " get a new one."
            )


def keyed_hash(key: SecretKey, text: str) -> str:
    """HMAC-SHA256 of the text, in hex."""
    return hmac.new(key.value, text.encode(), hashlib.sha256).hexdigest()


def open_key(folder: Path, name: str = "secrets") -> SecretKey:
    """The key in `folder/keys/<name>.key`, made on first use: readable by its owner only and
    ignored by git."""
    keys = folder / "keys"
    path = keys / f"{name}.key"
    with explain_refusal(f"keep a key in {keys}"):
        make_private_folder(keys)
        write_whole(keys / ".gitignore", "*\n")
        if not path.exists():
            _create_key(path)
        return SecretKey(path.read_bytes())


def check_writable(folder: Path) -> None:
    """Makes the folder and tries to write into it, so that a long run does not fail at its end."""
    with explain_refusal(f"write records into {folder}"):
        make_private_folder(folder)
        probe = _unused_name(folder, "probe")
        probe.touch(exist_ok=False)
        probe.unlink()


def write_record(folder: Path, record: Record) -> Path:
    """Writes `folder/<id>.json`; a reader sees the old file or the new one, never half of one."""
    path = folder / f"{record.id}.json"
    rewrite_record(path, record)
    return path


def rewrite_record(path: Path, record: Record) -> None:
    """Writes a record where it lies, whatever its file is called.

    Its details come first and the record, which names them, after: a reader finds the old ones
    whole or the new ones. Then the old ones go.
    """
    content = _dump(record.details.to_json(), None)
    summary = Summary.of(path, record, hash_of(content))
    details = summary.details_path
    with explain_refusal(f"write records into {path.parent}"):
        write_whole_bytes(details, content)
        rewrite_summary(summary)
        for old in details.parent.glob(f"{record.id}-*.json"):
            if old != details:
                old.unlink(missing_ok=True)


def rewrite_summary(summary: Summary) -> None:
    """Writes a record's own file; its details stay as they are."""
    plain = summary.record.to_json()
    for long in (plain, *plain["attacks"].values()):
        for name in ("secrets", "examples", "batches"):
            long.pop(name, None)
    plain |= {"columns": to_plain(summary.columns), "details": summary.details}
    with explain_refusal(f"write records into {summary.path.parent}"):
        write_whole_bytes(summary.path, _dump(plain, 1))


def _dump(plain: dict[str, Any], indent: int | None) -> bytes:
    return (json.dumps(plain, indent=indent, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_record(path: Path) -> Record:
    """Reads one record with its details."""
    return read_summary(path).whole()


def _create_key(path: Path) -> None:
    """Written aside and linked into place: of processes that start together one makes the key
    and none sees half of it."""
    unfinished = _unused_name(path.parent, path.stem)
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _unused_name(folder: Path, stem: str) -> Path:
    return folder / f".{stem}.{secrets.token_hex(8)}.tmp"
