"""The same cells by local processes and by a Ray cluster of this machine: cells an hour, their
ratio, and that records are equal.

    python benchmarks/engines.py [CELLS] [WORKERS]

Cells differ in their seed, so that none shares a call with another. Both start from nothing:
importing torch in every process is part of the time.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradleak.core.attack import Silent
from gradleak.records.store import RECORD, read_record
from gradleak.study.cells import Cell, read_study
from gradleak.study.engine import run_on
from gradleak.study.ray_engine import Cluster, run_on_ray

STUDY = (
    "target: tiny:hidden=64,heads=4\nattacks: ['tag:steps=150']\nlimit: 8\nseed: {seeds}\nmetrics:"
    " [rouge1, exact_match]\n"
)
OF_COST = ("seconds", "created", "peak_memory_bytes", "machine", "hash")


def without_cost(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_cost(item) for key, item in value.items() if key not in OF_COST}
    return [without_cost(item) for item in value] if isinstance(value, list) else value


def timed(run: Callable[[], object], cells: int, name: str) -> float:
    began = time.monotonic()
    run()
    seconds = time.monotonic() - began
    print(
        f"{name}: {cells} cells in {seconds:.1f} s, {3600 * cells / seconds:.0f} cells an hour",
        flush=True,
    )
    return seconds


def records(folder: Path) -> dict[str, Any]:
    return {
        path.name: without_cost(read_record(path).to_json()) for path in sorted(folder.glob(RECORD))
    }


def cells_of(folder: Path, count: int) -> tuple[Cell, ...]:
    path = folder / "engines.yaml"
    path.write_text(STUDY.format(seeds=list(range(count))))
    return read_study(path).cells


def main() -> None:
    count, workers = (
        int(sys.argv[1]) if len(sys.argv) > 1 else 24,
        int(sys.argv[2]) if len(sys.argv) > 2 else 2,
    )
    folder = Path(tempfile.mkdtemp())
    cells = cells_of(folder, count)
    local, ray = folder / "local", folder / "ray"
    by_local = timed(
        lambda: run_on(["cpu"], workers, cells, local, Silent(), retry=True), count, "local"
    )
    by_ray = timed(
        lambda: run_on_ray(cells, ray, Cluster(None, "cpu", workers), Silent(), retry=True),
        count,
        "ray",
    )
    print(f"ray takes {by_ray / by_local:.2f} times as long; {workers} workers each")
    equal = records(local) == records(ray)
    print(
        f"{len(records(ray))} of {count} records, {'equal' if equal else 'UNLIKE'} but for time,"
        " cost and keyed hashes"
    )
    raise SystemExit(not equal or len(records(ray)) != count)


if __name__ == "__main__":
    main()
