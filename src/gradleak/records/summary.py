"""Records without their long parts, for whoever reads thousands: guesses, traces and secrets
stay on disk."""

import contextlib
import fnmatch
import gc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradleak.records.errors import RecordError
from gradleak.records.flags import RaisedFlag
from gradleak.records.schema import (
    SCHEMA,
    AttackRecord,
    CostRecord,
    DataRecord,
    FindingRecord,
    GuaranteeRecord,
    NoiseRecord,
    Record,
    Score,
    TargetRecord,
)
from gradleak.records.store import read_record

# Long lists as `write_record` lays them out: JSON has no line break within a text, so that these
# can be cut without reading.
LONG = ((b'\n   "batches": [\n', b"\n   ]"), (b'\n "secrets": [\n', b"\n ]"))
# A record is called by the hash of its spec; other files (map.json) may lie beside
RECORD = "[0-9a-f]" * 16 + ".json"
NO_RECORDS = ("parts", "claims", "keys", "fits")  # folders of a run that never hold one
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
    is_published: bool = False  # from a published file: there is no whole record of it

    @property
    def id(self) -> str:
        """The record's, by the name of its file: quicker than to hash its spec again."""
        return self.path.stem

    def whole(self) -> Record:
        """Everything, read again."""
        return read_record(self.path)


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
    """The records of a run, without their long parts."""
    with no_collector():
        return [read_summary(path) for path in record_paths(run)]


def read_summary(path: Path) -> Summary:
    """One record without its long parts; a file that is none is refused as `read_record` refuses
    it."""
    try:
        plain = json.loads(_cut(path.read_bytes()))
        if plain["schema"] != SCHEMA:
            raise KeyError("schema")
        return Summary(
            path,
            _record(plain),
            {key: _columns(attack) for key, attack in plain["attacks"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        record = read_record(path)  # slower, and says what is wrong
        return Summary(
            path, record, {key: columns_of(attack) for key, attack in record.attacks.items()}
        )


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


def _cut(text: bytes) -> bytes:
    """Without the insides of long lists: half of a record, which would be read for nothing."""
    for begin, end in LONG:
        start = text.find(begin)
        while start >= 0:
            stop = text.find(end, start)
            text = text[: start + len(begin)] + text[stop:]
            start = text.find(begin, start + len(begin))
    return text


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


def _record(plain: Mapping[str, Any]) -> Record:
    return Record(
        created=plain["created"],
        spec=plain["spec"],
        versions=plain["versions"],
        machine=plain["machine"],
        data=DataRecord(**plain["data"]),
        target=TargetRecord(**plain["target"]),
        secrets=(),
        attacks={key: _attack(attack) for key, attack in plain["attacks"].items()},
        worst_case=_scores(plain["worst_case"]),
        flags=_flags(plain["flags"]),
        findings=tuple(FindingRecord(**one) for one in plain.get("findings", ())),
        guarantees=tuple(GuaranteeRecord(**one) for one in plain.get("guarantees", ())),
        noise=_noise(plain["noise"]) if plain.get("noise") else None,
    )


def _noise(plain: Mapping[str, Any]) -> NoiseRecord:
    return NoiseRecord(**{**plain, "by_batch": tuple(plain.get("by_batch", ()))})


def _attack(plain: Mapping[str, Any]) -> AttackRecord:
    return AttackRecord(
        spec=plain["spec"],
        scores=_scores(plain["scores"]),
        examples=(),
        batches=(),
        knowledge=tuple(plain["knowledge"]),
        flags=_flags(plain["flags"]),
        cost=CostRecord(**plain["cost"]),
        version=plain.get("version", 1),
    )


def _columns(plain: Mapping[str, Any]) -> Columns:
    examples = plain["examples"]
    metrics = list(examples[0]["values"]) if examples else []
    return Columns(
        tuple(example["batch"] for example in examples),
        {name: [example["values"].get(name) for example in examples] for name in metrics},
        {name: [example["blind_values"].get(name) for example in examples] for name in metrics},
        tuple(example.get("certified", False) for example in examples),
        tuple(example.get("beyond_luck", False) for example in examples),
        _columns_by_name([example.get("draw_values", {}) for example in examples], metrics),
    )


def _columns_by_name(
    values: Sequence[Mapping[str, float | None]],
    metrics: Sequence[str],
) -> dict[str, Column]:
    return {name: [one.get(name) for one in values] for name in metrics}


def _scores(plain: Mapping[str, Any]) -> dict[str, Score]:
    return {name: Score(**score) for name, score in plain.items()}


def _flags(plain: Any) -> tuple[RaisedFlag, ...]:
    return tuple(RaisedFlag(**flag) for flag in plain)
