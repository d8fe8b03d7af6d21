"""Ten thousand cells are read in seconds, into a page that a phone can open."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradleak

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "many_cells.py"


@pytest.mark.parametrize("cells", [pytest.param(10_000, marks=pytest.mark.long), 200])
def test_every_reader_is_quick_and_the_page_small(cells: int) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(gradleak.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), str(cells)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
