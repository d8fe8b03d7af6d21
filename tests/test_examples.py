"""Every example runs as a user would run it, prints its scores and stays short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradleak

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
LONGEST = 40  # lines
SHORTENED = {"first_audit": ["--steps", "20"]}


def run(path: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Another process that finds the same gradleak, installed or not. One thread: tests share their cores."""
    environment = {**os.environ, "PYTHONPATH": str(Path(gradleak.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(path), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {"first_audit", "own_attack", "own_defense"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_offline_and_prints_scores_beside_blind(path: Path, tmp_path: Path) -> None:
    result = run(path, tmp_path, *SHORTENED.get(path.stem, []))
    assert result.returncode == 0, result.stderr
    assert "bag_f1" in result.stdout
    assert "blind" in result.stdout
    assert not list(tmp_path.iterdir())  # nothing is left behind


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONGEST
