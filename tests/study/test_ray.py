"""A Ray cluster gives the records of a local run, also when a worker is lost."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from gradleak.audit import Inputs
from gradleak.cli import main
from gradleak.core.attack import Silent
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.records.plain import to_plain
from gradleak.records.run_folder import FAILED_SUFFIX
from gradleak.records.store import RECORD
from gradleak.study import ray_engine
from gradleak.study.cells import Cell, read_study
from gradleak.study.grid import Grid, failure_file, number_cells, run_cells
from gradleak.study.ray_engine import Cluster, run_on_ray

GRID = (
    "target: tiny\nattacks: ['tag:steps=20', blind]\nseed: [0, 1]\nlimit: 1\nmetrics: [rouge1,"
    " exact_match]\n"
)
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(GRID)
    return path


def test_without_ray_the_extra_is_named(
    grid: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert main(["run", str(grid), "--engine", "ray", "--out", str(grid.parent)]) == 2
    assert "gradleak[ray]" in capsys.readouterr().err
    assert main(["run", str(grid), "--engine", "slurm"]) == 2
    assert main(["run", str(grid), "--address", "auto"]) == 2


def ours(process: int) -> bool:
    """Whether a process descends from this one."""
    while process > 1:
        if process == os.getpid():
            return True
        status = Path(f"/proc/{process}/status").read_text()
        process = int(status.split("PPid:")[1].split()[0])
    return False


def kill_one_worker(killed: list[int]) -> None:
    """Kills the first worker that has begun a cell."""
    deadline = time.monotonic() + 60
    while not killed and time.monotonic() < deadline:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if path.read_bytes().startswith(b"ray::audit_cell") and ours(int(path.parent.name)):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    killed.append(int(path.parent.name))
                    break
            except (OSError, IndexError):
                continue
        time.sleep(0.01)


def test_what_is_left_is_asked_as_a_local_run_asks(tmp_path: Path) -> None:
    notes = tmp_path / "notes.csv"
    notes.write_text("text,label\nit rains,0\nit snows,1\n")
    study = tmp_path / "own.yaml"
    study.write_text(
        f"target: tiny\ndata: {notes}\nattacks: [blind]\nseed: [0, 1]\nlimit: 1\nmetrics:"
        " [rouge1]\n"
    )
    cells, folder = read_study(study).cells, tmp_path / "run"
    run_cells(cells[:1], folder, "cpu", Silent())

    def left(*, retry: bool) -> list[list[Cell]]:
        grid = Grid(folder, Silent(), number_cells(cells), Inputs(folder))
        return ray_engine.find_left(cells, grid, retry=retry)

    assert left(retry=False) == [[cells[1]]]
    failure_file(folder, cells[1]).write_text("out of luck")
    assert left(retry=False) == []
    assert left(retry=True) == [[cells[1]]]
    notes.write_text("text,label\nit hails,0\nit snows,1\n")  # the record is of other data
    assert left(retry=True) == [[cell] for cell in cells]


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_driver_that_ray_ends_is_a_failed_run() -> None:
    context = multiprocessing.get_context("fork")
    said: list[str] = []
    for work, error, words in (
        (
            lambda theirs: (theirs.send("2 cells on Ray."), os._exit(1)),
            RunFailed,
            "The Ray cluster was lost.",
        ),
        (
            lambda theirs: theirs.send(GradleakError("This Ray cluster has no GPU.")),
            GradleakError,
            "has no GPU",
        ),
    ):
        ours, theirs = context.Pipe(duplex=False)
        driver = context.Process(target=work, args=(theirs,))
        driver.start()
        theirs.close()
        with pytest.raises(error, match=words) as raised:
            ray_engine.hear_out(driver, ours, Listening(said))
        assert raised.value.exit_code == (3 if error is RunFailed else 2)
    assert said == ["2 cells on Ray."]


class Listening(Silent):
    """Notes what is said."""

    def __init__(self, said: list[str]) -> None:
        self.say = said.append  # type: ignore[method-assign]


FAKE_RAY = """
import os, types
exceptions = types.SimpleNamespace(RayError=RuntimeError)
lost = os.environ.get("LOSE_RAY_AFTER")
done = []
def init(**_): pass
def shutdown(): pass
def cluster_resources(): return {"CPU": 1}
def put(value): return value
def get(value): return value
def wait(values, num_returns): return [values[0]], values[1:]
def remote(**_):
    def wrap(function):
        def run(*given):
            if lost and len(done) == int(lost):
                os._exit(1)
            done.append(1)
            return Answer(function(*given))
        return types.SimpleNamespace(remote=run)
    return wrap
class Answer(list):
    __hash__ = object.__hash__
"""


@pytest.mark.long
def test_a_run_whose_ray_is_lost_ends_with_3_and_goes_on_from_its_records(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "ray.py").write_text(FAKE_RAY)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Here it is only asked for; the driver imports the other
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setenv("LOSE_RAY_AFTER", "2")
    words = [
        "run",
        str(grid),
        "--engine",
        "ray",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "runs"),
    ]
    assert main(words) == 3
    assert "The Ray cluster was lost" in " ".join(capsys.readouterr().err.split())
    assert len(list((tmp_path / "runs" / "grid").glob(RECORD))) == 2
    monkeypatch.delenv("LOSE_RAY_AFTER")
    assert main(words) == 0
    assert "2 cells on Ray" in capsys.readouterr().err
    assert len(list((tmp_path / "runs" / "grid").glob(RECORD))) == 4


@pytest.mark.long
def test_a_cluster_of_two_gives_the_records_of_a_local_run_though_a_worker_is_killed(
    grid: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="ray is not installed; pip install 'gradleak[ray]'")
    cells = read_study(grid).cells
    killed: list[int] = []
    killer = threading.Thread(target=kill_one_worker, args=(killed,))
    killer.start()
    found = run_on_ray(cells, tmp_path / "ray", Cluster(None, "cpu", 2), Silent(), retry=True)
    killer.join()
    assert len(killed) == 1
    local = run_cells(cells, tmp_path / "local", "cpu", Silent())
    for one, other in zip(found, local, strict=True):
        assert one.record is not None and other.record is not None
        assert to_plain(one.record.worst_case) == to_plain(other.record.worst_case)
        for key, attack in other.record.attacks.items():
            assert one.record.attacks[key].examples == attack.examples
            assert [batch.losses for batch in one.record.attacks[key].batches] == [
                batch.losses for batch in attack.batches
            ]
    assert not list((tmp_path / "ray").glob(f"*{FAILED_SUFFIX}"))
