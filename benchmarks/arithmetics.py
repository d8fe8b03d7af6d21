"""The tests, and some audits, under every arithmetic this processor has: python
benchmarks/arithmetics.py.

Libraries choose their kernels by processor and number of threads, and every choice sums in another
order. Here the choice is made by hand (MKL_CBWR, ATEN_CPU_CAPABILITY, threads), each in a process
of its own that first shows its fingerprint: the bits of a fixed product, sum and eigenvectors. A
combination whose fingerprint was seen already would run the same again, and is skipped.

    python benchmarks/arithmetics.py  the default suite under every fingerprint
    python benchmarks/arithmetics.py --list  fingerprints only
    python benchmarks/arithmetics.py --most 4 --only tests/attacks -k span  a part, under four
    python benchmarks/arithmetics.py --other  what `make test` adds, under one other fingerprint
    python benchmarks/arithmetics.py --audits  twenty audits under four of them: the same proofs?

A line of JSON is added to build/arithmetics.jsonl as each combination ends. The exit code is 1
where anything failed or differed.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradleak.records.store import read_record

ROOT = Path(__file__).resolve().parent.parent
# MKL ignores what the processor does not have: its fingerprint is then an old one
MKL = (None, "COMPATIBLE", "AVX2", "AVX512")
ATEN = ("default", "avx2", "avx512")
THREADS = (1, 2)
FEWEST = 4  # different fingerprints that any processor has been seen to give
# What `make test` runs under one other fingerprint: tests that failed on another processor, and
# whatever proves something
OTHER = (
    "tests/core/test_update.py",
    "tests/matching/test_linear_algebra.py",
    "tests/test_contracts.py",
    "tests/test_picture_contracts.py",
    "tests/attacks/test_certificates.py",
    "tests/attacks/test_span.py",
    "tests/attacks/test_energy.py",
    "tests/attacks/test_portfolio.py",
    "tests/attacks/test_open_labels.py",
    "tests/attacks/test_noisy_words.py",
    "tests/bounds",
    "tests/attacks/test_learning_to_invert.py::test_an_inverter_beats_the_blind_guess_by_far_through_each_defense[sign]",
    "tests/attacks/test_lti_pictures.py::test_an_inverter_beats_the_mean_picture_by_far_through_each_defense",
)
# Up to a minute each. Targets are made up, or installed with the tests; data are the made-up
# canaries.
AUDITS = (
    "--target tiny --attack span --limit 4",
    "--target tiny --attack span --limit 2 --batch-size 2",
    "--target tiny --attack span --limit 4 --defense clipping:clip=0.1",
    "--target tiny --attack span --limit 4 --defense rounding:dtype=bf16",
    "--target tiny --attack energy:restarts=1 --limit 1 --layers 1-2 --modules query,key,value",
    "--target tiny --attack energy:restarts=0 --limit 1 --defense pruning:fraction_kept=0.1",
    "--target tiny --attack portfolio:steps=0 --limit 1",
    "--target tiny --attack portfolio:steps=0 --limit 1 --defense gaussian_noise:std=0.0001",
    "--target tiny --attack lamp_quick --limit 2",
    "--target tiny --attack dlg:steps=100 --limit 2",
    "--target tiny --attack tag:steps=100 --limit 2 --defense sign",
    "--target tiny --attack bag_of_words --limit 2",
    "--target tiny --attack span --limit 2 --protocol fedavg:steps=1",
    "--target tiny --attack lamp_quick --limit 2 --protocol fedavg:steps=2",
    "--target tiny_causal --attack span --limit 4",
    "--target tiny_causal --attack span --limit 2 --batch-size 2 --defense clipping:clip=0.1",
    "--target tiny_causal --attack portfolio:steps=0 --limit 2",
    "--target minilm --attack span --limit 3",
    (
        "--target minilm --attack energy:restarts=1 --limit 1 --layers 1 --modules"
        " query,key,value,ffn_in"
    ),
    (
        "--target minilm --attack portfolio:steps=0 --limit 2 --batch-size 2 --defense"
        " clipping:clip=0.1"
    ),
)


@dataclass(frozen=True)
class Arithmetic:
    """One way for this processor to calculate."""

    mkl: str | None
    aten: str | None
    threads: int

    def __str__(self) -> str:
        named = [
            f"MKL_CBWR={self.mkl}" if self.mkl else "",
            f"ATEN_CPU_CAPABILITY={self.aten}" if self.aten else "",
        ]
        return " ".join([*filter(None, named), f"threads={self.threads}"])

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a process that calculates so."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("MKL_CBWR", "ATEN_CPU_CAPABILITY")
        }
        chosen = {"MKL_CBWR": self.mkl, "ATEN_CPU_CAPABILITY": self.aten}
        threads = dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GRADLEAK_TEST_THREADS"), str(self.threads)
        )
        # Threads that wait by spinning take the other process's core
        waiting = {"OMP_WAIT_POLICY": "PASSIVE"}
        beside = {
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])
            )
        }
        return (
            kept
            | {name: value for name, value in chosen.items() if value}
            | threads
            | waiting
            | beside
        )


PLAIN = Arithmetic(None, None, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list", action="store_true", help="print the fingerprints and run nothing"
    )
    parser.add_argument(
        "--other",
        action="store_true",
        help="run the tests that `make test` adds, under one other fingerprint",
    )
    parser.add_argument("--audits", action="store_true", help="run the audits, not the tests")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="PATH",
        help="run these tests, or audits by number, only",
    )
    parser.add_argument(
        "-k", dest="matching", default="", help="run tests whose name matches, as in pytest"
    )
    parser.add_argument(
        "--most",
        type=int,
        default=None,
        help="fingerprints at most; of all, those most unlike. Audits take 4",
    )
    parser.add_argument(
        "--skip", type=int, default=0, help="of these, the first so many, which ran before"
    )
    parser.add_argument("--processes", type=int, default=2, help="test processes side by side")
    parser.add_argument(
        "--time-limit", type=float, default=3600, help="seconds for one combination"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "arithmetics.jsonl")
    parser.add_argument("--fingerprint", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.fingerprint:
        print(json.dumps(own_fingerprint()))
        return
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    if chosen.other:
        # The tests before have checked shapes, and they are the same here; a fifth quicker
        os.environ["JAXTYPING_DISABLE"] = "1"
        sys.exit(
            run_tests(
                other_than_plain(every_combination()),
                [path for path in OTHER if exists(path)],
                chosen,
            )
        )
    found = different(every_combination())
    if len(found) < FEWEST:
        print(
            f"This processor gives {len(found)} fingerprints only; {FEWEST} are wanted. Is torch"
            " built without MKL?"
        )
    if chosen.list:
        return
    if chosen.audits:
        sys.exit(compare_audits(spread(found, chosen.most or FEWEST), chosen))
    wanted = list(spread(found, chosen.most or len(found)).items())
    sys.exit(run_tests(dict(wanted[chosen.skip :]), chosen.only, chosen))


def own_fingerprint() -> dict[str, str]:
    """Short hashes of the bits of a product, sums and eigenvectors as this process calculates
    them, and its kernels' name."""
    import hashlib

    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(*shape, generator=generator) for shape in ((200, 300), (300, 150)))
    many = torch.randn(100_003, generator=generator)
    results = {
        "product": one @ other,
        "sum": torch.cat([many.sum()[None], many.norm()[None], torch.softmax(many, 0)]),
        "eigh": torch.linalg.eigh(one.double() @ one.double().mT).eigenvectors.contiguous(),
    }
    hashes = {
        name: hashlib.sha256(result.numpy().tobytes()).hexdigest()[:6]
        for name, result in results.items()
    }
    return hashes | {"kernels": torch.backends.cpu.get_cpu_capability()}


