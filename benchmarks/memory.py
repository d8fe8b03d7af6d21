"""What audits take in memory and time, each in a process of its own: python benchmarks/memory.py
[--only lamp] [--memory 6GB].

Prints for each command the limit, the peak of the process (as the system counts it), the seconds in
all and of the attack, and how it ended: with a record and what was rebuilt, with an error, or
killed. BERT-base is a random model of that shape.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradleak.core.memory import in_words, parse_memory
from gradleak.records.store import read_record

BERT_BASE = "BERT-BASE"  # stands for the folder of a random model of that shape
BATCH = "audit --data canaries --limit 1"
COMMANDS = {
    "portfolio-48": f"{BATCH} --batch-size 48 --attack portfolio:steps=0 --time-limit 120",
    "energy-8": f"{BATCH} --batch-size 8 --attack energy:restarts=0 --time-limit 60",
    "lamp-bert-base-batch": (
        f"{BATCH} --target {BERT_BASE} --batch-size 16 --attack lamp_cos --time-limit 60"
    ),
    "lamp-bert-base": (
        f"audit --data canaries --limit 4 --target {BERT_BASE} --attack lamp_cos:starts=50"
        " --time-limit 60"
    ),
    **{
        f"default-{size}": f"{BATCH} --batch-size {size} --time-limit 120"
        for size in (8, 16, 32, 64)
    },
}
OVER = 1.1  # times the limit that a peak may be


@dataclass(frozen=True)
class Measured:
    """What one command took."""

    name: str
    peak: int  # bytes
    seconds: float
    attack_seconds: float | None
    ended: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="commands whose name has this in it")
    parser.add_argument("--memory", default="6GB")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    limit = parse_memory(chosen.memory)
    print(
        f"{'command':<22} {'limit':>7} {'peak':>7} {'kept':>5} {'seconds':>8} {'attack':>7}  ended"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, line in COMMANDS.items():
            if chosen.only in name:
                found = measure(name, line, chosen.memory, chosen.threads, Path(folder))
                kept = "yes" if found.peak <= OVER * limit else "NO"
                attack = "" if found.attack_seconds is None else f"{found.attack_seconds:.0f}"
                print(
                    f"{name:<22} {in_words(limit):>7} {in_words(found.peak):>7} {kept:>5}"
                    f" {found.seconds:>8.0f} {attack:>7}  {found.ended}",
                    flush=True,
                )


def measure(name: str, line: str, memory: str, threads: int, folder: Path) -> Measured:
    """Runs one command and waits for it; the peak is of that process alone."""
    words = [str(bert_base(folder)) if word == BERT_BASE else word for word in line.split()]
    flags = ["--memory", memory, "--device", "cpu", "--json", "--out", str(folder / name)]
    command = [sys.executable, "-m", "gradleak", *words, *flags]
    began = time.monotonic()
    with open(folder / f"{name}.json", "wb") as out, open(folder / f"{name}.txt", "wb") as errors:
        process = subprocess.Popen(
            command, stdout=out, stderr=errors, env={**os.environ, "OMP_NUM_THREADS": str(threads)}
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if process.returncode:
        said = (folder / f"{name}.txt").read_text().strip().splitlines()
        how = (
            f"killed by signal {-process.returncode}"
            if process.returncode < 0
            else f"exit {process.returncode}"
        )
        return Measured(
            name, peak, seconds, None, f"{how}: {said[-1] if said else 'without a word'}"
        )
    record = read_record(folder / f"{name}.json").to_json()
    (attack,) = record["attacks"].values()
    return Measured(name, peak, seconds, attack["cost"]["seconds"], described(attack))


def described(attack: dict[str, Any]) -> str:
    """What was rebuilt, in a line."""
    examples, scores = attack["examples"], attack["scores"]
    mean = {name: 100 * scores[name]["mean"] for name in ("exact_match", "rouge1")}
    return (
        f"record: {len(examples)} texts, {mean['exact_match']:.0f} % word for word, rouge1"
        f" {mean['rouge1']:.0f} %"
    )


def bert_base(folder: Path) -> Path:
    """A random classifier of BERT-base's shape with MiniLM's words."""
    made = folder / "bert-base"
    if not made.is_dir():
        import torch
        from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

        from gradleak.targets.minilm import installed_folder

        torch.manual_seed(0)
        BertForSequenceClassification(BertConfig()).save_pretrained(made)
        AutoTokenizer.from_pretrained(installed_folder()).save_pretrained(made)
    return made


if __name__ == "__main__":
    main()
