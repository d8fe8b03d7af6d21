"""A default audit of eight batches interrupted (Ctrl-C) at random moments and run again, held to an
undisturbed run of itself.

    python benchmarks/interrupt_audit.py [--interrupts 20] [--seconds-a-call 60] \\
        [--folder FOLDER] [words of gradleak audit …]

Without words it is `--target tiny --limit 8 --defense gaussian_noise:std=0.01`, where every attack
of the portfolio has its turn. Each interrupt falls at a random moment of a twentieth of an
undisturbed run's time, from the first call on. Where the audit ends before it, another is begun in
a new folder. Counted are the calls that were begun (an attack of the portfolio on a group of
batches): each interrupt may cost one. What is said of kept parts is held against the disk, and
every record must be the undisturbed one's but for time and cost. tests/audit/test_interrupts.py
does the same with a counter.
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
from pathlib import Path
from typing import Any

DEFAULT = ["--target", "tiny", "--limit", "8", "--defense", "gaussian_noise:std=0.01"]
OF_COST = ("seconds", "created", "peak_memory_bytes")
KEPT, LOST = "Finished parts are kept", "before a part was finished"


def audit_and_log(log: Path, seconds_a_call: float, words: list[str]) -> int:
    """The audit in this process; every call of an attack of the portfolio leaves a line where it
    begins."""
    from gradleak.attacks import portfolio
    from gradleak.audit import group
    from gradleak.cli import main

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
    return subprocess.Popen(
        [*words, "--", *audit], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


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


def main() -> None:
    reader = argparse.ArgumentParser()
    reader.add_argument("--interrupts", type=int, default=20)
    reader.add_argument("--seconds-a-call", type=float, default=60.0)
    reader.add_argument(
        "--share", type=float, default=20.0, help="an interrupt falls within 1/SHARE"
    )
    reader.add_argument("--folder", type=Path)
    reader.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    reader.add_argument("words", nargs="*")
    given = reader.parse_args()
    if given.log is not None:
        raise SystemExit(audit_and_log(given.log, given.seconds_a_call, given.words))
    folder = given.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    calm, calm_log = folder / "calm", folder / "calm.log"
    calmly = start(calm_log, calm, given)
    wait_for_a_call(calmly, calm_log)
    began = time.monotonic()
    if calmly.wait():
        raise SystemExit("The undisturbed audit failed.")
    took, wanted = time.monotonic() - began, lines(calm_log)
    print(f"undisturbed: {took:.1f} s from the first call on, {len(wanted)} calls", flush=True)
    draw, done, rounds, repeated, wrong = random.Random(0), 0, 0, 0, list[str]()
    while done < given.interrupts:
        rounds += 1
        disturbed, log = folder / f"disturbed-{rounds}", folder / f"disturbed-{rounds}.log"
        # The same key, so that the hashes of secrets must be the same too
        shutil.copytree(calm / "keys", disturbed / "keys")
        before = done
        while done < given.interrupts:
            had = has_parts(disturbed)
            said = interrupt_after(
                start(log, disturbed, given), log, draw.uniform(0, took / given.share)
            )
            if said is None:
                break
            done += 1
            kept = has_parts(disturbed)
            if (
                (KEPT in said and not kept)
                or (LOST in said and kept and not had)
                or not (KEPT in said or LOST in said)
            ):
                wrong.append(
                    f"parts {'are' if kept else 'are not'} there, and it said: {said.strip()}"
                )
            print(
                f"interrupt {done}: {len(lines(log))} calls begun so far;"
                f" {said.strip().splitlines()[-1]}",
                flush=True,
            )
        if start(log, disturbed, given).wait():  # to its end, or once more from its record
            raise SystemExit("The last run failed.")
        begun = Counter(lines(log)) - Counter(wanted)
        repeated += sum(begun.values())
        if set(lines(log)) != set(wanted) or sum(begun.values()) > done - before:
            wrong.append(f"calls of round {rounds}: {sorted(begun.items())}")
        if record(calm) != record(disturbed):
            wrong.append(f"the record of round {rounds} differs")
    print(
        wrong
        or f"{done} interrupts of {rounds} audits, {repeated} calls repeated, every record equal"
    )
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
