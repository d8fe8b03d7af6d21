"""Fields of a study may be replaced on the command line."""

from pathlib import Path

import pytest

from gradleak.core.errors import GradleakError
from gradleak.study.cells import read_study


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text("target: tiny\nlimit: 5\nattacks: [blind, tag]\n")
    return path


def test_a_change_replaces_a_field_or_an_axis(study: Path) -> None:
    cells = read_study(study, ["limit=2", "attacks=[dlg]"]).cells
    assert [(cell.spec.limit, cell.spec.attacks[0].name) for cell in cells] == [(2, "dlg")]


def test_a_change_holds_in_every_case_too(study: Path) -> None:
    study.write_text(
        "target: tiny\ncases:\n  few: {limit: 5, attacks: tag}\n  many: {seed: 1, attacks: tag}\n"
    )
    cells = read_study(study, ["limit=2", "attacks=dlg"]).cells
    assert [(cell.spec.limit, cell.spec.seed, cell.spec.attacks[0].name) for cell in cells] == [
        (2, 0, "dlg"),
        (2, 1, "dlg"),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("limit", "write --set field=value"),
        ("limt=2", "limt"),
        ("limit=[", "Cannot read the value"),
    ],
)
def test_a_bad_change_is_refused(change: str, message: str, study: Path) -> None:
    with pytest.raises(GradleakError, match=message):
        read_study(study, [change])
