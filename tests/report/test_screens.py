"""What a person sees: on narrow terminals, on terminals that read ASCII, and at the end of a
run."""

import inspect
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import gradleak
from gradleak.cli import main
from gradleak.cli.main import break_line, nearest, write_escaped
from gradleak.cli.map import leak_map
from gradleak.core.attack import Display, Progress, Silent
from gradleak.datasets import Canaries, resolve_dataset
from gradleak.records.schema import Record
from gradleak.records.store import Summary, write_record
from gradleak.report.naming import write_component
from gradleak.report.terminal.console import print_indented
from gradleak.report.terminal.listing import print_folder
from gradleak.study import engine
from gradleak.study.cells import read_study
from gradleak.study.grid import run_cells

Captured = pytest.CaptureFixture[str]
Make = Callable[..., Record]
GRID = (
    "name: small\ntarget: tiny\nattacks: ['tag:steps=2', blind]\nlimit: 1\nmetrics: [rouge1,"
    " exact_match]\n"
)
EVERY_FLAG = ("search_failed", "few_examples", "generous_knowledge", "near_chance")


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_folder_of_records_reads_at_any_width(width: int, make_record: Make) -> None:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    summary = Summary.of(Path("0123456789abcdef.json"), make_record(flags=EVERY_FLAG))
    print_folder(
        console, [("0123456789abcdef.json", summary), ("study/0123456789abcdee.json", summary)]
    )
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 12  # not a letter a line
    for whole in (
        "tiny",
        "canaries",
        "no defense",
        "50.0 [40.0, 60.0]",
        "generous_knowledge",
        "study/0123456789abcdee.json",
    ):
        assert whole in console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_check_is_indented_on_a_terminal_and_one_line_elsewhere(terminal: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, width=40, force_terminal=terminal, color_system=None)
    print_indented(console, "FAIL    ", "the gate: " + "a long word or two " * 6)
    lines = [line.rstrip() for line in written.getvalue().splitlines()]
    assert lines[0].startswith("FAIL    the gate: a long")
    assert len(lines) == (4 if terminal else 1)
    assert all(line.startswith(" " * 8) and len(line) <= 40 for line in lines[1:])


def test_an_error_on_a_terminal_is_broken_between_words() -> None:
    path = "runs/" + "a-long-name/" * 5
    lines = break_line(f"  line 8: no such defense. Available: clipping, pruning. See {path}.", 40)
    assert lines[0] == "  line 8: no such defense. Available:"
    assert all(line.startswith("    ") for line in lines[1:])
    assert max(len(line) for line in lines if path not in line) <= 40
    assert any(line.strip().startswith(path) for line in lines)  # to be copied


