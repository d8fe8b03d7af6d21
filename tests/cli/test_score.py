"""Metrics added to stored guesses are those an audit would have found, and nothing is attacked
again."""

from pathlib import Path

import pytest

from gradleak.attacks.recipes.baselines import Tag
from gradleak.cli import main
from gradleak.core.errors import GradleakError
from gradleak.records.store import read_record, record_paths

AUDIT = "audit --target tiny --attack tag:steps=3 --limit 2 --batch-size 2 --device cpu".split()
Captured = pytest.CaptureFixture[str]


def test_added_metrics_equal_those_of_a_whole_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    few, all_of_them = tmp_path / "few", tmp_path / "all"
    assert main([*AUDIT, "--metric", "rouge1", "--out", str(few)]) == 0
    wanted = ["--metric", "rouge1", "--metric", "secret_recall", "--metric", "rouge2_legacy"]
    assert main([*AUDIT, *wanted, "--out", str(all_of_them)]) == 0

    def no_attack(*_: object) -> None:
        raise AssertionError("attacked again")

    monkeypatch.setattr(Tag, "reconstruct", no_attack)
    (path,) = record_paths(few)
    before = read_record(path)
    capsys.readouterr()
    assert main(["score", str(few), "--device", "cpu", *wanted]) == 0
    assert "secret_recall" in capsys.readouterr().out
    scored, whole = read_record(path), read_record(record_paths(all_of_them)[0])
    assert scored.id == before.id
    assert scored.worst_case == whole.worst_case
    assert scored.attacks["tag"].scores == whole.attacks["tag"].scores
    values = [
        [example.values for example in one.attacks["tag"].examples] for one in (scored, whole)
    ]
    assert values[0] == values[1]


def test_data_that_has_changed_is_refused(tmp_path: Path, capsys: Captured) -> None:
    data = tmp_path / "notes.csv"
    data.write_text("text,label\nmy heart is weak,1\n")
    words = [
        "audit",
        "--target",
        "tiny",
        "--attack",
        "blind",
        "--limit",
        "1",
        "--data",
        str(data),
        "--device",
        "cpu",
    ]
    assert main([*words, "--metric", "rouge1", "--out", str(tmp_path / "run")]) == 0
    data.write_text("text,label\nmy heart is strong,1\n")
    assert main(["score", str(tmp_path / "run"), "--metric", "rouge2"]) == 2
    assert "are not at hand" in capsys.readouterr().err
    assert main(["score", str(tmp_path / "run")]) == 2


def test_guessed_pictures_are_scored_as_an_audit_would(tmp_path: Path) -> None:
    few, both = tmp_path / "few", tmp_path / "both"
    words = (
        "audit --target tiny_image --data shapes:side=8 --attack ig:steps=3 --limit 2 --batch-size"
        " 2 --device cpu".split()
    )
    assert main([*words, "--metric", "mse", "--out", str(few)]) == 0
    assert main([*words, "--metric", "mse", "--metric", "psnr", "--out", str(both)]) == 0
    assert main(["score", str(few), "--device", "cpu", "--metric", "psnr"]) == 0
    scored, whole = (read_record(record_paths(folder)[0]) for folder in (few, both))
    assert scored.attacks["ig"].scores == whole.attacks["ig"].scores
    assert scored.worst_case == whole.worst_case


def test_pictures_are_scored_without_the_generator_and_the_blind_guess_is_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    words = (
        "audit --target tiny_image --data shapes:side=8 --attack ig:steps=3 --limit 2 --device cpu"
        " --metric mse".split()
    )
    assert main([*words, "--out", str(tmp_path)]) == 0

    def gone(*_: object) -> None:
        raise GradleakError("There is no generator.")

    monkeypatch.setattr("gradleak.audit.rescoring.open_prior", gone)
    assert main(["score", str(tmp_path), "--device", "cpu", "--metric", "psnr"]) == 0
    said = capsys.readouterr().out
    assert (
        "blind -" in said and "The blind guess is not scored anew. There is no generator." in said
    )
    score = read_record(record_paths(tmp_path)[0]).attacks["ig"].scores["psnr"]
    assert score.mean is not None and score.blind is None
    before = read_record(record_paths(tmp_path)[0])
    assert main(["score", str(tmp_path), "--device", "cpu", "--metric", "mse"]) == 0
    # What is stored of the blind guess stays
    assert read_record(record_paths(tmp_path)[0]) == before
