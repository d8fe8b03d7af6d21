"""A default audit of eight batches interrupted (Ctrl-C) at random moments and run again, held to an
undisturbed run of itself.

    python benchmarks/interrupt_audit.py [--interrupts 20] [--seconds-a-call 60] [--most 1800] \\
        [--folder FOLDER] [-- words of gradleak audit …]

Without words it is `--target tiny --limit 8 --defense gaussian_noise:std=0.01`, where every attack
of the portfolio has its turn; `-- --limit 8` is the default audit itself. The interrupts fall at
moments that are drawn from the whole of an undisturbed run's time, from its first call on, and all
in one audit: work that is lost leaves more to do, so that it ends after the last of them. Where it
ends before, another is begun in a new folder for the rest. With --share N each interrupt falls
within an Nth of that time instead. Counted are the calls that were begun (an attack of the
portfolio on a group of batches): each interrupt may cost one. What is said of kept parts is held
against the disk, and every record must be the undisturbed one's but for time and cost. After
--most seconds it ends where it is. The last line is a summary, whatever happened; the exit code is
0 where all was done and right, 1 where something was wrong, 2 where the time ran out.
tests/audit/test_interrupts.py does the same with a counter.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

DEFAULT = ["--target", "tiny", "--limit", "8", "--defense", "gaussian_noise:std=0.01"]
OF_COST = ("seconds", "created", "peak_memory_bytes")
STARTED: list[subprocess.Popen[str]] = []  # ended with the benchmark
KEPT, LOST = "Finished parts are kept", "before a part was finished"


class OutOfTime(Exception):
    """The time that the benchmark may take is over, or somebody wants it to end."""


@dataclass
class Tally:
    """What was seen so far."""

    wanted: int  # interrupts
    done: int = 0
    rounds: int = 0
    repeated: int = 0  # calls, of finished rounds
    wrong: list[str] = field(default_factory=list)

    def summary(self, ended: str) -> str:
        found = "; ".join(self.wrong) or "every record that was finished is equal"
        return (
            f"{ended}: {self.done} of {self.wanted} interrupts in {self.rounds} audits,"
            f" {self.repeated} calls repeated; {found}"
        )


def audit_and_log(log: Path, seconds_a_call: float, words: list[str]) -> int:
    """The audit in this process; every call of an attack of the portfolio leaves a line where it
    begins."""
    from gradleak.attacks import portfolio
    from gradleak.audit import group
    from gradleak.cli import main

    # A shell ignores interrupts on behalf of what it runs in the background, and so would this
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group.SECONDS = seconds_a_call
    really = portfolio._attempt

    def attempt(member: Any, observations: Any, *rest: Any) -> Any:
        with log.open("a") as file:
            file.write(f"{member.name} {','.join(str(one.index) for one in observations)}\n")
        return really(member, observations, *rest)

    portfolio._attempt = attempt
    return main(["audit", *words])


def start(log: Path, out: Path, given: argparse.Namespace) -> subprocess.Popen[str]:
    words = [
        sys.executable,
        __file__,
        "--log",
        str(log),
        "--seconds-a-call",
        str(given.seconds_a_call),
    ]
    audit = [*(given.words or DEFAULT), "--out", str(out), "--device", "cpu", "--json"]
    process = subprocess.Popen(
        [*words, "--", *audit], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    STARTED.append(process)
    return process


def interrupt_after(process: subprocess.Popen[str], log: Path, seconds: float) -> str | None:
    """What it said when it was interrupted, so long after its first call began; none where it
    ended before."""
    wait_for_a_call(process, log)
    try:
        process.wait(seconds)
        return None
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        return said if process.returncode == 130 else None


def wait_for_a_call(process: subprocess.Popen[str], log: Path) -> None:
    before = len(lines(log))
    while process.poll() is None and len(lines(log)) == before:
        time.sleep(0.005)


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def has_parts(out: Path) -> bool:
    return any(out.glob("parts/*/*-*-*.*"))


def without_cost(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_cost(item) for key, item in value.items() if key not in OF_COST}
    return [without_cost(item) for item in value] if isinstance(value, list) else value


def record(out: Path) -> Any:
    (path,) = out.glob("[0-9a-f]" * 16 + ".json")
    return without_cost(json.loads(path.read_text()))


def draw_gaps(
    draw: random.Random, interrupts: int, took: float, share: float | None
) -> list[float]:
    """Seconds of attack from one interrupt to the next."""
    if share is not None:
        return [draw.uniform(0, took / share) for _ in range(interrupts)]
    moments = sorted(draw.uniform(0, took) for _ in range(interrupts))
    return [later - earlier for earlier, later in pairwise([0.0, *moments])]


def interrupt_audits(tally: Tally, folder: Path, given: argparse.Namespace) -> None:
    """Runs the audit undisturbed, then interrupts it, and notes what was wrong."""
    calm, calm_log = folder / "calm", folder / "calm.log"
    calmly = start(calm_log, calm, given)
    wait_for_a_call(calmly, calm_log)
    began = time.monotonic()
    if calmly.wait():
        raise SystemExit("The undisturbed audit failed.")
    took, wanted = time.monotonic() - began, lines(calm_log)
    print(f"undisturbed: {took:.1f} s from the first call on, {len(wanted)} calls", flush=True)
    gaps = draw_gaps(random.Random(0), given.interrupts, took, given.share)
    while tally.done < given.interrupts:
        tally.rounds += 1
        disturbed = folder / f"disturbed-{tally.rounds}"
        log = folder / f"disturbed-{tally.rounds}.log"
        # The same key, so that the hashes of secrets must be the same too
        shutil.copytree(calm / "keys", disturbed / "keys")
        before = tally.done
        while tally.done < given.interrupts:
            had = has_parts(disturbed)
            said = interrupt_after(start(log, disturbed, given), log, gaps[tally.done])
            if said is None:
                break
            tally.done += 1
            check_what_was_said(tally, said, had, has_parts(disturbed))
            print(
                f"interrupt {tally.done}: {len(lines(log))} calls begun so far;"
                f" {said.strip().splitlines()[-1]}",
                flush=True,
            )
        if start(log, disturbed, given).wait():  # to its end, or once more from its record
            raise SystemExit("The last run failed.")
        begun = Counter(lines(log)) - Counter(wanted)
        tally.repeated += sum(begun.values())
        if set(lines(log)) != set(wanted) or sum(begun.values()) > tally.done - before:
            tally.wrong.append(f"calls of round {tally.rounds}: {sorted(begun.items())}")
        if record(calm) != record(disturbed):
            tally.wrong.append(f"the record of round {tally.rounds} differs")


def check_what_was_said(tally: Tally, said: str, had: bool, kept: bool) -> None:
    """Holds the sentence about kept parts against what lies on the disk."""
    says_kept, says_lost = KEPT in said, LOST in said
    if (says_kept and not kept) or (says_lost and kept and not had) or says_kept == says_lost:
        there = "are" if kept else "are not"
        tally.wrong.append(f"parts {there} there, and it said: {said.strip()}")


def end_in_time(*_: object) -> NoReturn:
    raise OutOfTime


def main() -> int:
    reader = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    reader.add_argument("--interrupts", type=int, default=20)
    reader.add_argument("--seconds-a-call", type=float, default=60.0)
    reader.add_argument("--share", type=float, help="an interrupt falls within 1/SHARE")
    reader.add_argument("--most", type=int, default=1800, help="seconds that all of it may take")
    reader.add_argument("--folder", type=Path)
    reader.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    reader.add_argument("words", nargs="*")
    given = reader.parse_args()
    if given.log is not None:
        return audit_and_log(given.log, given.seconds_a_call, given.words)
    folder = given.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    tally = Tally(given.interrupts)
    signal.signal(signal.SIGALRM, end_in_time)
    signal.signal(signal.SIGTERM, end_in_time)
    signal.alarm(given.most)
    try:
        interrupt_audits(tally, folder, given)
    except OutOfTime:
        print(tally.summary("The time is over"))
        return 2
    except SystemExit as failed:
        tally.wrong.append(str(failed))
    finally:
        signal.alarm(0)
        for process in STARTED:
            process.kill()  # nothing where it has ended
    print(tally.summary("Wrong" if tally.wrong else "All done"))
    return int(bool(tally.wrong))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