def every_combination() -> list[Arithmetic]:
    """All that the processor has, the plain one first."""
    best = fingerprint_of(PLAIN)["kernels"].lower()
    had = ATEN[: ATEN.index(best) + 1] if best in ATEN else ("default",)
    return [PLAIN, *(Arithmetic(*chosen) for chosen in itertools.product(MKL, had, THREADS))]


def fingerprint_of(arithmetic: Arithmetic) -> dict[str, str]:
    command = [sys.executable, str(Path(__file__).resolve()), "--fingerprint"]
    done = subprocess.run(
        command, env=arithmetic.environment, capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def different(combinations: Sequence[Arithmetic]) -> dict[Arithmetic, str]:
    """The combinations with a fingerprint of their own, and that fingerprint."""
    seen: dict[str, Arithmetic] = {}
    for arithmetic in combinations:
        parts = fingerprint_of(arithmetic)
        print_of = as_text(parts)
        if print_of in seen:
            print(f"{print_of}  {arithmetic}: as {seen[print_of]}, skipped", flush=True)
        else:
            seen[print_of] = arithmetic
            print(f"{print_of}  {arithmetic} ({parts['kernels']} kernels)", flush=True)
    print(f"{len(seen)} different fingerprints of {len(combinations)} combinations.", flush=True)
    return {arithmetic: print_of for print_of, arithmetic in seen.items()}


def unlikeness(one: str, other: str) -> int:
    """How many of product, sum and eigenvectors differ."""
    return sum(a != b for a, b in zip(one.split("-"), other.split("-"), strict=True))


def spread(found: Mapping[Arithmetic, str], most: int) -> dict[Arithmetic, str]:
    """The plain one and then, one by one, those least like the ones already there."""
    chosen = [next(iter(found))]
    while len(chosen) < min(most, len(found)):
        rest = [arithmetic for arithmetic in found if arithmetic not in chosen]
        chosen.append(
            max(rest, key=lambda one: min(unlikeness(found[one], found[there]) for there in chosen))
        )
    return {arithmetic: found[arithmetic] for arithmetic in chosen}


def other_than_plain(combinations: Sequence[Arithmetic]) -> dict[Arithmetic, str]:
    """The first with one thread (two would take both cores) that differs from the plain one in
    all, or else in most."""
    plain, best = as_text(fingerprint_of(combinations[0])), {combinations[0]: ""}
    most = 0
    for arithmetic in combinations[1:]:
        if arithmetic.threads == 1 and most < 3:
            print_of = as_text(fingerprint_of(arithmetic))
            if (unlike := unlikeness(print_of, plain)) > most:
                most, best = unlike, {arithmetic: print_of}
    print(
        "Once more, under another arithmetic: "
        + ", ".join(f"{arithmetic} ({text})" for arithmetic, text in best.items())
    )
    return best


def as_text(parts: Mapping[str, str]) -> str:
    return "-".join(parts[name] for name in ("product", "sum", "eigh"))


def exists(path: str) -> bool:
    return (ROOT / path.split("::")[0]).exists()


def run_tests(
    arithmetics: Mapping[Arithmetic, str], paths: Sequence[str], chosen: argparse.Namespace
) -> int:
    """Runs the tests under each, prints a table, and returns 1 where any failed."""
    lines = []
    for arithmetic, print_of in arithmetics.items():
        line = {"fingerprint": print_of, "arithmetic": str(arithmetic)}
        line |= one_suite(arithmetic, paths, chosen)
        keep(chosen.out, line)
        lines.append(line)
        print(
            f"{line['fingerprint']}  {arithmetic}: {line['passed']} passed, {len(line['failed'])}"
            " failed",
            flush=True,
        )
    print(f"\n{'fingerprint':20}  {'arithmetic':52}  passed  failed  skipped  seconds")
    for line in lines:
        numbers = (
            f"{line['passed']:6}  {len(line['failed']):6}  {line['skipped']:7} "
            f" {line['seconds']:7.0f}"
        )
        print(f"{line['fingerprint']:20}  {line['arithmetic']:52}  {numbers}")
        for name in line["failed"]:
            print(f"    {name}")
    return int(any(line["failed"] or not line["passed"] for line in lines))


def one_suite(
    arithmetic: Arithmetic, paths: Sequence[str], chosen: argparse.Namespace
) -> dict[str, object]:
    """The outcome of pytest under one arithmetic."""
    processes = 1 if arithmetic.threads > 1 else chosen.processes
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "not long",
            "-n",
            str(processes),
            f"--junit-xml={report}",
            *paths,
        ]
        command += ["-k", chosen.matching] if chosen.matching else []
        code = run_limited(command, arithmetic, chosen.time_limit)
        seconds = round(time.monotonic() - began, 1)
        if not report.exists():
            return {
                "passed": 0,
                "failed": [f"pytest ended with exit code {code} and no report"],
                "skipped": 0,
                "seconds": seconds,
            }
        cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if has(case, "failure") or has(case, "error")
    ]
    skipped = sum(has(case, "skipped") for case in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": failed,
        "skipped": skipped,
        "seconds": seconds,
    }


