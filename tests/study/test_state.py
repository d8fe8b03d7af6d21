"""How far a run is, which cells are chosen, and that failures wait until they are asked for
again."""

from dataclasses import replace
from pathlib import Path

import pytest

from gradleak.attacks.recipes.baselines import Dlg
from gradleak.cli import main
from gradleak.core.attack import Silent
from gradleak.core.errors import GradleakError
from gradleak.records.run_folder import read_plan
from gradleak.records.store import write_record
from gradleak.study import grid
from gradleak.study.cells import choose_cells, read_study, write_plan
from gradleak.study.grid import run_cells
from gradleak.study.state import read_state

GRID = (
    "target: tiny\nattacks: ['tag:steps=2', 'dlg:steps=2', blind]\nseed: [0, 1]\nlimit: 1\nmetrics:"
    " [rouge1, exact_match]\n"
)
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(GRID)
    return path


def test_only_takes_cells_by_value_or_pattern_and_names_what_there_is(study: Path) -> None:
    cells = read_study(study).cells
    assert len(choose_cells(cells, [])) == 6
    assert {
        cell.title for cell in choose_cells(cells, ["attacks=*lg*", "attacks=blind", "seed=1"])
    } == {
        "attacks=dlg:steps=2, seed=1",
        "attacks=blind, seed=1",
    }
    for wrong, message in [
        ("sed=1", "did you mean 'seed'"),
        ("seed=7", "Its values: 0; 1"),
        ("tag", "write --only axis=value"),
    ]:
        with pytest.raises(GradleakError, match=message):
            choose_cells(cells, [wrong])


def test_status_counts_cells_that_are_finished_failed_begun_and_waiting(
    study: Path, tmp_path: Path, capsys: Captured
) -> None:
    whole, folder = read_study(study), tmp_path / "run"
    write_plan(folder, whole)
    assert [cell.id for cell in read_plan(folder) or ()] == [cell.spec.id for cell in whole.cells]
    run_cells(whole.cells[-2:], folder, "cpu", Silent())
    (folder / f"{whole.cells[0].spec.id}.failed.txt").write_text("a title\n\nValueError: no luck\n")
    # The second has finished nothing
    for cell, part in zip(whole.cells[1:3], ("0-0-1.json", "call.json"), strict=True):
        (folder / "parts" / f"{cell.spec.id}-cpu-ab").mkdir(parents=True)
        (folder / "parts" / f"{cell.spec.id}-cpu-ab" / part).write_text("[]")
    state = read_state(folder)
    assert [len(part) for part in (state.finished, state.failed, state.begun, state.waiting)] == [
        2,
        1,
        1,
        2,
    ]
    assert main(["status", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "6 cells: 2 finished, 1 failed, 1 begun, 2 waiting." in out
    assert "ValueError: no luck" in out
    assert main(["status", str(tmp_path / "nowhere")]) == 2


def test_time_is_foretold_from_finished_cells_with_the_same_attack(
    study: Path, tmp_path: Path, capsys: Captured
) -> None:
    study.write_text(GRID.replace("limit: 1", "limit: [1, 2]"))
    whole, folder = read_study(study), tmp_path / "run"
    write_plan(folder, whole)
    blind, tags = (
        choose_cells(whole.cells, ["attacks=blind"]),
        choose_cells(whole.cells, ["attacks=tag*"]),
    )
    run_cells(blind, folder, "cpu", Silent())
    state = read_state(folder)
    assert len(state.unforetold) == 8 and state.seconds_left == 0
    assert main(["status", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "How long the rest takes cannot be told, since none with tag:steps=2, dlg:steps=2 has"
        " finished." in said
    )
    small = [cell for cell in tags if cell.spec.limit == 1]
    for cell, seconds in zip(small, (5.0, 7.0), strict=True):
        (result,) = run_cells([cell], folder, "cpu", Silent())
        assert result.record is not None
        (attack,) = result.record.attacks.values()
        write_record(
            folder,
            replace(
                result.record,
                attacks={"tag": replace(attack, cost=replace(attack.cost, seconds=seconds))},
            ),
        )
    state = read_state(folder)
    assert len(state.unforetold) == 4  # dlg
    # Two cells of two batches, six seconds each
    assert state.seconds_left == pytest.approx(2 * 2 * 6.0)
    assert state.seconds == pytest.approx(12.0, abs=0.5)
    assert main(["status", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "Attacks in 2 cells left may take about 24 s; of 4 cells it cannot be told, since none with"
        " dlg:steps=2" in said
    )


def test_a_record_of_an_older_attack_is_not_called_finished(
    study: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = read_study(study), tmp_path / "run"
    write_plan(folder, whole)
    cells = choose_cells(whole.cells, ["attacks=dlg*", "attacks=blind", "seed=0"])
    run_cells(cells, folder, "cpu", Silent())
    assert len(read_state(folder).finished) == 2
    monkeypatch.setattr(Dlg, "version", 2)
    state = read_state(folder)
    assert [cell.axes["attacks"] for cell in state.finished] == ["blind"] and len(
        state.waiting
    ) == 5
    assert main(["status", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "6 cells: 1 finished, 0 failed, 0 begun, 5 waiting." in said
    assert (
        "1 of the waiting cells has a record, of an older attack (dlg version 1, now 2): to be run"
        " again." in said
    )
    assert [result.skipped for result in run_cells(cells, folder, "cpu", Silent())] == [False, True]


def test_failed_cells_wait_until_they_are_asked_for_again(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "run",
        str(study),
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--only",
        "attacks=blind",
        "--only",
        "seed=0",
    ]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(grid, "run_audits", fail)
    assert main(words) == 3
    monkeypatch.undo()
    (failure,) = (tmp_path / "grid").glob("*.failed.txt")
    assert main(words) == 3  # nothing was tried
    assert failure.exists()
    assert main([*words, "--retry-failed"]) == 0
    assert not failure.exists()


def test_check_counts_estimates_and_runs_nothing(
    study: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert main(["check", str(study), "--device", "cpu", "--seconds", "1"]) == 0
    out = capsys.readouterr().out
    assert "6 cells, 6 examples" in out
    assert "Nothing was run." in out
    assert out.count("tiny ") >= 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.yaml"]


def test_check_tells_every_problem_with_its_line_before_anything_is_opened(
    tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("target: tiny\nattacks: [tagg, tag]\nlimit: few\ndefenses: nose\n")
    assert main(["check", str(path)]) == 2
    err = capsys.readouterr().err
    assert "2 problems" in err and "Values, files and combinations are looked at when these" in err
    assert all(f"line {number}: " in err for number in (2, 4))
    path.write_text("target: tiny\nattacks: [tag]\nlimit: few\ndefenses: sign\n")
    assert main(["check", str(path)]) == 2
    assert "line 3: " in capsys.readouterr().err
