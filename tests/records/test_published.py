"""Published results: rows add up once, versions stay apart, and of very many rows the sums give
the same means."""

import json
import lzma
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradleak.records.files import RecordError
from gradleak.records.published import (
    FORM,
    Mark,
    MetricKind,
    Published,
    PublishedBatch,
    PublishedCell,
    Source,
    add_up,
    pack,
    read_published,
)
from gradleak.records.published_summaries import read_sources, summaries_of
from gradleak.records.schema import AttackRecord, Record
from gradleak.records.statistics import interval, tally

OLD = Source(
    "2026-01-01T00:00:00+00:00",
    {"name": "one GPU"},
    {"torch": "2.0"},
    ("search_failed", "generous_knowledge"),
)
NEW = replace(
    OLD,
    created="2026-02-01T00:00:00+00:00",
    machine={"name": "another GPU"},
    flags=("generous_knowledge",),
)
KINDS = (
    MetricKind("rouge1", "fraction", "higher"),
    MetricKind("exact_match", "fraction", "higher"),
)
RANDOM = np.random.default_rng(0)


def batch(
    row: int, value: float = 0.5, source: Source = OLD, marks: Mark = Mark.COMPARED, size: int = 1
) -> PublishedBatch:
    exact = tuple(float(value == 1) for _ in range(size))
    values, blind = (
        {"rouge1": (value,) * size, "exact_match": exact},
        {"rouge1": (0.1,) * size, "exact_match": (0.0,) * size},
    )
    return PublishedBatch(
        tuple(range(row * size, (row + 1) * size)),
        row * size,
        0,
        source,
        marks,
        0.5,
        3,
        values,
        blind,
    )


def cell(
    batches: Sequence[PublishedBatch], version: int = 1, seed: int = 0, size: int = 1
) -> PublishedCell:
    setting = {
        "target": {"name": "tiny"},
        "data": {"name": "cola", "split": "train"},
        "batch_size": size,
        "seed": seed,
    }
    model = {"name": "tiny", "fingerprint": "ff00", "parameters": 10, "visible_parameters": 5}
    return PublishedCell(
        {"attacks": "tag"},
        setting,
        {"name": "tag", "steps": 3},
        version,
        ("labels",),
        model,
        KINDS,
        (),
        tuple(batches),
    )


def some(*cells: PublishedCell) -> Published:
    return Published("study", cells)


def record(published: Published) -> Record:
    (summary,) = summaries_of(published, Path("published.xz"))
    return summary.record


def attack(published: Published) -> AttackRecord:
    return record(published).attacks["tag"]


def test_rows_add_up_once_and_the_newest_of_equals_stays() -> None:
    first, second = (
        some(cell([batch(0, 0.2), batch(1, 0.4)])),
        some(cell([batch(1, 0.8, NEW), batch(2, 0.6, NEW)])),
    )
    for parts in ([first, second], [second, first], [first, second, first]):
        whole = add_up(parts)
        (one,) = whole.cells
        assert [(each.rows, each.values["rouge1"]) for each in one.batches] == [
            ((0,), (0.2,)),
            ((1,), (0.8,)),
            ((2,), (0.6,)),
        ]
        assert pack(whole) == pack(add_up([first, second]))
        assert (
            attack(whole).cost.seconds == 1.5
            and record(whole).data.examples == 3
            and record(whole).spec["limit"] == 3
        )
        assert record(whole).machine["name"] == "another GPU and one GPU"


def test_settings_models_and_versions_stay_apart() -> None:
    other_model = replace(cell([batch(1)]), model={**cell([]).model, "fingerprint": "0000"})
    whole = add_up(
        [
            some(cell([batch(0)])),
            some(cell([batch(1)], version=2), cell([batch(1)], seed=1), other_model),
        ]
    )
    assert len(whole.cells) == 4 and {one.version for one in whole.cells} == {1, 2}
    with pytest.raises(RecordError, match="several studies: another, study"):
        add_up([some(), Published("another")])


