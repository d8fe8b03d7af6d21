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


# All in one process, which loads torch once; a mark is printed where one ends
RUN = """
import runpy, sys
for path, *words in {runs}:
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")
    print("{mark}")
"""
MARK = "-- that was one example --"

# In an environment of their own: tests/test_frameworks.py runs these
OF_FRAMEWORKS = ("flower_app", "nvflare_client", "nvflare_job")
LOOPS = ("own_loop", "own_trainer", "own_accelerate", "own_opacus")  # that are captured


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {
        *("first_audit", "own_attack", "own_defense"),
        *LOOPS,
    }


@pytest.mark.parametrize("of_loops", [False, True])
def test_examples_run_offline_print_scores_beside_blind_and_leave_nothing_behind(
    of_loops: bool, tmp_path: Path
) -> None:
    """As users run them, without the tests' checks; the process finds the same gradleak,
    installed or not. Half of them at a time, so that no test is long."""
    ours = [path for path in EXAMPLES if path.stem not in OF_FRAMEWORKS]
    examples = [path for path in ours if (path.stem in LOOPS) is of_loops]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(gradleak.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    runs = [[str(path), *SHORTENED.get(path.stem, [])] for path in examples]
    words = [sys.executable, "-c", RUN.format(runs=runs, mark=MARK)]
    result = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    *printed, after = result.stdout.split(MARK)
    assert (len(printed), after.strip()) == (len(examples), "")
    for path, text in zip(examples, printed, strict=True):
        assert "bag_f1" in text and "blind" in text, path.name
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONGEST
