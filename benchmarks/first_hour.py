"""How long a person waits for help, a list, the answers to typos and an unreachable hub, and a tiny
audit's first step.

python benchmarks/first_hour.py [--repeat 3]: the best of so many runs of each, wall clock and
processor time, beside the limit. The limits are for two idle cores and a warm cache. Where others
keep the machine busy the processor time is nearer to that, so the smaller of the two is held to the
limit. The hub is made unreachable by an address that nobody listens on. Exits with 1 where a limit
is passed.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
COMMAND = "import sys\nfrom gradleak.cli import main\nsys.exit(main(sys.argv[1:]))"
# Ends the process when the attack has made its first step, which the blackboard that displays read
# tells of
TO_FIRST_STEP = """
import contextlib, os, sys, threading, time
from gradleak.report.terminal.live import TerminalDisplay

@contextlib.contextmanager
def watch(display, title, progress):
    def wait():
        while not progress.done:
            time.sleep(0.005)
        os._exit(0)
    threading.Thread(target=wait, daemon=True).start()
    yield

TerminalDisplay.watch = watch
from gradleak.cli import main
main(sys.argv[1:])
sys.exit("no step was seen")
"""


@dataclass(frozen=True)
class Wait:
    """Something that a person waits for, and the most seconds it may take."""

    title: str
    words: tuple[str, ...]
    limit: float
    code: int = 0
    program: str = COMMAND
    study: str = ""  # what study.yaml holds


MISSPELT = "target: tiny\nattacks: [tag, dlg:stesp=3]\nlimit: 2\n"
WAITS = (
    Wait("gradleak --help", ("--help",), 0.2),
    Wait("list attacks", ("list", "attacks"), 1.0),
    Wait("a typo in a name", ("audit", "--attack", "dgl"), 1.0, code=2),
    Wait("check a study with a typo", ("check", "study.yaml"), 1.0, code=2, study=MISSPELT),
    Wait("run a study with a typo", ("run", "study.yaml"), 1.0, code=2, study=MISSPELT),
    Wait("a hub id without network", ("audit", "--target", "no-such/model"), 5.0, code=2),
    Wait(
        "first step of a tiny audit",
        ("audit", "--target", "tiny", "--attack", "dlg:steps=100", "--limit", "2"),
        6.0,
        program=TO_FIRST_STEP,
    ),
)


def measure(wait: Wait) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment.pop("HF_HUB_OFFLINE", None)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "study.yaml").write_text(wait.study)
        used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        ran = subprocess.run(
            [sys.executable, "-c", wait.program, *wait.words],
            cwd=folder,
            env=environment,
            capture_output=True,
        )
        seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ran.returncode != wait.code:
        sys.exit(
            f"{wait.title}: exit code {ran.returncode}, not {wait.code}.\n{ran.stderr.decode()}"
        )
    return seconds, after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    print(f"{'':28}{'clock':>8}{'processor':>11}{'limit':>8}")
    slow = 0
    for wait in WAITS:
        clock, processor = map(min, zip(*(measure(wait) for _ in range(repeat)), strict=True))
        is_slow = min(clock, processor) > wait.limit
        slow += is_slow
        print(
            f"{wait.title:28}{clock:7.2f}s{processor:10.2f}s{wait.limit:7.1f}s"
            f"{'  too slow' if is_slow else ''}"
        )
    return min(slow, 1)


if __name__ == "__main__":
    sys.exit(main())
