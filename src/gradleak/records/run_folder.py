"""All that a run left in its folder and below: records that can be read, and everything that is
missing, broken or odd."""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradleak.records.files import RecordError, make_private_folder
from gradleak.records.judgement import (
    FAILED,
    FOREIGN,
    MISSING,
    OTHER_DATA,
    UNREADABLE,
    Coverage,
    Gap,
)
from gradleak.records.schema import plain_id
from gradleak.records.settings import drop_blind, most
from gradleak.records.store import (
    Summary,
    is_record_name,
    no_collector,
    read_summary,
    record_files,
    record_paths,
    walk,
)

try:
    import fcntl
# Windows has no such locks: runs that share a folder may do a cell twice there, to the same record
except ImportError:
    fcntl = None  # type: ignore[assignment]

SCHEMA = "gradleak.study/1"
FILE = "study.json"
FAILED_SUFFIX = ".failed.txt"
ID = 16  # letters of a cell's id, with which the names of its files begin
SAME = 1e-6  # means this close are one number, whatever the order of their sum


@dataclass(frozen=True)
class PlannedCell:
    """A cell by its id, where it lies on the axes, and what its time depends on."""

    id: str
    axes: Mapping[str, str]
    # By the key of each attack (pace.kinds_of)
    kinds: Mapping[str, str] = field(default_factory=dict)
    batches: int = 0

    @property
    def title(self) -> str:
        return ", ".join(f"{axis}={value}" for axis, value in self.axes.items()) or "the only cell"


Plans = Sequence[tuple[Path, Sequence[PlannedCell]]]  # the file of each, and its cells


@dataclass(frozen=True)
class Run:
    """What can be judged, and what cannot."""

    summaries: tuple[Summary, ...]
    coverage: Coverage


def read_plan(folder: Path) -> list[PlannedCell] | None:
    """The planned cells; none where the folder was not written by a study."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return [
            PlannedCell(cell["id"], cell["axes"], cell.get("kinds", {}), cell.get("batches", 0))
            for cell in plain["cells"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{path} is not a whole study file. Delete it and run the study again: records are"
            " kept."
        ) from error


def read_run(run: Path, contract: Sequence[PlannedCell] | None = None) -> Run:
    """Everything of a record, or of a folder and all folders below it.

    What must be there is said by the `contract`; without one by the studies that left their plan in
    a folder.
    """
    if not run.is_dir():
        return _whole(record_paths(run), [], contract)
    return _whole(list(record_files(run)), list(walk(run)), contract)


def _whole(
    paths: Sequence[Path], folders: Sequence[Path], contract: Sequence[PlannedCell] | None
) -> Run:
    summaries, gaps = _readable(paths)
    plans: list[tuple[Path, Sequence[PlannedCell]]] = []
    for folder in folders:
        try:
            plan = read_plan(folder)
        except RecordError as error:
            gaps.append(Gap(UNREADABLE, FILE, str(folder / FILE), str(error)))
            continue
        if plan is not None and contract is None:
            plans.append((folder / FILE, plan))
    everywhere = contract is not None
    if contract is not None:
        plans = [(folders[0] if folders else paths[0], contract)]
    gaps += _failures(folders, plans)
    there = [summary.path for summary in summaries]
    looked_at = [*there, *(Path(gap.path) for gap in gaps if gap.kind in (FAILED, UNREADABLE))]
    gaps += _missing(plans, looked_at, everywhere=everywhere)
    gaps += _find_begun(folders, looked_at)
    gaps += _foreign(summaries, plans, everywhere=everywhere)
    gaps += _of_other_data(summaries)
    if not plans:
        return Run(tuple(summaries), Coverage(None, len(summaries), tuple(gaps)))
    planned = [(path.parent, {cell.id for cell in plan}) for path, plan in plans]
    run = sum(len(ids & _ids(there, None if everywhere else folder)) for folder, ids in planned)
    meant = sum(len(ids) for _, ids in planned)
    return Run(tuple(summaries), Coverage(meant, run, tuple(gaps)))


def _ids(paths: Sequence[Path], folder: Path | None) -> set[str]:
    """The cells that files are about, of one folder or of all: records and tracebacks are called
    by the id of their cell."""
    return {path.name[:ID] for path in paths if folder is None or path.parent == folder}


def _readable(paths: Sequence[Path]) -> tuple[list[Summary], list[Gap]]:
    summaries, gaps = list[Summary](), list[Gap]()
    with no_collector():
        for path in paths:
            try:
                summary = read_summary(path)
                if wrong := contradiction(summary):
                    raise RecordError(f"{path} {wrong} Run its audit again.")
            except RecordError as error:
                gaps.append(Gap(UNREADABLE, path.name, str(path), str(error)))
            else:
                summaries.append(summary)
    return summaries, gaps


def contradiction(summary: Summary) -> str | None:
    """In what a record does not agree with itself, or with the name of its file; such a record
    was changed by hand."""
    record = summary.record
    if is_record_name(summary.path) and plain_id(record.spec) != summary.path.stem:
        return (
            f"holds the record of another audit ({plain_id(record.spec)}), or its spec was changed."
        )
    if not record.attacks:
        return "holds no attack."
    wanted = record.data.examples * int(record.spec.get("draws", 1))
    for key, columns in summary.columns.items():
        if len(columns.batches) != wanted:
            return f"should hold {wanted} guesses of {key} and holds {len(columns.batches)}."
        for metric, score in record.attacks[key].scores.items():
            if metric in columns.values and not _agree(score.mean, columns.values[metric]):
                return f"was changed: {metric} of {key} does not follow from its examples."
    tried = drop_blind([(record.attacks[key], one) for key, one in summary.columns.items()])
    for metric, score in record.worst_case.items():
        values = [columns.values[metric] for _, columns in tried if metric in columns.values]
        if len(values) == len(tried) and not _agree(score.mean, most(values, score.direction)):
            return f"was changed: its worst case of {metric} does not follow from its examples."
    return None


def _agree(mean: float | None, column: Sequence[float | None]) -> bool:
    there = [value for value in column if value is not None]
    if not there or mean is None:
        return mean is None  # an infinite mean is written as none
    found = math.fsum(there) / len(there)
    return abs(found - mean) <= SAME * max(1.0, abs(found))


def _failures(folders: Sequence[Path], plans: Plans) -> list[Gap]:
    """Tracebacks that lie here; one beside a record means that a later try failed."""
    titles = {cell.id: cell.title for _, plan in plans for cell in plan}
    paths = sorted(path for folder in folders for path in folder.glob(f"*{FAILED_SUFFIX}"))
    names = [path.name.removesuffix(FAILED_SUFFIX) for path in paths]
    return [
        Gap(FAILED, titles.get(name, name), str(path), f"It failed: {last_line(path)}")
        for name, path in zip(names, paths, strict=True)
    ]


def last_line(path: Path) -> str:
    """Of a traceback: what went wrong."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no traceback"


