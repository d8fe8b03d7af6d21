"""Several processes give the records of one."""

from pathlib import Path

import pytest

from gradleak.core.attack import Silent
from gradleak.records.store import read_record
from gradleak.study.cells import read_study
from gradleak.study.engine import run_on

GRID = (
    "target: tiny\nattacks: ['tag:steps=3', blind]\nseed: [0, 1]\nlimit: 1\nmetrics: [rouge1,"
    " exact_match]\n"
)


@pytest.mark.long  # each process imports torch
def test_two_processes_give_the_records_of_one(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(GRID)
    cells = read_study(path).cells
    one = run_on(["cpu"], 1, cells, tmp_path / "one", Silent(), retry=True)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / f"{cells[0].spec.id}.failed.txt").write_text("of before")
    two = run_on(["cpu"], 2, cells, tmp_path / "two", Silent(), retry=True)
    assert [result.skipped for result in two] == [True] * len(cells)  # the workers did them all
    for ours, theirs in zip(one, two, strict=True):
        assert ours.record is not None and theirs.record is not None
        assert ours.record.worst_case == theirs.record.worst_case
        for key, attack in ours.record.attacks.items():
            assert (
                attack.examples
                == read_record(tmp_path / "two" / f"{ours.record.id}.json").attacks[key].examples
            )
