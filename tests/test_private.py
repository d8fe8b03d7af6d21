"""Private by default: who can read what a run leaves, what is printed, and what a purge leaves
of it."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gradleak.captures import (
    Capture,
    CaptureHeader,
    ModelFacts,
    ProtocolFacts,
    index_folder,
    write_capture,
)
from gradleak.cli import main
from gradleak.records.run_folder import claim
from gradleak.records.schema import Record, texts_of
from gradleak.records.store import open_key, read_record, read_summary, record_paths

CANARY = "doctor saw my heart at seven"
AUDIT = ["audit", "--target", "tiny", "--attack", "span", "--limit", "2", "--device", "cpu"]
STUDY = (
    "target: tiny\nattacks: [['tag:steps=2']]\nlimit: 1\ndata: {data}\ndefenses: [[],"
    " ['gaussian_noise:std=0.1']]\n"
)
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "notes.csv"
    path.write_text(f"text,label\n{CANARY},1\nmy code is 4471 and no other,0\n")
    return path


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def holding(folder: Path, words: str) -> list[Path]:
    """The files that hold these words anywhere, in any case."""
    return [path for path in files(folder) if words.encode().lower() in path.read_bytes().lower()]


def run_all(tmp_path: Path, data: Path, out: Path) -> None:
    """An audit that keeps its secrets, a study, and reports that show private texts."""
    assert main([*AUDIT, "--data", str(data), "--keep-secrets", "--out", str(out)]) == 0
    study = tmp_path / "noise.yaml"
    study.write_text(STUDY.format(data=data))
    assert main(["run", str(study), "--out", str(out), "--device", "cpu"]) == 0
    for form in ("html", "markdown", "json"):
        assert main(["report", str(out), "--format", form, "--show-secrets"]) == 0
    assert (
        main(["report", str(out), "--show-secrets", "--out", str(out / "for-the-board.html")]) == 0
    )


@pytest.mark.usefixtures("open_umask")
def test_all_that_a_run_leaves_is_its_owners_whatever_the_umask_and_a_purge_leaves_no_text(
    tmp_path: Path, data: Path, capsys: Captured
) -> None:
    out = tmp_path / "runs"
    run_all(tmp_path, data, out)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(out)} == {0o600}
    assert {
        stat.S_IMODE(path.stat().st_mode) for path in [out, *out.rglob("*")] if path.is_dir()
    } == {0o700}

    (out / "parts" / "cut").mkdir(parents=True)
    (out / "parts" / "cut" / "0-0-1.json").write_text(f'["{CANARY}"]')
    (out / f"{'a' * 16}.failed.txt").write_text(f"ValueError: {CANARY}")
    # Cut off in the middle
    (out / f"{'b' * 16}.json").write_text(f'{{"schema": "gradleak.record/1", "text": "{CANARY}')
    (out / "noise" / f".{'c' * 16}.tmp").write_text(CANARY)
    (out / "todo.txt").write_text("ask the board")
    before = {path.name: read_record(path) for path in record_paths(out) if path.stem != "b" * 16}
    assert len(holding(out, CANARY)) > 5
    capsys.readouterr()
    assert main(["purge", str(out), "--yes"]) == 0
    said = capsys.readouterr().out
    assert holding(out, CANARY) == holding(out, "4471") == []
    assert not list(out.rglob("*.key"))
    after = {path.name: read_record(path) for path in record_paths(out)}
    assert {name: scores(one) for name, one in after.items()} == {
        name: scores(one) for name, one in before.items()
    }
    assert not any(text for one in after.values() for text in texts_of(one))
    assert (out / "todo.txt").read_text() == "ask the board"
    for part in (
        "guesses and texts in",
        "for-the-board.html",
        "records that cannot be read",
        "Stays:",
        "not touched: todo.txt",
    ):
        assert part in said
    assert main(["purge", str(out), "--yes"]) == 0
    assert f"Nothing private is left in {out}." in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(out)]) == 0  # scores can still be drawn


def scores(record: Record) -> object:
    return record.worst_case, {
        key: [one.values for one in attack.examples] for key, attack in record.attacks.items()
    }


def test_a_purge_of_all_leaves_nothing_of_the_run(
    tmp_path: Path, data: Path, capsys: Captured
) -> None:
    out = tmp_path / "runs"
    assert main([*AUDIT, "--data", str(data), "--out", str(out)]) == 0
    assert main(["purge", str(out), "--yes", "--all"]) == 0
    assert files(out) == []
    assert "Nothing of the run stays." in capsys.readouterr().out


def test_a_purge_takes_guesses_that_no_record_names_and_keeps_scores_whose_guesses_are_lost(
    tmp_path: Path, data: Path
) -> None:
    out = tmp_path / "runs"
    assert main([*AUDIT, "--data", str(data), "--keep-secrets", "--out", str(out)]) == 0
    (path,) = out.glob("*.json")
    summary = read_summary(path)
    orphan = summary.details_path.with_name(f"{'d' * 16}-{'e' * 16}.json")
    summary.details_path.rename(orphan)
    mine = orphan.with_name("mine.json")
    mine.write_text("mine")
    assert holding(out, CANARY) == [orphan]
    assert main(["purge", str(out), "--yes"]) == 0
    assert holding(out, CANARY) == [] and mine.read_text() == "mine"
    assert read_summary(path).columns == summary.columns
    assert main(["report", str(out)]) == main(["show", str(out)]) == 0


def test_a_foreign_file_with_a_private_text_is_named_and_left(
    tmp_path: Path, data: Path, capsys: Captured
) -> None:
    out = tmp_path / "runs"
    assert main([*AUDIT, "--data", str(data), "--keep-secrets", "--out", str(out)]) == 0
    (out / "mine.txt").write_text(CANARY)
    assert main(["purge", str(out), "--yes"]) == 3
    assert "still hold" in (said := capsys.readouterr().err) and "mine.txt" in said
    assert (out / "mine.txt").exists()


def test_a_file_with_the_name_of_a_report_is_left_and_a_record_with_another_name_is_not(
    tmp_path: Path, data: Path
) -> None:
    out = tmp_path / "runs"
    assert main([*AUDIT, "--data", str(data), "--keep-secrets", "--out", str(out / "one")]) == 0
    (record,) = (out / "one").glob("*.json")
    renamed = record.rename(out / "one" / "before the fix.json")
    (out / "paper").mkdir()
    mine = [out / "paper" / "report.pdf", out / "one" / "index.html"]
    for path in mine:
        path.write_text("mine")
    assert main(["purge", str(out), "--yes"]) == 0
    assert [path.read_text() for path in mine] == ["mine"] * 2
    assert renamed.is_file() and holding(out, CANARY) == []
    assert [path.name for path in (out / "one").glob("*.json")] == [renamed.name]


def test_a_folder_that_is_no_run_is_refused_and_left_alone(
    tmp_path: Path, data: Path, capsys: Captured
) -> None:
    home = tmp_path / "home"
    (home / "keys").mkdir(parents=True)
    (home / "report.html").write_text("mine")
    assert main(["purge", str(home), "--yes"]) == 2
    assert "is not a folder of a run" in capsys.readouterr().err
    assert main([*AUDIT, "--data", str(data), "--out", str(home / "runs")]) == 0
    (home / "letter.txt").write_text("mine")
    assert main(["purge", str(home), "--yes"]) == 2
    assert f"name one of them, such as {home / 'runs'}" in capsys.readouterr().err
    assert main(["purge", str(tmp_path / "nowhere"), "--yes"]) == 2
    assert (home / "report.html").read_text() == "mine"


def test_a_purge_asks_and_does_nothing_where_nobody_answers(
    tmp_path: Path, data: Path, capsys: Captured
) -> None:
    out = tmp_path / "runs"
    assert main([*AUDIT, "--data", str(data), "--keep-secrets", "--out", str(out)]) == 0
    assert main(["purge", str(out)]) == 2
    assert "Add --yes" in capsys.readouterr().err
    assert holding(out, CANARY)


def write_capture_of(path: Path) -> bytes:
    """A capture; returns bytes of its tensor that stand nowhere else."""
    tensor = torch.linspace(0.123, 4.567, 64)
    facts = ModelFacts("M", {}, "", ("w",)), ProtocolFacts("fedsgd", None, None)
    write_capture(path, Capture(CaptureHeader("gradients", *facts, client=CANARY), {"w": tensor}))
    return bytes(tensor.numpy().tobytes())


def holding_bytes(folder: Path, content: bytes) -> list[Path]:
    """The files that hold any 16 bytes of these."""
    pieces = [content[at : at + 16] for at in range(0, len(content), 16)]
    return [path for path in files(folder) if any(one in path.read_bytes() for one in pieces)]


def test_a_purge_leaves_no_byte_of_a_capture(tmp_path: Path, data: Path, capsys: Captured) -> None:
    out, mine = tmp_path / "runs", tmp_path / "mine"
    assert main([*AUDIT, "--data", str(data), "--out", str(out)]) == 0
    mine.mkdir()
    for folder in (out, mine, out / "round 1"):
        content = write_capture_of(folder / "a.safetensors")
        write_capture_of(folder / "b.safetensors")
        index_folder(folder)
        whole = (folder / "a.safetensors").read_bytes()
        (folder / "cut.safetensors").write_bytes(whole[:-8])
        (folder / f".c.safetensors.{'0a' * 8}.tmp").write_bytes(whole[9:])
    (mine / "parts").mkdir()
    for name in ("notes.txt", "parts/mine.txt", "parts/a.safetensors"):
        (mine / name).write_text("mine")
    save_file({"w": torch.ones(2)}, mine / "weights.safetensors")
    assert len(holding_bytes(tmp_path, content)) == 12
    for folder in (out, mine):
        assert main(["purge", str(folder), "--yes"]) == 0
        assert "captures: " in capsys.readouterr().out
    assert holding_bytes(tmp_path, content) == holding(tmp_path / "mine", CANARY) == []
    assert holding(out, CANARY) == []
    # What is not ours stays, in folders that are called as ours too
    assert {str(path.relative_to(mine)) for path in files(mine)} == {
        *("notes.txt", "parts/mine.txt", "parts/a.safetensors", "weights.safetensors")
    }
    assert list(record_paths(out))


def test_a_purge_of_one_capture_leaves_its_neighbours(tmp_path: Path, capsys: Captured) -> None:
    for name in ("a", "b"):
        write_capture_of(tmp_path / f"{name}.safetensors")
    assert main(["purge", str(tmp_path / "a.safetensors"), "--yes"]) == 0
    assert "captures: a.safetensors" in capsys.readouterr().out
    assert [path.name for path in files(tmp_path)] == ["b.safetensors"]
    save_file({"w": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert main(["purge", str(tmp_path / "weights.safetensors"), "--yes"]) == 2
    assert (tmp_path / "weights.safetensors").exists()


def test_a_folder_that_a_run_works_in_is_refused(tmp_path: Path, capsys: Captured) -> None:
    open_key(tmp_path)
    with claim(tmp_path, "a" * 16):
        assert main(["purge", str(tmp_path), "--yes"]) == 2
    assert "A run is working in" in capsys.readouterr().err
    assert (tmp_path / "keys" / "secrets.key").exists()
    assert main(["purge", str(tmp_path), "--yes"]) == 0
    assert files(tmp_path) == []


def test_a_link_is_removed_and_what_it_points_to_stays(tmp_path: Path, data: Path) -> None:
    out, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    assert main([*AUDIT, "--data", str(data), "--out", str(out)]) == 0
    elsewhere.mkdir()
    (elsewhere / "report.html").write_text("mine")
    (out / "linked").symlink_to(elsewhere)
    (out / "parts").symlink_to(elsewhere)
    assert main(["purge", str(out), "--yes"]) == 0
    assert (elsewhere / "report.html").read_text() == "mine"
    assert not (out / "parts").exists()


def test_json_holds_guesses_and_texts_only_on_request(
    tmp_path: Path, data: Path, capsys: Captured
) -> None:
    words = [*AUDIT, "--data", str(data), "--out", str(tmp_path / "runs"), "--json"]
    assert main([*words, "--keep-secrets"]) == 0
    hidden = json.loads(capsys.readouterr().out)
    assert main([*words, "--show"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert CANARY not in json.dumps(hidden) and list(texts_of(Record.from_json(hidden))) == []
    assert CANARY in json.dumps(shown)
    assert hidden["worst_case"] == shown["worst_case"]
