"""Studies never lose work: killed at random moments and run again, they end with the records of
an undisturbed run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradleak
from gradleak.core.attack import Silent
from gradleak.records.store import read_record
from gradleak.study.cells import read_study
from gradleak.study.grid import run_cells

SCRIPT = Path(__file__).with_name("kill_and_resume.py")
STUDIES = Path(__file__).parents[2] / "studies"
SMALL = (
    "target: tiny\nattacks: ['tag:steps=12', 'dlg:steps=12', blind]\nlimit: [2, 3]\nmetrics:"
    " [rouge1, exact_match]\n"
)
# Hashes are keyed, and each folder has a key of its own
OF_COST = ("seconds", "created", "machine", "peak_memory_bytes", "hash")


def kill_and_resume(study: Path, folder: Path, kills: int, longest: float) -> list[str]:
    """How often a run was killed, how the last one ended, and the cells that two runs computed
    together."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(gradleak.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, str(SCRIPT), str(study), str(folder), str(kills), "0", str(longest)]
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, check=True, timeout=3000
    ).stdout.split()


def without_cost(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_cost(item) for key, item in value.items() if key not in OF_COST}
    return [without_cost(item) for item in value] if isinstance(value, list) else value


def records(folder: Path) -> dict[str, Any]:
    """Every record, read whole."""
    paths = sorted(path for path in folder.glob("*.json") if path.name != "study.json")
    return {path.name: without_cost(read_record(path).to_json()) for path in paths}


def assert_never_loses_work(study: Path, folder: Path, kills: int, longest: float) -> None:
    killed, code, *computed = kill_and_resume(study, folder / "disturbed", kills, longest)
    cells = read_study(study).cells
    # A quick machine may be done before the last of them
    assert 1 <= int(killed) <= kills and code == "0"
    # Two runs at once: nothing twice, nothing left out
    assert sorted(computed) == sorted(cell.spec.id for cell in cells)
    run_cells(cells, folder / "calm", "cpu", Silent())
    calm = records(folder / "calm")
    assert len(calm) == len(cells)
    assert records(folder / "disturbed") == calm
    assert records(folder / "shared") == calm


def test_a_study_killed_at_random_moments_ends_with_the_records_of_a_calm_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    assert_never_loses_work(path, tmp_path, kills=3, longest=0.5)


@pytest.mark.long
def test_the_laptop_study_killed_twenty_times_ends_with_the_records_of_a_calm_one(
    tmp_path: Path,
) -> None:
    # The same cells on a model that is small enough to be killed often
    path = tmp_path / "laptop.yaml"
    path.write_text(
        (STUDIES / "laptop.yaml")
        .read_text()
        .replace("minilm", "tiny:hidden=64,heads=4")
        .replace("english", "auto")
    )
    assert_never_loses_work(path, tmp_path, kills=20, longest=4.0)
