"""`gradleak audit --capture`: guesses of captured updates, with or without the truth."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gradleak
from gradleak.cli import main
from gradleak.records.store import read_record
from gradleak.targets.tiny import Tiny

TEXTS = ["she gave her friend a red book", "the bank never paid him"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, two captured updates of it, and the texts behind them."""
    place = tmp_path_factory.mktemp("captured")
    target: Any = Tiny(hidden=64, heads=4).open(torch.device("cpu"))
    model, tokenizer = target.module.requires_grad_(), target.tokenizer
    model.save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    rows = []
    for number, text in enumerate(TEXTS):
        model.zero_grad()
        with gradleak.capture(
            model, place / "updates" / f"{number}.safetensors", know=["batch_size"], round=number
        ):
            model(
                **tokenizer([text], return_tensors="pt"), labels=torch.tensor([1])
            ).loss.backward()
        rows.append(json.dumps({"text": text, "label": 1}))
    (place / "truth.jsonl").write_text("\n".join(rows) + "\n")
    return place


def test_without_the_truth_it_says_what_is_explained_and_withholds_the_texts(
    folder: Path, capsys: Captured
) -> None:
    words = ["audit", "--capture", str(folder / "updates" / "0.safetensors")]
    words += ["--model", str(folder / "model"), "--attack", "span"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "1 text rebuilt by span, 1 proven" in out and "It explains 100.0% of the update" in out
    assert "withheld" in out and TEXTS[0] not in out
    assert main([*words, "--show"]) == 0
    assert TEXTS[0] in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["certified"] for one in found["guesses"]] == [True]
    assert "text" not in found["guesses"][0]


def test_with_the_truth_a_folder_of_captures_gives_a_record(
    folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    words = ["audit", "--capture", str(folder / "updates"), "--model", str(folder / "model")]
    words += ["--truth", str(folder / "truth.jsonl"), "--attack", "span", "--out", str(tmp_path)]
    assert main(words) == 0
    assert TEXTS[0] not in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    record = read_record(path)
    assert record.data.batches == 2 and record.worst_case["exact_match"].mean == 1
    assert main(["gate", str(tmp_path), "--max", "exact_match=0.5"]) != 0
    assert main(["show", str(path)]) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch-size", "2"], "--batch-size does not go with --capture"),
        (["--defense", "sign"], "--defense does not go with --capture"),
        (["--model", "tiny:hidden=64,heads=4,seed=1"], "computed at other weights"),
        (["--attack", "lti_p"], "lti_p learns first"),
        (["--capture", "nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
def test_what_does_not_go_with_a_capture_is_refused(
    folder: Path, more: list[str], message: str, capsys: Captured
) -> None:
    words = ["audit", "--capture", str(folder / "updates" / "0.safetensors")]
    assert main([*words, "--model", str(folder / "model"), *more]) == 2
    assert message in capsys.readouterr().err


def test_the_truth_is_of_a_capture(folder: Path, capsys: Captured) -> None:
    assert main(["audit", "--truth", str(folder / "truth.jsonl")]) == 2
    assert "--truth goes with --capture" in capsys.readouterr().err