def has(case: xml.etree.ElementTree.Element, outcome: str) -> bool:
    return case.find(outcome) is not None


def run_limited(
    command: Sequence[str], arithmetic: Arithmetic, seconds: float, **more: object
) -> int:
    """Runs a command in a group of its own, which is ended as a whole after so long."""
    process = subprocess.Popen(
        command, env=arithmetic.environment, cwd=ROOT, start_new_session=True, **more
    )  # type: ignore[call-overload]
    try:
        return int(process.wait(timeout=seconds))
    except subprocess.TimeoutExpired:
        print(f"{arithmetic}: not done after {seconds:.0f} s, ended", flush=True)
        return 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def compare_audits(arithmetics: Mapping[Arithmetic, str], chosen: argparse.Namespace) -> int:
    """Runs each audit under each arithmetic; returns 1 where one fails or the certified guesses
    are not the same."""
    numbers = [int(number) for number in chosen.only] or range(1, len(AUDITS) + 1)
    differing = []
    for number in numbers:
        audit = AUDITS[number - 1]
        print(f"\n{number}. gradleak audit {audit}", flush=True)
        found = {}
        for arithmetic, print_of in arithmetics.items():
            result = one_audit(audit, arithmetic, chosen.time_limit)
            keep(
                chosen.out,
                {"fingerprint": print_of, "arithmetic": str(arithmetic), "audit": audit} | result,
            )
            found[arithmetic] = result
            scores = ", ".join(f"{name} {value:.4f}" for name, value in result["scores"].items())
            certified = f"{len(result['certified'])} of {result['guesses']} certified"
            print(
                f"   {print_of}  {certified}, {scores}{result['error']}  ({result['seconds']:.0f}"
                f" s)  {arithmetic}",
                flush=True,
            )
        if not agree(list(found.values())):
            differing.append(number)
    print(f"\n{len(numbers)} audits under {len(arithmetics)} fingerprints: ", end="")
    print(
        f"those of number {differing} failed or certified other guesses."
        if differing
        else "all certified the same guesses."
    )
    return int(bool(differing))


