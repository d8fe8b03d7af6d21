"""Ten thousand stored cells: how long status, tables, report and gate take, and how large the page
is.

    python benchmarks/many_cells.py [CELLS] [EXAMPLES]

The records are made up (numbers drawn at random, words from a list) and have the shape and about
the size of real ones.
"""

import itertools
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gradleak.records.schema import Record, spec_id
from gradleak.records.store import write_record

WORDS = (
    "the a my his her doctor bank code key river is was will never always green blue seven nine"
    " call wire meet".split()
)
METRICS = [
    "rouge1",
    "rouge2",
    "rougeL",
    "rouge1_legacy",
    "rouge2_legacy",
    "rougeL_legacy",
    "exact_match",
    "token_accuracy",
]
METRICS += ["bag_f1", "secret_recall", "secret_edit_distance"]
ATTACKS = [
    "span",
    "energy",
    "portfolio",
    "lamp_cos",
    "lamp_l2l1",
    "lamp_plus",
    "tag",
    "dlg",
    "partial_gradients",
    "bag_of_words",
]
DEFENSES = [
    [],
    *([{"name": "gaussian_noise", "std": 10.0**-power}] for power in range(1, 6)),
    [{"name": "sign"}],
]
DEFENSES += [[{"name": "pruning", "fraction_kept": share}] for share in (0.01, 0.1, 0.5)]
DATA = ["cola", "sst2", "rotten_tomatoes", "canaries", "notes"]
FAST = 10.0  # seconds
LARGEST = 5 * 2**20  # bytes


def score(values: list[float]) -> dict[str, object]:
    mean = sum(values) / len(values)
    blind = {"blind": 0.1, "blind_low": 0.05, "blind_high": 0.2}
    return {
        "mean": mean,
        "low": mean * 0.9,
        "high": min(1, mean * 1.1),
        **blind,
        "unit": "fraction",
        "direction": "higher",
        "n": 8,
    }


def record(
    attack: str, defense: list[dict[str, object]], data: str, seed: int, examples: int
) -> dict[str, object]:
    """A record as an audit writes it."""
    draw = random.Random(f"{attack}{defense}{data}{seed}")
    spec = {
        "target": {"name": "minilm"},
        "data": {"name": data},
        "limit": examples,
        "batch_size": 1,
        "protocol": {"name": "fedsgd"},
        "defenses": defense,
        "view": {"name": "lamp"},
        "attacks": [{"name": attack, "steps": 9}],
        "know": ["labels", "lengths"],
        "prior": {"name": "english"},
        "metrics": METRICS,
        "draws": 1,
        "seed": seed,
        "dtype": "float32",
        "time_limit": None,
    }
    values = [
        {name: draw.random() for name in METRICS} | {"exact_match": float(draw.random() < 0.2)}
        for _ in range(examples)
    ]
    guesses = [" ".join(draw.choices(WORDS, k=9)) for _ in range(examples)]
    scores = {name: score([one[name] for one in values]) for name in METRICS}
    losses = [[step, 1 / (1 + step)] for step in range(0, 2000, 100)]
    flags = [{"name": "few_examples", "detail": "8 examples were attacked."}]
    flags += (
        [{"name": "near_chance", "detail": "The gain may be as low as -0.1."}]
        if draw.random() < 0.4
        else []
    )
    attacked = {
        "spec": spec["attacks"][0],
        "scores": scores,
        "knowledge": ["labels", "lengths"],
        "flags": flags,
        "stages": [],
        "cost": {"seconds": 10 * draw.random(), "steps": 2000, "peak_memory_bytes": None},
        "examples": [
            {
                "batch": place,
                "position": 0,
                "guess": guess,
                "guess_legacy": f"[CLS] {guess} [SEP]",
                "certified": False,
                "values": one,
                "blind_values": dict.fromkeys(METRICS, 0.1),
            }
            for place, (guess, one) in enumerate(zip(guesses, values, strict=True))
        ],
        "batches": [
            {
                "batch": place,
                "loss": 0.1,
                "objective_at_guess": 0.1,
                "objective_at_truth": 0.1,
                "update_norm": 1.0,
                "losses": losses,
                "guesses": [[0, [guess]], [1000, [guess]]],
                "seconds": 1.0,
                "steps": 2000,
            }
            for place, guess in enumerate(guesses)
        ],
    }
    return {
        "schema": "gradleak.record/1",
        "id": spec_id(spec),
        "created": "2026-01-02T03:04:05+00:00",
        "spec": spec,
        "versions": {"gradleak": "0.1.0"},
        "machine": {"device": "cpu", "name": "made up"},
        "data": {"hash": data, "batches": examples, "examples": examples},
        "target": {
            "name": "minilm",
            "fingerprint": "f" * 64,
            "parameters": 100,
            "visible_parameters": 50,
        },
        "secrets": [
            {"batch": place, "position": 0, "hash": "a" * 64, "tokens": 9}
            for place in range(examples)
        ],
        "attacks": {attack: attacked},
        "worst_case": scores,
        "flags": flags[:1],
        "findings": [],
        "guarantees": [],
    }


def write(folder: Path, cells: int, examples: int) -> int:
    """Writes so many records and their study; returns their bytes."""
    grid = itertools.islice(itertools.product(range(cells), DATA, DEFENSES, ATTACKS), cells)
    planned = []
    for seed, data, defense, attack in grid:
        plain = record(attack, defense, data, seed, examples)
        write_record(folder, Record.from_json(plain))
        planned.append(
            {"id": plain["id"], "axes": {"attacks": attack, "data": data, "seed": str(seed)}}
        )
    (folder / "study.json").write_text(
        json.dumps({"schema": "gradleak.study/1", "name": "many", "cells": planned})
    )
    return sum(path.stat().st_size for path in folder.rglob("*.json"))


def timed(*words: str) -> tuple[float, float]:
    """Seconds by the clock, and of CPU time, which count: they are the same however busy the
    machine is."""
    began, used = time.monotonic(), cpu_seconds()
    done = subprocess.run(
        [sys.executable, "-m", "gradleak", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 4), done.stderr  # the gate is shut
    return time.monotonic() - began, cpu_seconds() - used


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    cells, examples = (
        int(word) for word in (sys.argv[1:] + ["10000", "8"][len(sys.argv) - 1 :])[:2]
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(
            f"{cells} cells of {examples} examples: {write(folder, cells, examples) / 2**20:.0f}"
            " MiB of records"
        )
        slow = []
        for words in (["status"], ["tables"], ["report"], ["gate", "--max", "exact_match=0.05"]):
            seconds, used = timed(words[0], name, *words[1:])
            slow += [words[0]] if used >= FAST else []
            print(f"{words[0]:8} {seconds:5.1f} s, {used:5.1f} s of CPU time")
        page = (folder / "report.html").stat().st_size
        print(f"report.html {page / 2**20:.2f} MiB")
    if slow or page >= LARGEST:
        sys.exit(
            f"Too slow ({', '.join(slow)}) or too large: each must take under {FAST:g} s of CPU"
            " time, the page under 5 MiB."
        )


if __name__ == "__main__":
    main()
