"""A default audit of eight batches interrupted (Ctrl-C) at random moments and run again, held to an
undisturbed run of itself.

    python benchmarks/interrupt_audit.py [--interrupts 20] [--seconds-a-call 60] [--most 1800] \\
        [--folder FOLDER] [-- words of gradleak audit …]

Without words it is `--target tiny --limit 8 --defense gaussian_noise:std=0.01`, where every attack
of the portfolio has its turn; `-- --limit 8` is the default audit itself. The moments are drawn
from the whole of an undisturbed run's attacks, from the beginning of the first call to the end of
the last; each is a call (an attack of the portfolio on a group of batches) and seconds after its
beginning, so that a busy machine does not crowd them into the first calls. All fall in one audit,
one after the other; where it ends before the last of them, since the machine was faster than in
the undisturbed run, the rest are drawn anew for another, in a new folder. Counted are the calls
that were begun: each interrupt may cost one. What is said of kept parts is held against the disk,
and every record, with its details, must be the undisturbed one's but for time and cost. After
--most seconds it ends where it is. The last line is a summary, whatever happened; the exit code is
0 where all was done and right, 1 where something was wrong, 2 where the time ran out.
tests/audit/test_interrupts.py does the same with a counter.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NoReturn

DEFAULT = ["--target", "tiny", "--limit", "8", "--defense", "gaussian_noise:std=0.01"]
OF_COST = ("seconds", "created", "peak_memory_bytes")
STARTED: list[ForkProcess] = []  # ended with the benchmark
LIBRARIES = ("gradleak.audit", "gradleak.cli.main", "transformers.models.bert.modeling_bert")
ENDED = "ended after "
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
    cut: set[str] = field(default_factory=set)  # calls in which an interrupt fell
    wrong: list[str] = field(default_factory=list)

    def summary(self, ended: str) -> str:
        found = "; ".join(self.wrong) or "every record that was finished is equal"
        return (
            f"{ended}: {self.done} of {self.wanted} interrupts in"
            f" {self.rounds} {'audit' if self.rounds == 1 else 'audits'},"
            f" in or after {len(self.cut)} of its calls, {self.repeated} calls repeated; {found}"
        )


@dataclass(frozen=True)
class Call:
    """A call that was begun, and for how long it ran; none where it was cut."""

    name: str
    seconds: float | None


@dataclass(frozen=True)
class Moment:
    """Where an interrupt falls: so many seconds after a call began, counted as the undisturbed
    audit makes them."""

    call: int
    seconds: float


def audit_and_log(log: Path, seconds_a_call: float, words: list[str]) -> None:
    """The audit in this process; every call of an attack of the portfolio leaves a line where it
    begins and one where it ends, and what the command says lies beside them."""
    from gradleak.attacks import portfolio
    from gradleak.audit import group
    from gradleak.cli import main

    # A shell ignores interrupts on behalf of what it runs in the background, and so would this
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)
    for stream, path in ((sys.stdout, Path(os.devnull)), (sys.stderr, said_by(log))):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    group.SECONDS = seconds_a_call
    really = portfolio._attempt

    def attempt(member: Any, observations: Any, *rest: Any) -> Any:
        batches = ",".join(str(one.index) for one in observations)
        began = time.monotonic()
        write_line(log, f"{member.name} {batches}")
        found = really(member, observations, *rest)
        write_line(log, f"{ENDED}{time.monotonic() - began}")
        return found

    portfolio._attempt = attempt
    code = main(["audit", *words])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command has ended
    sys.exit(code)


def said_by(log: Path) -> Path:
    """The file of what the newest run said on standard error."""
    return log.with_suffix(".said")


def write_line(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(f"{line}\n")


def start(log: Path, out: Path, given: argparse.Namespace) -> ForkProcess:
    """Begins the audit in a process of its own. It is a fork of this one, which has the libraries
    loaded: that takes longer than what is measured."""
    words = [*(given.words or DEFAULT), "--out", str(out), "--device", "cpu", "--json"]
    process = multiprocessing.get_context("fork").Process(
        target=audit_and_log, args=(log, given.seconds_a_call, words)
    )
    process.start()
    STARTED.append(process)
    return process


def load_libraries() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)


def failed(process: ForkProcess) -> bool:
    process.join()
    return process.exitcode != 0


def interrupt_at(
    moment: Moment, order: list[str], process: ForkProcess, log: Path, before: int
) -> str | None:
    """What it said when it was interrupted; none where it ended before. A call that it has behind
    it already, since the machine is faster now, is replaced by the first that it begins."""
    place = {call: number for number, call in enumerate(order)}
    while process.is_alive():
        places = [place.get(one.name, len(order)) for one in read_calls(log)[before:]]
        if any(one >= moment.call for one in places):
            break
        time.sleep(0.005)
    process.join(moment.seconds)
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, signal.SIGINT)
    process.join()
    said = said_by(log).read_text()
    if process.exitcode not in (0, 130):
        raise SystemExit(f"A run ended with {process.exitcode}: {said.strip()}")
    return said if process.exitcode == 130 else None


def read_calls(log: Path) -> list[Call]:
    """The calls that were begun so far, first to last."""
    found: list[Call] = []
    for line in log.read_text().splitlines() if log.exists() else []:
        if line.startswith(ENDED):
            found[-1] = Call(found[-1].name, float(line.removeprefix(ENDED)))
        else:
            found.append(Call(line, None))
    return found


def has_parts(out: Path) -> bool:
    return any(out.glob("parts/*/*-*-*.*"))


def without_cost(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_cost(item) for key, item in value.items() if key not in OF_COST}
    return [without_cost(item) for item in value] if isinstance(value, list) else value


def read_record(out: Path) -> Any:
    """The record and its details, which it names by a hash that holds their times."""
    (path,) = out.glob("[0-9a-f]" * 16 + ".json")
    (details,) = out.glob("details/*.json")
    record = json.loads(path.read_text())
    assert details.stem == f"{path.stem}-{record.pop('details')}"
    return without_cost([record, json.loads(details.read_text())])


def draw_moments(draw: random.Random, interrupts: int, calm: list[Call]) -> list[Moment]:
    """Moments anywhere between the first call's beginning and the last one's end, in order."""
    ends = list(accumulate(one.seconds or 0.0 for one in calm))
    moments = []
    for at in sorted(draw.uniform(0, ends[-1]) for _ in range(interrupts)):
        call = sum(end <= at for end in ends[:-1])
        moments.append(Moment(call, at - ends[call - 1] if call else at))
    return moments


def interrupt_audits(tally: Tally, folder: Path, given: argparse.Namespace) -> None:
    """Runs the audit undisturbed, then interrupts it, and notes what was wrong."""
    calm, calm_log = folder / "calm", folder / "calm.log"
    load_libraries()
    if failed(start(calm_log, calm, given)):
        raise SystemExit("The undisturbed audit failed.")
    calls, draw = read_calls(calm_log), random.Random(0)
    print(
        f"undisturbed: {len(calls)} calls that took"
        f" {sum(one.seconds or 0.0 for one in calls):.1f} s",
        flush=True,
    )
    while tally.done < given.interrupts:
        tally.rounds += 1
        disturbed = folder / f"disturbed-{tally.rounds}"
        log = folder / f"disturbed-{tally.rounds}.log"
        # The same key, so that the hashes of secrets must be the same too
        shutil.copytree(calm / "keys", disturbed / "keys")
        moments = draw_moments(draw, given.interrupts - tally.done, calls)
        before = tally.done
        for moment in moments:
            if not interrupt_once(tally, moment, calls, log, disturbed, given):
                break
        if failed(start(log, disturbed, given)):  # to its end, or once more from its record
            raise SystemExit("The last run failed.")
        made, order = ([one.name for one in found] for found in (read_calls(log), calls))
        again = Counter(made) - Counter(order)
        tally.repeated += sum(again.values())
        if set(made) != set(order) or sum(again.values()) > tally.done - before:
            tally.wrong.append(f"calls of round {tally.rounds}: {sorted(again.items())}")
        if read_record(calm) != read_record(disturbed):
            tally.wrong.append(f"the record of round {tally.rounds} differs")


def interrupt_once(
    tally: Tally,
    moment: Moment,
    calm: list[Call],
    log: Path,
    out: Path,
    given: argparse.Namespace,
) -> bool:
    """Interrupts the audit at the moment and notes what it said; returns whether it came to
    that."""
    had, begun = has_parts(out), len(read_calls(log))
    order = [one.name for one in calm]
    said = interrupt_at(moment, order, start(log, out, given), log, begun)
    if said is None:
        return False
    tally.done += 1
    calls = read_calls(log)
    tally.cut.add(calls[-1].name)
    check_what_was_said(tally, said, had, has_parts(out))
    print(
        f"interrupt {tally.done}, audit {tally.rounds}:"
        f" {'in' if calls[-1].seconds is None else 'after'} {calls[-1].name}, {len(calls)} calls"
        f" begun so far: {said.strip().splitlines()[-1]}",
        flush=True,
    )
    return True


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
    reader.add_argument("--most", type=int, default=1800, help="seconds that all of it may take")
    reader.add_argument("--folder", type=Path)
    reader.add_argument("words", nargs="*")
    given = reader.parse_args()
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
    except SystemExit as ended:
        tally.wrong.append(str(ended))
    finally:
        signal.alarm(0)
        for process in STARTED:
            process.kill()  # nothing where it has ended
    print(tally.summary("Wrong" if tally.wrong else "All done"))
    return int(bool(tally.wrong))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