def test_a_file_gives_back_what_was_packed_in_the_same_bytes(tmp_path: Path) -> None:
    value = 1 / 3
    noisy = replace(
        batch(2, value, NEW, Mark.COMPARED | Mark.DEAD),
        noise=0.25,
        blind={"rouge1": (None,), "exact_match": (0.0,)},
    )
    published = some(cell([batch(0, 1.0), noisy]))
    path = tmp_path / "published.xz"
    path.write_bytes(pack(published))
    assert read_published(path) == published and pack(read_published(path)) == path.read_bytes()
    assert record(read_published(path)).noise is not None
    (again,) = read_sources([path, path])  # the same file twice counts once
    assert not again.details and again.record.data.examples == 2


def test_the_first_form_is_read_for_good(tmp_path: Path) -> None:
    """As files were first written, to the letter: whatever changes in records, these must go on
    to be read."""
    sums = {
        "n": 2,
        "clusters": 2,
        "total": 1.0,
        "squares": 1.0,
        "products": 1.0,
        "sizes": 2.0,
        "yes_or_no": True,
    }
    sums |= {"low": 0.0, "high": 1.0, "bins": [1] + [0] * 198 + [1]}
    source = {
        "created": "2026-01-01T00:00:00+00:00",
        "machine": {"name": "a GPU"},
        "versions": {},
        "flags": [],
    }
    shared = {
        "axes": {"attacks": "tag"},
        "setting": {
            "target": {"name": "tiny"},
            "data": {"name": "cola", "split": "train"},
            "batch_size": 1,
            "seed": 0,
        },
        "attack": {"name": "tag", "steps": 3},
        "knowledge": ["labels"],
        "model": {"name": "tiny", "fingerprint": "ff00", "parameters": 10, "visible_parameters": 5},
        "metrics": [["rouge1", "fraction", "higher"]],
        "guarantees": [],
        "sources": [source],
    }
    batches = {
        "rows": [7, 3],
        "places": [0, 1],
        "draws": [0, 0],
        "sources": [0, 0],
        "marks": [1, 3],
        "seconds": [0.5, 1.5],
    }
    batches |= {
        "steps": [3, 3],
        "noise": [None, None],
        "values": {"rouge1": [2, 1]},
        "blind": {"rouge1": [1, 0]},
    }
    tallied = {
        "rows": [7, 3],
        "draws": [0, 0],
        "marks": [[1, 2]],
        "seconds": 2.0,
        "steps": 6,
        "noise": None,
    }
    tallied |= {"values": {"rouge1": sums}, "blind": {"rouge1": None, "gain": None}}
    cells = [
        {**shared, "version": 1, "batches": batches},
        {**shared, "version": 2, "tallied": tallied},
    ]
    plain = {
        "form": "gradleak.published/1",
        "study": "study",
        "numbers": [None, 0.0, 0.5],
        "cells": cells,
    }
    path = tmp_path / "published.xz"
    path.write_bytes(lzma.compress(json.dumps(plain).encode()))
    first, second = (summary.record for summary in read_sources([path]))
    assert (
        first.attacks["tag"].scores["rouge1"].mean == 0.25
        and first.attacks["tag"].scores["rouge1"].blind == 0
    )
    assert second.attacks["tag"].scores["rouge1"].mean == 0.5 and second.attacks["tag"].version == 2
    assert first.attacks["tag"].cost.seconds == second.attacks["tag"].cost.seconds == 2
    assert [batch.rows for batch in read_published(path).cells[0].batches] == [(7,), (3,)]


def test_unknown_forms_and_broken_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "published.xz"
    with pytest.raises(RecordError, match="Cannot read"):
        read_published(path)
    path.write_bytes(lzma.compress(json.dumps({"form": "gradleak.published/99"}).encode()))
    with pytest.raises(RecordError, match=rf"'gradleak.published/99'; this gradleak reads {FORM}"):
        read_published(path)
    path.write_bytes(
        lzma.compress(json.dumps({"form": FORM, "study": "s", "cells": [{}]}).encode())
    )
    with pytest.raises(RecordError, match="not as gradleak.published/1 is written"):
        read_published(path)
    path.write_bytes(pack(some(cell([batch(0)])))[:-20])
    with pytest.raises(RecordError, match="no whole file"):
        read_published(path)


