"""Run by test_resume.py: children that run a study are killed at random moments until one comes to
its end; then two share one.

    kill_and_resume.py STUDY FOLDER KILLS SEED LONGEST

Forks, so that torch is imported once. Prints how often it killed, how the last child
ended, and the cells that two children with one folder computed between them.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradleak.audit import AuditSpec, run_audit
from gradleak.audit.runner import run_audits
from gradleak.core.attack import Silent
from gradleak.study import grid
from gradleak.study.cells import Study, read_study


def child(study: Study, folder: Path) -> int:
    process = os.fork()
    if process == 0:
        grid.run_cells(study.cells, folder, "cpu", Silent())
        os._exit(0)
    return process


def ended(process: int, seconds: float) -> bool:
    """Whether the child came to its end by itself within that time; otherwise it is killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(process, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return False


def main() -> None:
    path, folder, kills, seed, longest = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    study, generator, killed = read_study(path), random.Random(int(seed)), 0
    # Whatever is imported late is imported now, once; one thread, so that it may fork after it
    run_audit(study.cells[-1].spec)
    while killed < int(kills):
        if ended(child(study, folder), generator.uniform(0.02, float(longest))):
            break
        killed += 1
    _, code = os.waitpid(child(study, folder), 0)
    print(killed, code, *shared(study, folder.with_name("shared")))


def shared(study: Study, folder: Path) -> list[str]:
    """The ids of the cells that two children computed in one folder, as often as they did."""
    log = folder.with_suffix(".log")

    def noted(specs: Sequence[AuditSpec], **rest: Any) -> Any:
        with log.open("a") as file:
            file.write("".join(f"{spec.id}\n" for spec in specs))
        return run_audits(specs, **rest)

    grid.run_audits = noted  # type: ignore[assignment]
    for process in [child(study, folder), child(study, folder)]:
        os.waitpid(process, 0)
    return log.read_text().split()


if __name__ == "__main__":
    main()
