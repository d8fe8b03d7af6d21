"""Results that outlive a machine: what a table needs of audits, batch by batch, and no text.

The form has a version of its own and stays readable whatever becomes of records. A file is JSON,
packed with xz: the name of a study, and for every setting, model, attack and version of that attack
the batches that were attacked. A batch is named by the numbers of its rows in their split, counted
from 0; it has its scores, marks that flags follow from, and what it cost. Equal batches are counted
once. From 1,000 examples on a cell has sums and histograms of its scores in the place of single
ones.
"""

import json
import lzma
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntFlag
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from gradleak.records.files import RecordError
from gradleak.records.judgement import LEADING
from gradleak.records.plain import from_plain, to_plain
from gradleak.records.statistics import Tally, add, add_all, tally

FORM = "gradleak.published/1"
SUFFIX = ".xz"
TALLIED_FROM = 1000  # examples of a cell
GAIN = "gain"  # the tally of what the leading metric gains over blind


class Mark(IntFlag):
    """What is to be said of one batch besides its scores."""

    COMPARED = 1  # the attack's objective is known at guess and truth
    SEARCH_FAILED = 2
    OTHER_FITS = 4
    DEAD = 8  # its update is as good as nothing
    CERTIFIED = 16
    BEYOND_LUCK = 32  # a text too long to be hit by chance was rebuilt whole


@dataclass(frozen=True)
class Source:
    """One audit that batches come from: when, where, and what was said of it as a whole."""

    created: str  # ISO 8601, UTC
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    flags: tuple[str, ...]
    peak_memory_bytes: int | None = None

    @cached_property
    def order(self) -> tuple[str, str]:
        """The newest is the largest; of equals always the same one."""
        return self.created, _canonical(asdict(self))


def in_order(sources: Iterable[Source]) -> list[Source]:
    """Returns each source once, the newest last."""
    found = {source.order: source for source in sources}
    return [found[order] for order in sorted(found)]


@dataclass(frozen=True)
class PublishedBatch:
    """One client batch as an attack left it."""

    rows: tuple[int, ...]  # of the split, from 0
    place: int  # of the first of them in the selection: the order in which batches were attacked
    draw: int
    source: Source
    marks: Mark
    seconds: float
    steps: int
    values: Mapping[str, tuple[float | None, ...]]  # by metric, one an example
    blind: Mapping[str, tuple[float | None, ...]]
    noise: float | None = None  # of the defenses, over what they hide

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        return self.rows, self.draw


@dataclass(frozen=True)
class Tallied:
    """Very many batches as sums."""

    keys: frozenset[tuple[tuple[int, ...], int]]  # which they are, so that none is counted twice
    sources: tuple[Source, ...]
    marks: Mapping[int, int]  # how many batches have these marks
    seconds: float
    steps: int
    values: Mapping[str, Tally | None]
    blind: Mapping[str, Tally | None]  # beside values; and GAIN
    noise: Tally | None = None


@dataclass(frozen=True)
class MetricKind:
    """How a metric is read."""

    name: str
    unit: str
    direction: str


@dataclass(frozen=True)
class PublishedCell:
    """One attack, in one version of it, on one model in one setting, and all batches that are
    known."""

    axes: Mapping[str, str]  # as the study's YAML writes them
    setting: Mapping[str, Any]  # the audit's fields without the attacks, the limit and the rows
    attack: Mapping[str, Any]
    version: int
    knowledge: tuple[str, ...]
    model: Mapping[str, Any]  # name, fingerprint, parameters, visible_parameters
    metrics: tuple[MetricKind, ...]
    guarantees: tuple[Mapping[str, Any], ...] = ()
    batches: tuple[PublishedBatch, ...] = ()
    tallied: Tallied | None = None

    @property
    def key(self) -> str:
        """What batches must agree in to be of one cell."""
        return _canonical([self.setting, self.attack, self.version, self.model["fingerprint"]])

    @property
    def batch_size(self) -> int:
        return int(self.setting.get("batch_size", 1))

    @property
    def keys(self) -> frozenset[tuple[tuple[int, ...], int]]:
        """All batches, whichever way they are kept."""
        kept = self.tallied.keys if self.tallied else frozenset()
        return kept.union(batch.key for batch in self.batches)

    @property
    def examples(self) -> int:
        return len(self.keys) * self.batch_size

    @property
    def sources(self) -> list[Source]:
        """Audits that something is left of, the newest last."""
        every = [batch.source for batch in self.batches]
        every += self.tallied.sources if self.tallied else ()
        return in_order(every)


@dataclass(frozen=True)
class Published:
    """What is known of one study."""

    study: str
    cells: tuple[PublishedCell, ...] = field(default=())


def add_up(parts: Sequence[Published]) -> Published:
    """All that is known of one study: batches of one key once, the newest of them; cells in one
    order, whatever the parts' is."""
    names = sorted({part.study for part in parts})
    if len(names) != 1:
        raise RecordError(
            f"These are results of several studies: {', '.join(names)}. Add up those of one study"
            " at a time."
        )
    groups: dict[str, list[PublishedCell]] = {}
    for part in parts:
        for cell in part.cells:
            groups.setdefault(cell.key, []).append(cell)
    return Published(names[0], tuple(_join(groups[key]) for key in sorted(groups)))


