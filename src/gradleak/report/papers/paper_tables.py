"""The papers' tables with our numbers beside theirs.

What the papers printed is data (the JSON files beside this one); here it is only matched.
"""

import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from gradleak.records.schema import AttackRecord, Record, Score
from gradleak.records.summary import Summary

FACTS = ("lamp.json", "partial_gradients.json", "learning_to_invert.json")


@dataclass(frozen=True)
class PaperRow:
    """One line of a printed table: which records it is about, and the values in each column."""

    name: str
    match: Mapping[str, Any]
    attack: Sequence[Mapping[str, Any]]  # any of these
    values: Mapping[
        str, Sequence[float]
    ]  # by column, one a metric; none where the paper draws and does not print
    nearest: Mapping[str, Sequence[float]] = field(
        default_factory=dict
    )  # the same on TinyBERT-6, of six layers as MiniLM-L6


@dataclass(frozen=True)
class PaperColumn:
    """One column: which records it is about."""

    name: str
    match: Mapping[str, Any]
    # Fields a study is run with (--set) for weights of the hub that no model at hand stands for.
    hub: Sequence[str] = ()


@dataclass(frozen=True)
class PaperTable:
    """A printed table."""

    paper: str
    name: str
    title: str
    metrics: Sequence[tuple[str, str]]  # as printed, and ours
    match: Mapping[str, Any]
    columns: Sequence[PaperColumn]
    rows: Sequence[PaperRow]
    studies: Sequence[str] = ()  # that run its places
    note: str = ""  # what to bear in mind when ours are held against theirs


@dataclass(frozen=True)
class Line:
    """One place of a table: the paper's number, where it has one, and ours, if it was run."""

    row: str
    column: str
    theirs: Sequence[float]
    ours: Sequence[Score | None]
    record: Record | None = None
    others: int = 0  # records that fit as well
    in_paper: bool = True  # otherwise an attack that the paper does not have
    hub: Sequence[str] = ()  # of the column: what to set for weights that this place needs
    nearest: Sequence[float] = ()  # theirs on the model that is nearest to ours

    @property
    def n(self) -> int:
        return max((score.n for score in self.ours if score is not None), default=0)


@dataclass(frozen=True)
class Filled:
    """A table and its lines."""

    table: PaperTable
    lines: Sequence[Line]

    @property
    def run(self) -> int:
        """How many of the paper's places have a number of ours."""
        return _count_run(self.paper_lines)

    @property
    def places(self) -> int:
        """How many places the paper has."""
        return len(self.paper_lines)

    @property
    def paper_lines(self) -> list[Line]:
        return [line for line in self.lines if line.in_paper]

    @property
    def count_in_words(self) -> str:
        """How many places were run.

        Places that a pretrained model at hand can fill are counted apart from the others.
        """
        here, elsewhere = (
            [line for line in self.paper_lines if bool(line.hub) is hub] for hub in (False, True)
        )
        if not elsewhere:
            return f"{self.run} of {self.places} places were run."
        return (
            f"{_count_run(here)} of {len(here)} places that models at hand can fill were run "
            "(MiniLM-L6, plain or fine-tuned, "
            f"stands for BERT-base), {_count_run(elsewhere)} of {len(elsewhere)} that need "
            "weights from the hub."
        )

    @property
    def stood_for(self) -> bool:
        """Whether places of BERT-base may be filled by a model at hand."""
        patterns = [self.table.match, *(column.match for column in self.table.columns)]
        return any("bert-base" in json.dumps(pattern) for pattern in patterns)


def _count_run(lines: Sequence[Line]) -> int:
    return sum(line.record is not None for line in lines)


@cache
def read_paper_tables() -> list[PaperTable]:
    """Reads every printed table we know."""
    found = []
    for name in FACTS:
        plain = json.loads((files("gradleak.report") / "papers" / name).read_text(encoding="utf-8"))
        for one in plain["tables"]:
            columns = [PaperColumn(**column) for column in one["columns"]]
            rows = [PaperRow(**row) for row in one["rows"]]
            metrics = [(printed, ours) for printed, ours in one["metrics"]]
            studies, note = one.get("studies", ()), one.get("note", "")
            found.append(
                PaperTable(
                    plain["paper"],
                    one["name"],
                    one["title"],
                    metrics,
                    one["match"],
                    columns,
                    rows,
                    studies,
                    note,
                )
            )
    return found