def _missing(plans: Plans, looked_at: Sequence[Path], *, everywhere: bool) -> list[Gap]:
    """Cells of a study that left nothing in its folder; of a contract, anywhere."""
    why = "No record of it is here. Run the study to its end."
    known = {path: _ids(looked_at, None if everywhere else path.parent) for path, _ in plans}
    return [
        Gap(MISSING, cell.title, str(path), why)
        for path, plan in plans
        for cell in plan
        if cell.id not in known[path]
    ]


def _find_begun(folders: Sequence[Path], looked_at: Sequence[Path]) -> list[Gap]:
    """Audits beside no study that left parts and no record: they were cut."""
    return [
        Gap(
            *(MISSING, path.name[:ID], str(path)),
            "It was begun and cut. Run the same command again.",
        )
        for folder in folders
        if not (folder / FILE).is_file()
        for path in sorted(folder.glob("parts/*"))
        if path.is_dir() and path.name[:ID] not in _ids(looked_at, folder)
    ]


def _foreign(summaries: Sequence[Summary], plans: Plans, *, everywhere: bool) -> list[Gap]:
    """Records that no study asked for: beside a study's own, or with a contract anywhere."""
    why = "It belongs to no cell of the study: an earlier one's, or another's. Move it away."
    by_folder = {path.parent: {cell.id for cell in plan} for path, plan in plans}
    every = {cell.id for _, plan in plans for cell in plan}
    found = []
    for summary in summaries:
        planned = every if everywhere else by_folder.get(summary.path.parent)
        if planned is not None and summary.id not in planned:
            found.append(Gap(FOREIGN, summary.path.name, str(summary.path), why))
    return found


def _of_other_data(summaries: Sequence[Summary]) -> list[Gap]:
    """Records of one folder and one description of the data whose hash is not that of the
    newest: it changed in between."""
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        described = [summary.record.spec.get(field) for field in ("data", "limit", "batch_size")]
        key = json.dumps([str(summary.path.parent), *described], sort_keys=True)
        groups.setdefault(key, []).append(summary)
    found = []
    for group in groups.values():
        newest = max(group, key=lambda summary: summary.record.created)
        why = f"Its data was changed before {newest.path.name} was made of it. Run its audit again."
        found += [
            Gap(OTHER_DATA, summary.path.name, str(summary.path), why)
            for summary in group
            if summary.record.data.hash != newest.record.data.hash
        ]
    return found


@contextlib.contextmanager
def claim(folder: Path, cell: str, *, wait: bool = False) -> Iterator[bool]:
    """Whether the cell is ours until the block ends; with `wait`, only once nobody else holds it.

    Of two runs that share a folder one takes it. A claim ends with its process, however that ends.
    """
    path = folder / "claims" / cell
    make_private_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield _lock(descriptor, wait)
    finally:
        os.close(descriptor)  # gives the lock back


def _lock(descriptor: int, wait: bool) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