def _join(cells: Sequence[PublishedCell]) -> PublishedCell:
    """The batches of all; what is said of the cell as a whole is the newest's."""
    ordered = sorted(
        cells,
        key=lambda cell: (bool(cell.axes), cell.sources[-1].order, _canonical(dict(cell.axes))),
    )
    sums = _join_tallies([cell.tallied for cell in cells if cell.tallied is not None])
    batches = sorted(chain(*(cell.batches for cell in cells)), key=lambda one: one.source.order)
    newest = {batch.key: batch for batch in batches if sums is None or batch.key not in sums.keys}
    cell = replace(
        ordered[-1],
        metrics=tuple({kind.name: kind for cell in ordered for kind in cell.metrics}.values()),
        batches=tuple(
            sorted(newest.values(), key=lambda batch: (batch.draw, batch.place, batch.rows))
        ),
        tallied=sums,
    )
    if not cell.batches or (sums is None and cell.examples < TALLIED_FROM):
        return cell
    whole = _tally_cell(cell)
    return replace(cell, batches=(), tallied=whole if sums is None else _sum(sums, whole))


def _join_tallies(parts: Sequence[Tallied]) -> Tallied | None:
    """Sums of sums. What shares a batch with others cannot be taken apart again: of those the
    one with most batches stays."""
    whole: Tallied | None = None
    for part in sorted(parts, key=lambda one: (len(one.keys), one.sources[-1].order), reverse=True):
        if whole is None or not whole.keys & part.keys:
            whole = part if whole is None else _sum(whole, part)
    return whole


def _sum(one: Tallied, other: Tallied) -> Tallied:
    return Tallied(
        keys=one.keys | other.keys,
        sources=tuple(in_order([*one.sources, *other.sources])),
        marks=Counter(one.marks) + Counter(other.marks),
        seconds=one.seconds + other.seconds,
        steps=one.steps + other.steps,
        values=add_all(one.values, other.values),
        blind=add_all(one.blind, other.blind),
        noise=add(one.noise, other.noise),
    )


def _tally_cell(cell: PublishedCell) -> Tallied:
    batches, pairs = cell.batches, against_blind(cell)
    clusters = [batch.rows for batch in batches for _ in batch.rows]
    names = [kind.name for kind in cell.metrics]
    values, blind = (
        {name: tally(cell_column(cell, name, blind=of), clusters) for name in names}
        for of in (False, True)
    )
    if pairs is not None:
        blind[GAIN] = tally([a - b for a, b in zip(*pairs, strict=True)], clusters)
    return Tallied(
        keys=frozenset(batch.key for batch in batches),
        sources=tuple(cell.sources),
        marks=Counter(int(batch.marks) for batch in batches),
        seconds=sum(batch.seconds for batch in batches),
        steps=sum(batch.steps for batch in batches),
        values=values,
        blind=blind,
        noise=tally([batch.noise for batch in batches], [batch.rows for batch in batches]),
    )


def cell_column(cell: PublishedCell, metric: str, *, blind: bool = False) -> list[float | None]:
    """One value an example, in the order of the batches."""
    column: list[float | None] = []
    for batch in cell.batches:
        column += (batch.blind if blind else batch.values).get(metric) or (None,) * len(batch.rows)
    return column


def against_blind(cell: PublishedCell) -> tuple[list[float], list[float]] | None:
    """The leading metric, ours and the blind guess's, the one that leaks more first; none where
    there is no such metric."""
    leading = next((kind for kind in cell.metrics if kind.name in LEADING), None)
    if leading is None:
        return None
    ours, theirs = (
        [value or 0.0 for value in cell_column(cell, leading.name, blind=blind)]
        for blind in (False, True)
    )
    return (ours, theirs) if leading.direction == "higher" else (theirs, ours)


