"""A study killed with SIGKILL at random moments and resumed, held to an undisturbed run of itself.

    python benchmarks/kill_and_resume.py studies/laptop.yaml [KILLS] [LONGEST] [FOLDER]

`gradleak run` and its workers are killed KILLS times (20), each after a random time of up to
LONGEST seconds (60), then left to come to the end. Every record must be there, whole, and equal to
that of an undisturbed run but for time and cost, and no other. In FOLDER the undisturbed run is
kept, so that it is made once. tests/study/test_resume.py does the same with a small model.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gradleak.records.store import RECORD, read_record

OF_COST = ("seconds", "created", "peak_memory_bytes")
WORKERS = 2


def start(study: Path, out: Path) -> subprocess.Popen[bytes]:
    words = [
        sys.executable,
        "-m",
        "gradleak",
        "run",
        str(study),
        "--workers",
        str(WORKERS),
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    return subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def finish(study: Path, out: Path) -> float:
    began = time.monotonic()
    if start(study, out).wait():
        raise SystemExit(f"A run of {study} failed; see the failures in {out}.")
    return time.monotonic() - began


def kill_after(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it was still at work, and was killed with all its workers."""
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def without_cost(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_cost(item) for key, item in value.items() if key not in OF_COST}
    return [without_cost(item) for item in value] if isinstance(value, list) else value


def records(folder: Path) -> dict[str, Any]:
    """Every record, read whole."""
    return {
        path.name: without_cost(read_record(path).to_json())
        for path in sorted(folder.glob(f"*/{RECORD}"))
    }


def main() -> None:
    study = Path(sys.argv[1])
    kills, longest = (
        int(sys.argv[2]) if len(sys.argv) > 2 else 20,
        float(sys.argv[3]) if len(sys.argv) > 3 else 60.0,
    )
    folder = Path(sys.argv[4]) if len(sys.argv) > 4 else Path(tempfile.mkdtemp())
    calm, disturbed = folder / "calm", folder / "disturbed"
    print(f"undisturbed: {finish(study, calm):.0f} s", flush=True)
    shutil.rmtree(disturbed, ignore_errors=True)
    # The same key, so that the hashes of secrets must be the same too
    for keys in calm.glob("*/keys"):
        shutil.copytree(keys, disturbed / keys.relative_to(calm))
    draw, began, killed, moments = random.Random(0), time.monotonic(), 0, []
    while killed < kills:
        moment = draw.uniform(0.5, longest)
        if not kill_after(start(study, disturbed), moment):
            break
        killed += 1
        moments.append(len(list(disturbed.glob(f"*/{RECORD}"))))
    print(
        f"killed {killed} times in {time.monotonic() - began:.0f} s; records after each: {moments}",
        flush=True,
    )
    print(f"left to its end: {finish(study, disturbed):.0f} s", flush=True)
    wanted, found = records(calm), records(disturbed)
    unlike = [name for name in wanted if found.get(name) != wanted[name]]
    broken = [path.name for path in disturbed.rglob("*.json") if not json.loads(path.read_text())]
    litter = [
        str(path.relative_to(disturbed))
        for path in disturbed.rglob("*")
        if path.is_file() and path.suffix in (".tmp", ".txt")
    ]
    print(
        f"{len(found)} of {len(wanted)} records; unlike: {unlike}; not whole: {broken}; left over:"
        f" {litter}"
    )
    raise SystemExit(
        bool(unlike or broken or litter or killed < kills or len(found) != len(wanted))
    )


if __name__ == "__main__":
    main()
