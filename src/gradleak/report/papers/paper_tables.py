"""The papers' tables with our numbers beside theirs, as Markdown, CSV and LaTeX.

What the papers printed is data (the JSON files beside this one); here it is only matched.
"""

import fnmatch
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any

from gradleak.records.schema import AttackRecord, Record, Score
from gradleak.records.store import Summary
from gradleak.report.numbers import write_interval, write_number
from gradleak.report.table_markup import draw_markdown_table, write_csv_table

NOT_RUN = "not run"
NOT_SCORED = "not scored"
LATEX = str.maketrans(
    {
        "&": r"\&",
        "%": r"\%",
        "_": r"\_",
        "#": r"\#",
        "σ": r"$\sigma$",
        "Δ": r"$\Delta$",
        "±": r"$\pm$",
    }
)
BERT_BASE = ("target=bert-base-uncased",)  # in whose places MiniLM-L6 stands here
CSV_HEAD = (
    *("table", "row", "column", "metric", "ours", "low", "high", "blind", "n", "paper"),
    *("target", "seed", "machine", "date", "record"),
)
FACTS = ("lamp.json", "partial_gradients.json", "learning_to_invert.json")
Pair = tuple[Record, AttackRecord]


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
    metrics: Sequence[tuple[str, str]]  # as printed, and ours
    columns: Sequence[PaperColumn]
    rows: Sequence[PaperRow]
    name: str
    title: str
    match: Mapping[str, Any]
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
        patterns = (self.table.match, *(column.match for column in self.table.columns))
        return "bert-base" in json.dumps(patterns)


def _count_run(lines: Sequence[Line]) -> int:
    return sum(line.record is not None for line in lines)


@cache
def read_paper_tables() -> list[PaperTable]:
    """Reads every printed table we know."""
    found = []
    for name in FACTS:
        plain = json.loads((files("gradleak.report") / "papers" / name).read_text(encoding="utf-8"))
        for one in plain["tables"]:
            columns = [PaperColumn(**column) for column in one.pop("columns")]
            rows = [PaperRow(**row) for row in one.pop("rows")]
            metrics = [(printed, ours) for printed, ours in one.pop("metrics")]
            found.append(PaperTable(plain["paper"], metrics, columns, rows, **one))
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
        column.name: [
            (record, attack)
            for record, attack in ran
            if fits(column.match, record.spec)
            # A place for weights of the hub is never filled by a model with random ones
            and not (column.hub and record.target.fingerprint.startswith("made:"))
        ]
        for column in table.columns
    }
    lines: list[Line] = []
    used: set[int] = set()
    for row, column in product(table.rows, table.columns):
        if column.name in row.values:
            fit = [
                pair
                for pair in by_column[column.name]
                if fits(row.match, pair[0].spec) and fits(row.attack, pair[1].spec)
            ]
            used |= {id(attack) for _, attack in fit}
            nearest = row.nearest.get(column.name, ())
            found = _fill_lines(table, row.name, column.name, row.values[column.name], fit)
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


def _fill_lines(
    table: PaperTable,
    row: str,
    column: str,
    theirs: Sequence[float],
    fit: Sequence[Pair],
) -> Iterator[Line]:
    """Fills a place with the newest version of its attack.

    Older versions stand below it, named so and not counted as run.
    """
    groups: dict[str, dict[int, list[Pair]]] = {}
    for record, attack in fit:
        versions = groups.setdefault(str(attack.spec.get("name")), {})
        versions.setdefault(attack.version, []).append((record, attack))
    newest = [pair for versions in groups.values() for pair in versions.pop(max(versions))]
    yield _fill_line(table, row, column, theirs, newest)
    for versions in groups.values():
        for version in sorted(versions, reverse=True):
            older = _fill_line(table, f"{row} (version {version})", column, (), versions[version])
            yield replace(older, in_paper=False)


def _fill_line(
    table: PaperTable,
    row: str,
    column: str,
    theirs: Sequence[float],
    fit: Sequence[Pair],
) -> Line:
    """Takes, of several records that fit, the one with most examples.

    Of equals it is the one with the lowest seed, then the newest.
    """
    if not fit:
        return Line(row, column, theirs, [None] * len(table.metrics))
    record, attack = max(
        fit, key=lambda pair: (pair[0].data.examples, -pair[0].spec.get("seed", 0), pair[0].created)
    )
    return Line(row, column, theirs, [attack.scores.get(one) for _, one in table.metrics], record)


def _list_ours_alone(
    table: PaperTable,
    by_column: Mapping[str, Sequence[Pair]],
    used: set[int],
) -> Iterator[Line]:
    """Lists attacks the paper does not have, under the paper's settings."""
    groups = {json.dumps(row.match, sort_keys=True): row for row in table.rows}
    for row, (column, pairs) in product(groups.values(), by_column.items()):
        setting = row.name if row.match.get("view") else row.name.rpartition(", ")[0]
        names: dict[str, list[Pair]] = {}
        for record, attack in pairs:
            name = str(attack.spec.get("name"))
            if id(attack) not in used and name != "blind" and fits(row.match, record.spec):
                names.setdefault(name, []).append((record, attack))
        for name, fit in names.items():
            told = f"{setting}, {name} (not in this table)".removeprefix(", ")
            for line in _fill_lines(table, told, column, (), fit):
                yield replace(line, in_paper=False)


