"""`gradleak report` from a real audit: its forms, its secrets, and that it can be reproduced."""

import json
from pathlib import Path

import pytest

from gradleak.cli import main
from gradleak.records.store import record_paths
from gradleak.study.cells import read_study

WORDS = (
    "audit --target tiny --attack tag:steps=3 --attack dlg:steps=3 --limit 2 --device cpu".split()
)
SECRET = "the doctor saw my heart"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two audits of one client, by different attacks, on private data."""
    folder = tmp_path_factory.mktemp("report")
    data = folder / "notes.csv"
    data.write_text(f"text,label\n{SECRET},1\nmy code is 4471,0\n")
    assert main([*WORDS, "--data", str(data), "--out", str(folder / "run")]) == 0
    blind = [
        "audit",
        "--target",
        "tiny",
        "--attack",
        "blind",
        "--limit",
        "2",
        "--device",
        "cpu",
        "--data",
        str(data),
    ]
    assert main([*blind, "--out", str(folder / "run")]) == 0
    return folder / "run"


def plain(run: Path, *words: str) -> dict[str, object]:
    assert main(["report", str(run), "--format", "json", *words]) == 0
    found: dict[str, object] = json.loads((run / "report.json").read_text(encoding="utf-8"))
    return found


def test_secrets_are_read_again_from_the_data_and_shown_on_request_only(run: Path) -> None:
    for form, name in (("html", "report.html"), ("markdown", "report.md"), ("json", "report.json")):
        assert main(["report", str(run), "--format", form]) == 0
        assert "heart" not in (run / name).read_text(encoding="utf-8")
        assert main(["report", str(run), "--format", form, "--show-secrets"]) == 0
        assert SECRET in (run / name).read_text(encoding="utf-8")


def test_what_it_says_to_run_again_are_the_very_audits(run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.yaml"
    again.write_text(str(plain(run)["reproduce"]))
    assert {cell.spec.id for cell in read_study(again).cells} == {
        path.stem for path in record_paths(run)
    }


def test_without_the_key_no_text_can_be_checked_and_none_is_shown(run: Path) -> None:
    key = run / "keys" / "secrets.key"
    aside = key.rename(key.with_suffix(".aside"))
    try:
        assert SECRET not in json.dumps(plain(run, "--show-secrets"))
    finally:
        aside.rename(key)


def test_bad_input_is_a_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), "--format", "docx"]) == 2
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("Error: ") == 3