def pack(published: Published) -> bytes:
    """The file: the same bytes for the same results."""
    whole = add_up([published])
    numbers = _Numbers(whole.cells)
    plain = {
        "form": FORM,
        "study": whole.study,
        "numbers": numbers.known,
        "cells": [_write_cell(cell, numbers) for cell in whole.cells],
    }
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def read_published(path: Path) -> Published:
    """What a published file holds; another form, or half a file, is refused in a sentence."""
    try:
        plain = json.loads(lzma.decompress(path.read_bytes()).decode())
    except OSError as error:
        raise RecordError(
            f"Cannot read {path}: {error.strerror}. Name a file that gradleak publish wrote."
        ) from error
    except (lzma.LZMAError, EOFError, ValueError) as error:
        raise RecordError(
            f"{path} is no whole file of published results ({error}). Publish its runs again."
        ) from error
    form = plain.get("form") if isinstance(plain, dict) else None
    if form != FORM:
        raise RecordError(
            f"{path} has the form {form!r}; this gradleak reads {FORM}. Use the one that wrote it,"
            " or a later one."
        )
    try:
        return Published(
            plain["study"],
            tuple(_read_cell(cell, plain["numbers"]) for cell in plain["cells"]),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RecordError(
            f"{path} is not as {FORM} is written ({type(error).__name__}: {error}). Publish its"
            " runs again."
        ) from error


def _write_cell(cell: PublishedCell, numbers: "_Numbers") -> dict[str, Any]:
    sources, batches = cell.sources, cell.batches
    plain: dict[str, Any] = {
        "axes": dict(cell.axes),
        "setting": cell.setting,
        "attack": cell.attack,
        "version": cell.version,
        "knowledge": list(cell.knowledge),
        "model": cell.model,
        "metrics": [[kind.name, kind.unit, kind.direction] for kind in cell.metrics],
        "guarantees": list(cell.guarantees),
        "sources": to_plain(sources),
    }
    if cell.tallied is not None:
        return plain | {"tallied": _write_tallied(cell.tallied)}
    number = {source.order: place for place, source in enumerate(sources)}
    names = [kind.name for kind in cell.metrics]
    return plain | {
        "batches": {
            "rows": [row for batch in batches for row in batch.rows],
            "places": [batch.place for batch in batches],
            "draws": [batch.draw for batch in batches],
            "sources": [number[batch.source.order] for batch in batches],
            "marks": [int(batch.marks) for batch in batches],
            "seconds": [batch.seconds for batch in batches],
            "steps": [batch.steps for batch in batches],
            "noise": [batch.noise for batch in batches],
            "values": {name: numbers.index(cell_column(cell, name)) for name in names},
            "blind": {name: numbers.index(cell_column(cell, name, blind=True)) for name in names},
        }
    }


def _read_cell(plain: Mapping[str, Any], numbers: Sequence[float | None]) -> PublishedCell:
    sources = from_plain(list[Source], plain["sources"], "sources")
    cell = PublishedCell(
        axes=plain["axes"],
        setting=plain["setting"],
        attack=plain["attack"],
        version=plain["version"],
        knowledge=tuple(plain["knowledge"]),
        model=plain["model"],
        metrics=tuple(MetricKind(*kind) for kind in plain["metrics"]),
        guarantees=tuple(plain["guarantees"]),
    )
    if "tallied" in plain:
        return replace(cell, tallied=_read_tallied(plain["tallied"], sources, cell.batch_size))
    return replace(
        cell, batches=tuple(_batches(plain["batches"], numbers, sources, cell.batch_size))
    )


def _batches(
    plain: Mapping[str, Any], known: Sequence[float | None], sources: Sequence[Source], size: int
) -> Iterable[PublishedBatch]:
    def part(
        columns: Mapping[str, Sequence[int]], number: int
    ) -> dict[str, tuple[float | None, ...]]:
        return {
            name: tuple(known[at] for at in column[number * size : (number + 1) * size])
            for name, column in columns.items()
        }

    for number, place in enumerate(plain["places"]):
        yield PublishedBatch(
            rows=tuple(plain["rows"][number * size : (number + 1) * size]),
            place=place,
            draw=plain["draws"][number],
            source=sources[plain["sources"][number]],
            marks=Mark(plain["marks"][number]),
            seconds=plain["seconds"][number],
            steps=plain["steps"][number],
            values=part(plain["values"], number),
            blind=part(plain["blind"], number),
            noise=plain["noise"][number],
        )


def _write_tallied(whole: Tallied) -> dict[str, Any]:
    keys = sorted(whole.keys, key=lambda key: (key[1], key[0]))
    return {
        "rows": [row for rows, _ in keys for row in rows],
        "draws": [draw for _, draw in keys],
        "marks": [[marks, whole.marks[marks]] for marks in sorted(whole.marks)],
        "seconds": whole.seconds,
        "steps": whole.steps,
        "values": to_plain(whole.values),
        "blind": to_plain(whole.blind),
        "noise": to_plain(whole.noise),
    }


def _read_tallied(plain: Mapping[str, Any], sources: Sequence[Source], size: int) -> Tallied:
    rows = [
        tuple(plain["rows"][start : start + size]) for start in range(0, len(plain["rows"]), size)
    ]
    return Tallied(
        keys=frozenset(zip(rows, plain["draws"], strict=True)),
        sources=tuple(sources),
        marks=dict(plain["marks"]),
        seconds=plain["seconds"],
        steps=plain["steps"],
        values=from_plain(dict[str, Tally | None], plain["values"], "values"),
        blind=from_plain(dict[str, Tally | None], plain["blind"], "blind"),
        noise=from_plain(Tally | None, plain["noise"], "noise"),
    )


class _Numbers:
    """All different scores of a file once, in full and sorted; cells name them by their places,
    which packs to a byte or two."""

    def __init__(self, cells: Iterable[PublishedCell]) -> None:
        there = {
            value
            for cell in cells
            for batch in cell.batches
            for columns in (batch.values, batch.blind)
            for column in columns.values()
            for value in column
            if value is not None
        }
        self.known: list[float | None] = [None, *sorted(there)]
        self._places = {value: place for place, value in enumerate(self.known)}

    def index(self, column: Sequence[float | None]) -> list[int]:
        return [self._places[value] for value in column]


def _canonical(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