def fill_table(table: PaperTable, summaries: Iterable[Summary]) -> Filled:
    """Fills a table with our numbers; below the paper's rows stand the attacks that only we ran."""
    ran = [
        (summary.record, attack)
        for summary in summaries
        if fits(table.match, summary.record.spec)
        for attack in summary.record.attacks.values()
    ]
    by_column = {
        column.name: [pair for pair in ran if _is_of_column(column, pair[0])]
        for column in table.columns
    }
    lines: list[Line] = []
    used: set[int] = set()
    for row in table.rows:
        for column in table.columns:
            if column.name in row.values:
                fit = [
                    pair
                    for pair in by_column[column.name]
                    if fits(row.match, pair[0].spec) and _is_of_row(row, pair[1])
                ]
                used |= {id(attack) for _, attack in fit}
                found = _fill_lines(table, row.name, column.name, row.values[column.name], fit)
                nearest = row.nearest.get(column.name, ())
                lines += [replace(line, hub=column.hub, nearest=nearest) for line in found]
    return Filled(table, [*lines, *_list_ours_alone(table, by_column, used)])


def fits(pattern: Any, value: Any) -> bool:
    """Whether a value has all that a pattern names.

    A list of patterns stands for any of them, unless the value is a list.
    """
    if isinstance(value, list):
        return (
            isinstance(pattern, list)
            and len(pattern) == len(value)
            and all(map(fits, pattern, value))
        )
    if isinstance(pattern, list):
        return any(fits(one, value) for one in pattern)
    if isinstance(pattern, Mapping):
        # A switch that an older record does not have was off.
        return isinstance(value, Mapping) and all(
            fits(inner, value.get(key, False)) for key, inner in pattern.items()
        )
    if isinstance(pattern, str) and isinstance(value, str):
        return fnmatch.fnmatchcase(value.lower(), pattern.lower())
    return bool(pattern == value)


def _is_of_column(column: PaperColumn, record: Record) -> bool:
    """Whether a record is of this column.

    A place for weights of the hub is never filled by a model with random ones.
    """
    return fits(column.match, record.spec) and not (
        column.hub and record.target.fingerprint.startswith("made:")
    )


def _is_of_row(row: PaperRow, attack: AttackRecord) -> bool:
    return fits(row.attack, attack.spec)


def _fill_lines(
    table: PaperTable,
    row: str,
    column: str,
    theirs: Sequence[float],
    fit: Sequence[tuple[Record, AttackRecord]],
) -> Iterator[Line]:
    """Fills a place with the newest version of its attack.

    Older versions stand below it, named so and not counted as run.
    """
    groups: dict[str, dict[int, list[tuple[Record, AttackRecord]]]] = {}
    for pair in fit:
        groups.setdefault(str(pair[1].spec.get("name")), {}).setdefault(pair[1].version, []).append(
            pair
        )
    yield _fill_line(
        table,
        row,
        column,
        theirs,
        [pair for versions in groups.values() for pair in versions[max(versions)]],
    )
    for versions in groups.values():
        for version in sorted(versions, reverse=True)[1:]:
            older = _fill_line(table, f"{row} (version {version})", column, (), versions[version])
            yield replace(older, in_paper=False)


def _fill_line(
    table: PaperTable,
    row: str,
    column: str,
    theirs: Sequence[float],
    fit: Sequence[tuple[Record, AttackRecord]],
) -> Line:
    """Takes, of several records that fit, the one with most examples.

    Of equals it is the one with the lowest seed, then the newest.
    """
    if not fit:
        return Line(row, column, theirs, [None] * len(table.metrics))
    record, attack = max(
        fit, key=lambda pair: (pair[0].data.examples, -pair[0].spec.get("seed", 0), pair[0].created)
    )
    return Line(
        row,
        column,
        theirs,
        [attack.scores.get(ours) for _, ours in table.metrics],
        record,
        len(fit) - 1,
    )


def _list_ours_alone(
    table: PaperTable,
    by_column: Mapping[str, Sequence[tuple[Record, AttackRecord]]],
    used: set[int],
) -> Iterator[Line]:
    """Lists attacks the paper does not have, under the paper's settings."""
    groups = list({json.dumps(row.match, sort_keys=True): row for row in table.rows}.values())
    for row in groups:
        setting = row.name.rpartition(", ")[0] if not row.match.get("view") else row.name
        for column, pairs in by_column.items():
            names: dict[str, list[tuple[Record, AttackRecord]]] = {}
            for record, attack in pairs:
                name = str(attack.spec.get("name"))
                if id(attack) not in used and name != "blind" and fits(row.match, record.spec):
                    names.setdefault(name, []).append((record, attack))
            for name, fit in names.items():
                for line in _fill_lines(
                    table,
                    f"{setting}, {name} (not in this table)".removeprefix(", "),
                    column,
                    (),
                    fit,
                ):
                    yield replace(line, in_paper=False)