def test_flags_hold_of_all_batches_together() -> None:
    failed = [batch(row, source=OLD, marks=Mark.COMPARED | Mark.SEARCH_FAILED) for row in range(2)]
    fine = [batch(row, 0.9, source=NEW) for row in range(2, 30)]
    names = [flag.name for flag in attack(add_up([some(cell(failed)), some(cell(fine))])).flags]
    assert names == ["generous_knowledge"]  # 2 of 30 searches failed, and 30 examples are enough
    few = [flag.name for flag in attack(some(cell(failed))).flags]
    # Two examples prove no gain
    assert few == ["search_failed", "few_examples", "generous_knowledge", "near_chance"]
    lost = [batch(row, 0.1) for row in range(30)]
    assert "near_chance" in [flag.name for flag in attack(some(cell(lost))).flags]
    rebuilt = [*lost[1:], batch(0, 0.1, marks=Mark.BEYOND_LUCK)]
    assert "near_chance" not in [flag.name for flag in attack(some(cell(rebuilt))).flags]


@pytest.mark.parametrize("size", [1, 4])
def test_of_a_thousand_examples_sums_give_the_same_means_and_intervals(
    size: int, tmp_path: Path
) -> None:
    values = [float(value) for value in RANDOM.choice([0.25, 0.5, 1.0], 1200 // size)]
    batches = [batch(row, value, size=size) for row, value in enumerate(values)]
    single = attack(some(cell(batches, size=size))).scores  # example by example
    parts = [
        some(cell(batches[:100], size=size)),
        some(cell(batches[100:], size=size)),
        some(cell(batches[:250], size=size)),
    ]
    path = tmp_path / "published.xz"
    path.write_bytes(pack(add_up(parts)))
    (one,) = read_published(path).cells
    assert not one.batches and one.examples == 1200
    found = attack(some(one)).scores
    for name, wanted in single.items():
        assert found[name].n == wanted.n == 1200
        assert found[name].mean == pytest.approx(wanted.mean) and found[
            name
        ].blind == pytest.approx(wanted.blind)
        assert found[name].low == pytest.approx(wanted.low, abs=3e-3) and found[
            name
        ].high == pytest.approx(wanted.high, abs=3e-3)
    if size == 1:
        # Clopper-Pearson's in both
        assert found["exact_match"].low == pytest.approx(single["exact_match"].low)
    later = add_up(
        [
            some(one),
            some(
                cell([batch(0, 0.5, NEW, size=size), batch(5000, 0.5, NEW, size=size)], size=size)
            ),
        ]
    )
    assert later.cells[0].examples == 1200 + size  # what is in the sums is not counted again
    assert sum(later.cells[0].tallied.values["rouge1"].bins) == 1200 + size  # type: ignore[union-attr]


def test_sums_that_share_rows_are_not_added_and_others_are() -> None:
    many = [batch(row, float(row % 2)) for row in range(2500)]
    first, second, both = (
        add_up([some(cell(part))]) for part in (many[:1200], many[1200:], many[1000:2400])
    )
    assert add_up([first, second]).cells[0].examples == 2500
    assert add_up([first, both]).cells[0].examples == 1400  # the larger: they cannot be taken apart
    assert attack(add_up([first, second])).scores["exact_match"].mean == pytest.approx(0.5)


def test_a_tally_of_numbers_that_are_no_fractions_keeps_its_mean_and_its_spread() -> None:
    values = [float(value) for value in RANDOM.normal(20, 3, 1000)]
    found = tally(values, range(1000))
    assert found is not None and sum(found.bins) == 1000
    wanted, ours = interval(values), found.interval()
    assert ours.mean == pytest.approx(wanted.mean) and ours.low == pytest.approx(
        wanted.low, abs=0.02
    )
    assert tally([None], [0]) is None