@pytest.mark.parametrize("terminal", [True, False])
def test_an_error_elsewhere_is_one_line(
    terminal: bool, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["audit", "--attack", "dgl"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert (len(said) > 2) == terminal and (len(said) == 1) != terminal
    assert said[0].startswith("Error: ")
    assert not terminal or all(line.startswith("  ") for line in said[1:])


def test_a_broken_record_is_named_below_the_others(
    tmp_path: Path, make_record: Make, capsys: Captured
) -> None:
    whole = write_record(tmp_path, make_record())
    (tmp_path / "0123456789abcdef.json").write_bytes(whole.read_bytes()[:200])
    assert main(["show", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert whole.name in shown.out
    assert "0123456789abcdef.json is not a whole JSON file" in shown.err


def test_legacy_metrics_are_shown_on_request_or_where_alone(
    make_record: Make, tmp_path: Path, capsys: Captured
) -> None:
    record = make_record()
    (attack,) = record.attacks.values()
    score = attack.scores["rouge1"]
    both, alone = ({"rouge1": score, "rouge1_legacy": score}, {"rouge1_legacy": score})
    for number, (scores, words, is_there) in enumerate(
        [(both, [], False), (both, ["--full"], True), (alone, [], True)]
    ):
        path = write_record(
            tmp_path / str(number), replace(record, attacks={"tag": replace(attack, scores=scores)})
        )
        assert main(["show", str(path), *words]) == 0
        assert ("\nrouge1_legacy " in capsys.readouterr().out) == is_there


def test_a_misspelt_command_is_answered_with_one_suggestion(capsys: Captured) -> None:
    assert main(["lst"]) == 2
    assert (
        capsys.readouterr().err
        == "Error: No such command 'lst'. Did you mean 'list'? See gradleak --help.\n"
    )


def test_components_read_as_on_the_command_line() -> None:
    described = {
        "name": "parts",
        "layers": "",
        "modules": ["query", "key"],
        "fused": True,
        "of": {"name": "tag", "steps": 3},
    }
    assert write_component(described) == "parts:modules=[query,key],fused=true,of=tag:steps=3"


def test_a_map_is_of_data_that_everybody_has() -> None:
    default = inspect.signature(leak_map).parameters["data"].default
    assert resolve_dataset(default) == Canaries()


def study(folder: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(GRID)
    return path


def test_a_run_ends_with_a_short_verdict_and_shows_cells_on_request(
    tmp_path: Path, capsys: Captured
) -> None:
    words = ["run", str(study(tmp_path)), "--out", str(tmp_path), "--device", "cpu"]
    assert main(words) == 0
    short = capsys.readouterr().out
    assert short.startswith("2 of 2 cells have a record.\n")
    assert len(short.splitlines()) <= 8
    assert "few_examples (1 of 1 setting)" in " ".join(short.split())
    assert "gradleak report" in short.splitlines()[-1]
    assert main([*words, "--full"]) == 0
    full = capsys.readouterr().out
    assert "tag:steps=2" in full.splitlines()[2]
    assert "2 of 2 cells have a record, 2 of them from before.\n" in full
    records, how_to_go_on = full.splitlines()[-2:]
    assert records.startswith("Records: ")
    assert how_to_go_on.startswith("All of it: gradleak report ")


class Watcher:
    """A display that remembers what it was shown."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.watched: list[tuple[str, Progress]] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    @contextmanager
    def watch(self, title: str, progress: Progress) -> Iterator[None]:
        self.watched.append((title, progress))
        yield


def test_workers_have_a_bar_and_finished_cells_are_not_told_as_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = read_study(study(tmp_path)).cells
    display, looks = Watcher(), iter([True, True, False])

    def work_here(devices: Sequence[str], workers: int, display: Display, *rest: object) -> None:
        """Stands for the processes, which take seconds to start."""
        watch = rest[-1]
        assert isinstance(watch, engine.ProcessWatch)

        def is_alive() -> bool:
            run_cells(cells, tmp_path, "cpu", Silent(), retry=False)
            return next(looks)

        started: Any = [SimpleNamespace(is_alive=is_alive, exitcode=0)]
        engine.follow(started, watch, display)

    monkeypatch.setattr(engine, "work_together", work_here)
    monkeypatch.setattr(engine.ProcessWatch, "pause", 0.0)
    results = engine.run_on(["cpu"], 2, cells, tmp_path, display, retry=False)
    assert all(result.record for result in results)
    ((title, progress),) = display.watched
    assert title == "1 processes, cells"
    assert (progress.done, progress.total) == (2, 2)
    assert display.said == ["2 of 2 cells are done."]


def ascii_command(*words: str) -> subprocess.CompletedProcess[str]:
    settings = {
        **os.environ,
        "PYTHONPATH": str(Path(gradleak.__file__).parents[1]),
        "PYTHONIOENCODING": "ascii",
        "LANG": "C",
    }
    return subprocess.run(
        [sys.executable, "-m", "gradleak", *words],
        env=settings,
        capture_output=True,
        encoding="ascii",
        timeout=60,
        check=False,
    )


def test_a_terminal_that_reads_ascii_gets_ascii(tmp_path: Path, make_record: Make) -> None:
    record = write_record(tmp_path, make_record())
    result = ascii_command("show", str(record))
    assert (result.returncode, result.stderr) == (0, "")
    assert "target tiny - data canaries" in result.stdout
    missing = ascii_command("show", str(tmp_path / "Jürgen…"))
    assert missing.returncode == 2
    assert "Jurgen..." in missing.stderr


@pytest.mark.parametrize(
    ("letter", "plain"),
    [("…", "..."), ("é", "e"), ("ε", "epsilon"), ("─", "-"), ("漢", "?"), ("½", "12")],
)
def test_letters_fall_back_to_the_nearest(letter: str, plain: str) -> None:
    assert nearest(letter) == plain


def test_json_falls_back_to_escapes_that_read_back_the_same() -> None:
    text = json.dumps("naïve 🙂 …", ensure_ascii=False)
    problem = UnicodeEncodeError("ascii", text, 0, len(text), "not there")
    escaped, end = write_escaped(problem)
    assert json.loads('"' + escaped + '"') == text and end == len(text)
