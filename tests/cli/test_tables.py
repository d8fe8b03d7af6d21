"""`gradleak tables --spec`: a study's results as files that can be published."""

from pathlib import Path

import pytest

from gradleak.cli import main

STUDY = (
    "target: tiny\ndata: canaries\nattacks: [blind, 'tag:steps=2']\nlimit: 2\nmetrics: [rouge1,"
    " exact_match]\n"
)
Captured = pytest.CaptureFixture[str]


def test_a_run_becomes_pages_with_what_was_run_and_what_was_not(
    tmp_path: Path, capsys: Captured
) -> None:
    study, out = tmp_path / "two.yaml", tmp_path / "results"
    study.write_text(STUDY)
    assert (
        main(
            [
                "run",
                str(study),
                "--only",
                "attacks=tag*",
                "--out",
                str(tmp_path / "runs"),
                "--device",
                "cpu",
            ]
        )
        == 0
    )
    assert (
        main(
            [
                "tables",
                str(tmp_path / "runs" / "two"),
                "--spec",
                str(study),
                "--examples",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    page = (out / "results.md").read_text()
    assert "`gradleak run studies/two.yaml`: 1 of the lines below" in page
    assert "| tag:steps=2 | A | 2 |" in page and "| blind |  |  | not run |" in page
    assert "gradleak run studies/two.yaml --only attacks=blind" in page
    # canaries: their guesses may be shown
    assert "Secret 1: " in page and "| tag:steps=2 | answer |" in page
    assert len((out / "examples.csv").read_text().splitlines()) == 3
    assert str(tmp_path) not in page + (out / "results.csv").read_text()


def test_options_about_a_study_need_one(tmp_path: Path, capsys: Captured) -> None:
    assert main(["tables", str(tmp_path), "--set", "limit=3"]) == 2
    assert "--spec" in capsys.readouterr().err
    assert main(["tables", str(tmp_path), "--spec", str(tmp_path / "none.yaml")]) == 2
