"""What is published of a run: every record of public data as cells of rows, scores, marks and
costs; never a text or a hash."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError
from gradleak.core.registry import find, list_registered
from gradleak.datasets.selection import read_numbers
from gradleak.records import flags
from gradleak.records.plain import to_plain
from gradleak.records.published import (
    Mark,
    MetricKind,
    Published,
    PublishedBatch,
    PublishedCell,
    Source,
)
from gradleak.records.run_folder import FILE, read_plan
from gradleak.records.schema import AttackRecord, BatchRecord, ExampleRecord, Record
from gradleak.records.store import read_record, record_paths

DIGITS = 5  # of seconds and noise: tables show fewer
ROWS = re.compile(r"(?<=[:,])rows=(\[[^]]*\]|[^,]*),?")  # in a data set on one line


def publish_runs(run: Path) -> list[Published]:
    """What can be published of a run: a study, or a folder of studies, each by its name."""
    found: dict[Path, list[PublishedCell]] = {}
    for path in record_paths(run):
        record = read_record(path)
        _refuse_private(record, path)
        axes = _axes(path.parent).get(record.id, {})
        found.setdefault(path.parent, []).extend(_cells(record, axes, _rows(record, path)))
    return [Published(_study(folder), tuple(cells)) for folder, cells in found.items()]


def _refuse_private(record: Record, path: Path) -> None:
    """Only data that anyone can get: of other data even row numbers and scores are its owner's."""
    name = str(record.spec["data"].get("name"))
    public = [
        known
        for known, one in list_registered("dataset").items()
        if issubclass(one, Dataset) and one.is_public
    ]
    if name not in public:
        raise GradleakError(
            f"{path} is of the data set {name!r}, which is not known to be public: results of your"
            f" own data are not published. Public ones: {', '.join(public)}."
        )


def _study(folder: Path) -> str:
    """The study's name, as its run wrote it down; of a folder of single audits the folder's own."""
    plan = folder / FILE
    if plan.is_file():
        return str(json.loads(plan.read_text(encoding="utf-8"))["name"])
    return folder.resolve().name


def _axes(folder: Path) -> dict[str, Mapping[str, str]]:
    """Where the planned cells lie, by their ids; a stretch of rows is no place of its own."""
    return {
        cell.id: {
            axis: ROWS.sub("", value).rstrip(":,") if axis == "data" else value
            for axis, value in cell.axes.items()
        }
        for cell in read_plan(folder) or ()
    }


def _rows(record: Record, path: Path) -> list[int]:
    """Returns the row of every example, once for each draw."""
    rows = [secret.row for secret in record.secrets if secret.row is not None]
    if len(rows) < len(record.secrets):
        raise GradleakError(
            f"{path} does not say which rows of its data its examples are, so that they cannot be"
            " told from those of other audits. Run the audit again."
        )
    return rows


def _cells(record: Record, axes: Mapping[str, str], rows: Sequence[int]) -> Iterator[PublishedCell]:
    for attack in record.attacks.values():
        yield PublishedCell(
            axes=dict(axes),
            setting=_setting(record),
            attack=_without_folders(attack.spec),
            version=attack.version,
            knowledge=attack.knowledge,
            model=_without_folders(to_plain(record.target)),
            metrics=tuple(
                MetricKind(name, score.unit, score.direction)
                for name, score in attack.scores.items()
            ),
            guarantees=tuple(to_plain(one) for one in record.guarantees),
            batches=tuple(_batches(record, attack, rows)),
        )


def _setting(record: Record) -> dict[str, Any]:
    """The audit's fields, but for those in which audits may differ whose rows add up."""
    fields = {key: value for key, value in record.spec.items() if key not in ("attacks", "limit")}
    fields["data"] = {
        key: value for key, value in fields["data"].items() if key not in ("rows", "folder")
    }
    whole: dict[str, Any] = _without_folders(to_plain(fields))
    return whole


def _without_folders(value: Any) -> Any:
    """Of a path its last name: the rest is a machine's."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and ("/" in value or "\\" in value) and _is_local(value):
        return "…/" + value.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
    return value


def _is_local(text: str) -> bool:
    """Whether a text, or the value in a line such as `huggingface:path=/home/…`, is a path and
    no id of the hub."""
    value = text.rpartition("=")[2].strip("\"'")
    return (
        value.startswith(("/", "~", ".", "\\"))
        or value[1:3] in (":/", ":\\")
        or Path(value).exists()
    )


def _batches(record: Record, attack: AttackRecord, rows: Sequence[int]) -> Iterator[PublishedBatch]:
    source = Source(
        created=record.created,
        machine={key: record.machine[key] for key in ("device", "name") if key in record.machine},
        versions=record.versions,
        flags=tuple(flag.name for flag in attack.flags),
        peak_memory_bytes=attack.cost.peak_memory_bytes,
    )
    size, chosen = (
        int(record.spec.get("batch_size", 1)),
        read_numbers(record.spec["data"].get("rows", ())),
    )
    is_picture = find("target", record.spec["target"]["name"]).medium == "image"
    for number, batch in enumerate(attack.batches):
        draw, secret = divmod(number, record.data.batches)
        here = slice(number * size, (number + 1) * size)
        examples = attack.examples[here]
        yield PublishedBatch(
            rows=tuple(rows[here]),
            place=chosen[secret * size] if chosen else secret * size,
            draw=draw,
            source=source,
            marks=_marks(batch, examples, is_picture=is_picture),
            seconds=_round(batch.seconds),
            steps=batch.steps,
            values={
                name: tuple(example.values.get(name) for example in examples)
                for name in attack.scores
            },
            blind={
                name: tuple(example.blind_values.get(name) for example in examples)
                for name in attack.scores
            },
            noise=None if record.noise is None else _round(record.noise.by_batch[number]),
        )


def _round(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _marks(batch: BatchRecord, examples: Sequence[ExampleRecord], *, is_picture: bool) -> Mark:
    """The rules of the flags, on one batch. Pictures are never right to the last bit, and no
    other answer is said to fit."""
    at_guess, at_truth = [batch.objective_at_guess], [batch.objective_at_truth]
    rounding = flags.ROUNDING if batch.objective_rounding is None else batch.objective_rounding
    scale = [(batch.objective_unit, rounding)]
    right = is_picture or bool(batch.right)
    norms = [] if batch.update_norm is None else [batch.update_norm]
    holds = {
        Mark.COMPARED: None not in (*at_guess, *at_truth),
        Mark.SEARCH_FAILED: flags.search_failed(at_guess, at_truth, scale),
        Mark.OTHER_FITS: flags.other_answer_fits(at_guess, at_truth, [right], scale),
        Mark.DEAD: norms and flags.dead_gradient(norms),
        Mark.CERTIFIED: any(example.certified for example in examples),
        Mark.BEYOND_LUCK: any(example.beyond_luck for example in examples),
    }
    return reduce(or_, (mark for mark, is_true in holds.items() if is_true), Mark(0))