def one_audit(audit: str, arithmetic: Arithmetic, seconds: float) -> dict[str, object]:
    """The certified guesses by batch and place, and the mean scores, of one audit in a process
    of its own."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "gradleak",
            "audit",
            *audit.split(),
            "--device",
            "cpu",
            "--seed",
            "0",
            "--out",
            folder,
        ]
        with open(Path(folder) / "said.txt", "w+", encoding="utf-8") as said:
            code = run_limited(command, arithmetic, seconds, stdout=said, stderr=said)
            said.seek(0)
            last = [line.strip() for line in said.read().splitlines() if line.strip()][-1:]
        records = [read_record(path).to_json() for path in Path(folder).glob("*.json")]
    attacks = [attack for record in records for attack in record["attacks"].values()]
    examples = [example for attack in attacks for example in attack["examples"]]
    certified = {
        f"{one['batch']}.{one['position']}": one["guess"] for one in examples if one["certified"]
    }
    scores = {
        name: score["mean"]
        for attack in attacks
        for name, score in attack["scores"].items()
        if name in SHOWN
    }
    error = "" if code == 0 else f"exit code {code}: {' '.join(last)}"
    taken = round(time.monotonic() - began, 1)
    return {
        "certified": certified,
        "guesses": len(examples),
        "scores": scores,
        "error": error,
        "seconds": taken,
    }


SHOWN = ("rouge1", "exact_match", "token_accuracy")


def agree(results: Sequence[Mapping[str, object]]) -> bool:
    """Whether all ended well and certified the same guesses; prints where scores or certificates
    differ."""
    first = results[0]
    for name in first["scores"]:  # type: ignore[attr-defined]
        values = [result["scores"].get(name, float("nan")) for result in results]  # type: ignore[attr-defined]
        if max(values) > min(values):
            print(f"   {name} differs by {max(values) - min(values):.4f}")
    places = sorted({place for result in results for place in result["certified"]})  # type: ignore[attr-defined]
    for place in places:
        guesses = [result["certified"].get(place) for result in results]  # type: ignore[attr-defined]
        if len(set(guesses)) > 1:
            print(f"   certified otherwise at {place}: {guesses}")
    return not any(result["error"] for result in results) and all(
        result["certified"] == first["certified"] for result in results
    )


def keep(path: Path, line: Mapping[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dict(line), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
