"""A file as clients have it, audited with one command: names as labels, semicolons, latin-1,
empty rows, long texts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.cli import main
from gradleak.records.store import read_record
from gradleak.targets.tiny import Tiny

ROWS = [
    "note;mood",
    "my d\xe9ar cat is red;calm",
    "the dog was bad;Angry",
    ";",
    "",
    " ;glad",
    "the door is green;",
    "please call me soon;glad",
    "my cat is red and " * 60 + ";calm",
]
FIELDS = ":text=note,label=mood"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a classifier that names its classes, and notes."""
    target = Tiny(classes=3).open(torch.device("cpu"))
    names = {"Angry": 0, "calm": 1, "glad": 2}
    target.module.config.label2id, target.module.config.id2label = (
        names,
        {number: name for name, number in names.items()},
    )
    target.module.save_pretrained(tmp_path / "clf")
    target.tokenizer.save_pretrained(tmp_path / "clf")
    (tmp_path / "notes.csv").write_bytes("\n".join(ROWS).encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def audit(*flags: str, data: str = f"notes.csv{FIELDS}", target: str = "./clf") -> int:
    return main(
        ["audit", "--target", target, "--data", data, "--attack", "blind", "--limit", "4", *flags]
    )


def record_in(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "runs").glob("*.json")
    found: dict[str, Any] = read_record(path).to_json()
    return found


def test_it_is_audited_with_one_command_and_what_was_done_is_said(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit("--skip-bad") == 0
    record, said = record_in(here), " ".join(capsys.readouterr().out.split())
    assert said.startswith(
        f"Audit {record['id']} of a sequence classifier (BertForSequenceClassification, 3 classes)"
    )
    assert (
        record["target"]["model"]
        == "sequence classifier (BertForSequenceClassification, 3 classes)"
    )
    assert (record["data"]["examples"], record["data"]["truncated"]) == (4, 1)
    assert [secret["tokens"] for secret in record["secrets"]][-1] == 128
    assert [secret["row"] for secret in record["secrets"]] == [0, 1, 6, 7]
    for remark, words in zip(
        record["data"]["remarks"],
        (
            "cp1252",
            "semicolon",
            "4 of 8 rows cannot be used and were left out: lines 4 and 5",
            "1 of 4 texts",
        ),
        strict=True,
    ):
        assert words in remark and remark in said
    assert main(["report", "runs", "--format", "markdown", "--out", "page.md"]) == 0
    page = (here / "page.md").read_text()
    assert record["target"]["model"] in page and record["data"]["remarks"][-1] in page


def test_without_asking_nothing_is_left_out_and_every_bad_row_is_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit() == 2
    said = capsys.readouterr().err
    assert (
        "notes.csv: 4 of 8 rows cannot be used.\n  lines 4 and 5: the line is empty\n  line 6: the"
        " text is empty\n" in said
    )
    assert "Opening" not in said  # before the model is


def test_truncate_off_refuses_a_long_text_by_its_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit("--skip-bad", "--truncate", "off") == 2
    assert (
        "notes.csv, line 9 has 302 tokens and the model reads 128: shorten it"
        in capsys.readouterr().err
    )
    assert audit("--truncate", "maybe") == 2
    assert "truncate must be on or off, not 'maybe'" in capsys.readouterr().err


def test_labels_that_the_model_does_not_know_are_told_all_at_once(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit("--skip-bad", target="tiny:classes=3") == 2
    said = capsys.readouterr().err
    assert "notes.csv, line 2: label 'calm' is a name, and tiny has numbered classes only" in said
    assert "how often they are there: 'calm' (2), 'Angry' (1), 'glad' (1)." in said
    assert (
        audit(
            "--skip-bad",
            data=f"notes.csv{FIELDS},labels=[Angry,calm,glad]",
            target="tiny:classes=3",
        )
        == 0
    )


def test_a_mistyped_folder_is_found_by_check_too(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(target="./clff") == 2
    assert "There is no folder ./clff; did you mean ./clf?" in capsys.readouterr().err
    (here / "study.yaml").write_text("target: ./clff\nattacks: blind\n")
    assert main(["check", "study.yaml", "--seconds", "0"]) == 2
    told = capsys.readouterr()
    assert (
        "line 1: target: There is no folder ./clff; did you mean ./clf?" in told.err
        and "resolves" not in told.out
    )
    (here / "study.yaml").write_text("target: some/model\nattacks: blind\n")
    assert main(["check", "study.yaml", "--seconds", "0"]) == 0
    assert "Not looked up: some/model." in capsys.readouterr().out