def write_tables_markdown(filled: Sequence[Filled], command: str) -> str:
    """Writes one table after the other; ours with a 95 % interval, theirs as printed."""
    about = (
        f"Written by `{command}`. Ours: mean [95 % interval]; blind: the same knowledge without"
        " the update; fractions in %."
    )
    title = "# The papers' tables, ours beside theirs"
    return "\n".join([title, "", about, "", *write_sections(filled)])


def write_sections(filled: Sequence[Filled]) -> Iterator[str]:
    """Writes a heading, what was run, the table, and how to run the rest."""
    for one in filled:
        yield from (f"## {one.table.title}", "", f"{one.table.paper}. {one.count_in_words}", "")
        if one.table.note:
            yield from (one.table.note, "")
        head, rows = _list_head(one), [_list_row(one, line) for line in one.lines]
        if any(line.nearest for line in one.lines):  # of six layers, as MiniLM-L6 is
            nearest = (" / ".join(f"{value:g}" for value in line.nearest) for line in one.lines)
            head.append("paper, TinyBERT-6")
            rows = [[*row, text] for row, text in zip(rows, nearest, strict=True)]
        yield from draw_markdown_table(head, rows)
        if one.run < one.places and one.table.studies:
            yield from (*_list_commands(one), "")


def _list_commands(one: Filled) -> Iterator[str]:
    """Lists how to run what is missing: with what is at hand, and with weights to be fetched."""
    runs = [f"gradleak run studies/{name}.yaml" for name in one.table.studies]
    yield "What was not run: " + ", ".join(f"`{run}`" for run in runs) + "."
    lacking = [tuple(line.hub) for line in one.paper_lines if line.hub and line.record is None]
    fetched = [*([BERT_BASE] if one.stood_for else []), *dict.fromkeys(lacking)]
    if fetched:
        yield from ("On the paper's own models, whose weights have to be fetched:", "")
    for fields in fetched:
        yield f"    {runs[0]} {' '.join(f'--set {shlex.quote(field)}' for field in fields)}"


def write_latex(filled: Sequence[Filled]) -> str:
    """Writes a tabular for each, without a package but the ones everybody has."""
    return "\n\n".join(map(_write_tabular, filled)) + "\n"


def _write_tabular(one: Filled) -> str:
    rows = [_list_head(one), *(_list_row(one, line) for line in one.lines)]
    head, *body = [" & ".join(text.translate(LATEX) for text in row) + r" \\" for row in rows]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{one.table.title.translate(LATEX)}}}",
            rf"\label{{tab:{one.table.name}}}",
            rf"\begin{{tabular}}{{ll{'r' * (2 * len(one.table.metrics) + 2)}l}}",
            *(r"\hline", head, r"\hline", *body, r"\hline"),
            *(r"\end{tabular}", r"\end{table}"),
        ]
    )


def write_csv(filled: Sequence[Filled]) -> str:
    """Writes a line for each number, for programs."""
    return write_csv_table(
        CSV_HEAD,
        [
            [one.table.name, line.row, line.column, printed, *_list_numbers(line, place)]
            for one in filled
            for line in one.lines
            for place, (printed, _) in enumerate(one.table.metrics)
        ],
    )


def _list_numbers(line: Line, place: int) -> list[object]:
    score, record = line.ours[place], line.record
    theirs = line.theirs[place] if line.theirs else ""
    if score is None or record is None:
        return [NOT_RUN if record is None else NOT_SCORED, *[""] * 4, theirs, *[""] * 5]
    scale = 100 if score.unit == "fraction" else 1
    numbers = (score.mean, score.low, score.high, score.blind)
    return [
        *("" if value is None else round(scale * value, 4) for value in numbers),
        *(score.n, theirs, record.target.name, record.spec.get("seed", "")),
        record.machine.get("name", record.machine.get("device", "")),
        *(record.created[:10], record.id),
    ]


def _list_head(one: Filled) -> list[str]:
    pairs = [text for printed, _ in one.table.metrics for text in (printed, f"{printed} (paper)")]
    return ["row", "column", *pairs, "blind", "n", "our target, seed, date"]


def _list_row(one: Filled, line: Line) -> list[str]:
    record = line.record
    unscored = NOT_RUN if record is None else NOT_SCORED
    texts = [line.row, line.column]
    for place, score in enumerate(line.ours):
        texts.append(unscored if score is None or score.mean is None else write_interval(score))
        texts.append(f"{line.theirs[place]:g}" if line.theirs else "–")
    if record is None:
        return [*texts, "", "", ""]
    origin = f"{record.target.name}, {record.spec.get('seed', '–')}, {record.created[:10]}"
    return [*texts, list_blind(line.ours), str(line.n), origin]


def list_blind(scores: Sequence[Score | None]) -> str:
    """Writes what the blind guess gets by each metric: `12.5 / 0.0`."""
    return " / ".join("–" if one is None else write_number(one.blind, one.unit) for one in scores)
