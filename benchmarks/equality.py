"""Shows that a change of the code changed no number: python benchmarks/equality.py --base COMMIT.

Runs a fixed list of small audits and one study with this tree and with COMMIT's, and compares the
records field by field: guesses and flags must be identical, numbers equal to 1e-9. Times, memory,
dates, versions and keyed hashes are not compared.

    python benchmarks/equality.py --base HEAD~3  both trees, then the comparison
    python benchmarks/equality.py --base HEAD~3 --only span  audits with "span" in their options
    python benchmarks/equality.py --base HEAD~3 --ignore stages  but for fields that are to differ

Records lie under build/equality, one folder for each tree's commit and audit. An audit that has its
record there is not run again, so that an interrupted comparison goes on, and a base is computed
once. This tree's own are made anew. The exit code is 1 where a field differs or an audit ended
otherwise.
"""

import argparse
import concurrent.futures
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "equality"
TOLERANCE = 1e-9  # of numbers, relative to the larger or absolute
# What differs between two runs of one program, and keyed hashes, whose key is drawn for each folder
NEVER_EQUAL = ("created", "versions", "machine", "seconds", "cost", "peak_memory_bytes", "hash")

TEXT = "--target tiny --limit 2"
PICTURES = "--target tiny_image --data shapes:side=8 --limit 3"
LESSONS = "steps=60,training_batch=16"
AUDITS = (
    # Every attack on texts, undefended
    f"{TEXT} --attack blind --attack span --attack bag_of_words",
    f"{TEXT} --attack dlg:steps=60 --attack tag:steps=60",
    f"{TEXT} --attack lamp_cos:steps=120,starts=20 --attack lamp_l2l1:steps=120,starts=20",
    f"{TEXT} --attack lamp_quick",
    f"{TEXT} --attack partial_gradients:steps=120,starts=20 --layers 1 --modules query,key",
    f"{TEXT} --attack span_continuous --limit 1",
    "--target tiny --limit 1 --attack lamp_plus:steps=100,starts=20",
    "--target tiny --limit 1 --attack energy:restarts=1 --layers 1-2 --modules query,key,value",
    "--target tiny --limit 1 --attack portfolio:steps=0",
    # Batches, language models, local steps, what is not told
    f"{TEXT} --attack span --attack lamp_quick --batch-size 2",
    "--target tiny_causal --attack span --attack tag:steps=60 --limit 2",
    "--target tiny_causal --attack portfolio:steps=0 --limit 1",
    f"{TEXT} --attack span --attack lamp_quick --protocol fedavg:steps=2",
    f"{TEXT} --attack tag:steps=60,labels=derived,lengths=derived --know batch_size,defense",
    # Through each kind of defense
    f"{TEXT} --attack lamp_quick --defense sign",
    f"{TEXT} --attack lamp_quick --attack dlg:steps=60 --defense gaussian_noise:std=0.001",
    f"{TEXT} --attack lamp_quick --defense masking:fraction_zeroed=0.5",
    f"{TEXT} --attack lamp_quick --defense quantisation",
    f"{TEXT} --attack span --defense clipping:clip=0.1",
    f"{TEXT} --attack span --defense rounding:dtype=bf16",
    f"{TEXT} --attack tag:steps=60 --defense dp_sgd",
    "--target tiny --limit 1 --attack energy:restarts=0 --defense pruning:fraction_kept=0.1",
    "--target tiny --limit 1 --attack energy:restarts=0 --defense gaussian_noise:std=0.0001",
    # What learns first, on texts
    f"{TEXT} --attack lti_p:{LESSONS} --attack lti:{LESSONS} --attack lti_plus:{LESSONS}",
    f"{TEXT} --attack lti_p:{LESSONS} --defense sign",
    f"{TEXT} --attack lti_p:{LESSONS} --defense pruning:fraction_kept=0.1,scope=update",
    (
        f"{TEXT} --attack lti_p:{LESSONS} --attack lti_plus:{LESSONS} --defense"
        " gaussian_noise:std=0.01"
    ),
    f"{TEXT} --attack lti_p:{LESSONS} --batch-size 2",
    f"--target tiny_causal --limit 2 --attack lti_p:{LESSONS} --attack lti_plus:{LESSONS}",
    # Pictures
    f"{PICTURES} --attack blind --attack ig:steps=60",
    f"{PICTURES} --attack ig:steps=60 --defense sign",
    (
        f"{PICTURES} --attack lti_pictures:steps=60,width=64 --attack"
        " lti_pictures_paper:steps=60,width=64"
    ),
    f"{PICTURES} --attack lti_pictures:steps=60,width=64 --defense sign",
    (
        f"{PICTURES} --attack"
        " lti_pictures:steps=60,width=64,directions=null,mirrored=true,shifted=1 --defense"
        " pruning:fraction_kept=0.1"
    ),
    f"{PICTURES} --attack lti_pictures:steps=60,width=64 --defense gaussian_noise:std=0.1",
    f"{PICTURES} --attack lti_pictures:steps=60,width=64 --batch-size 2 --limit 2",
    # A real model
    "--target minilm --attack span --attack lamp_quick:steps=60 --limit 2",
    "--target minilm --attack energy:restarts=1 --limit 1 --layers 2 --modules query",
    # What learns first, further: running text, a prior, factors through DP-SGD, hashed pictures
    f"--target tiny_causal --limit 2 --attack lti:{LESSONS},cut_anywhere=true",
    f"--target tiny_causal --limit 2 --attack lti_p:{LESSONS},prior_weight=0.3",
    (
        f"{TEXT} --batch-size 2 --defense dp_sgd --attack"
        " lti_plus:epochs=2,training_batch=16,prior_weight=0.3,token_width=64"
    ),
    (
        f"{PICTURES} --attack"
        " lti_pictures:steps=60,width=64,fraction=0.3,signed=true,relabelled=0.2"
        ",variation_weight=0.1"
    ),
)
STUDY = """
target: tiny
data: canaries
limit: 2
attacks: [span, "dlg:steps=40", lamp_quick]
defenses: [[], ["sign"]]
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, help="the commit to compare with")
    parser.add_argument("--only", default="", help="audits whose options contain this, alone")
    parser.add_argument(
        "--ignore", action="append", default=[], help="a field that is meant to differ"
    )
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    base = check_out(chosen.base)
    here = PLACE / "here"
    shutil.rmtree(here, ignore_errors=True)
    jobs = [(number, audit) for number, audit in enumerate(AUDITS, start=1) if chosen.only in audit]
    jobs += [] if chosen.only else [(0, "")]
    with concurrent.futures.ThreadPoolExecutor(chosen.workers) as pool:
        differing = sum(pool.map(lambda job: compare_one(*job, base, here, chosen.ignore), jobs))
    print(f"{len(jobs) - differing} of {len(jobs)} are equal to {chosen.base}.")
    sys.exit(int(differing > 0))


def check_out(commit: str) -> Path:
    """Returns a folder with the tree of a commit and room for its records; makes it where it is
    not there."""
    name = subprocess.run(
        ["git", "rev-parse", "--short", f"{commit}^{{commit}}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    folder = PLACE / name
    if not (folder / "tree" / "src").exists():
        (folder / "tree").mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(
            ["git", "archive", name, "src", "studies"], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", str(folder / "tree")], input=packed.stdout, check=True)
    return folder


def compare_one(number: int, audit: str, base: Path, here: Path, ignored: Sequence[str]) -> bool:
    """Runs one audit, or the study (number 0), with both trees; prints where they differ and
    returns whether they do."""
    before = run_one(number, audit, base / "tree", base)
    after = run_one(number, audit, ROOT, here)
    problems = list(find_differences(before, after, (*NEVER_EQUAL, *ignored)))
    name = f"{number}. audit {audit}" if number else "the study"
    print(f"{'DIFFERS' if problems else 'equal  '}  {name}", flush=True)
    for problem in problems[:10]:
        print(f"         {problem}", flush=True)
    return bool(problems)


def run_one(number: int, audit: str, tree: Path, place: Path) -> dict[str, Any]:
    """Returns the records of one audit by a tree, by the names of their files, or how it failed."""
    out = place / f"{number:02}"
    kept = out / "all.json"
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return found
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if number:
        command = ["audit", *audit.split(), "--seed", "0", "--device", "cpu", "--out", str(out)]
    else:
        (out / "study.yaml").write_text(STUDY, encoding="utf-8")
        command = ["run", str(out / "study.yaml"), "--device", "cpu", "--out", str(out)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = os.environ | threads | {"PYTHONPATH": str(tree / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "gradleak", *command],
        env=environment,
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    records = {path.stem: read_whole(path) for path in find_records(out)}
    outcome = {"exit code": done.returncode, "records": records}
    if done.returncode:
        outcome["said"] = done.stderr.strip()[-500:]
    kept.write_text(json.dumps(outcome), encoding="utf-8")
    return outcome


def find_records(out: Path) -> list[Path]:
    """The records of audits under a folder, whatever else lies there."""
    return sorted(
        path
        for path in out.rglob("*.json")
        if '"gradleak.record/' in path.read_text(encoding="utf-8")[:200]
    )


def read_whole(path: Path) -> dict[str, Any]:
    """Returns a record as JSON has it, with what lies in a file beside it."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    record.pop("columns", None)  # the same numbers again
    if (name := record.pop("details", "")) != "":
        file = path.parent / "details" / f"{record['id']}-{name}.json"
        details = json.loads(file.read_text(encoding="utf-8"))
        record["secrets"] = details["secrets"]
        for key, attack in record["attacks"].items():
            attack |= {part: details[part][key] for part in ("examples", "batches")}
    return record


def find_differences(one: Any, other: Any, ignored: Sequence[str], path: str = "") -> Iterator[str]:
    """Yields a line for each place at which two plain values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other} - set(ignored)):
            if name not in one or name not in other:
                yield f"{path}/{name} is in {'the base' if name in one else 'this tree'} only"
            else:
                yield from find_differences(one[name], other[name], ignored, f"{path}/{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from find_differences(mine, theirs, ignored, f"{path}[{place}]")
    elif not are_equal(one, other):
        yield f"{path}: {str(one)[:120]} before, {str(other)[:120]} now"


def are_equal(one: Any, other: Any) -> bool:
    """Numbers to the tolerance; all else exactly."""
    numbers = (int, float)
    if (
        isinstance(one, numbers)
        and isinstance(other, numbers)
        and not isinstance(one, bool)
        and not isinstance(other, bool)
    ):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return type(one) is type(other) and one == other


if __name__ == "__main__":
    main()
