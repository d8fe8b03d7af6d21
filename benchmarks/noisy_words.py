"""What `energy` rebuilds through known noise by searching the whole vocabulary, on rows of a split.

DP-SGD (C = 1) by its noise multiplier, or `10x`: plain Gaussian noise of ten times the gradient's
norm. Batch 1, everything seen, label and length known. One line of JSON a sentence goes to --out,
without its words, so that a run that was cut goes on from there.

    python benchmarks/noisy_words.py --noise 0.01 --rows 600-619 --out noisy_words.jsonl
    python benchmarks/noisy_words.py --table noisy_words.jsonl
"""

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import torch

from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.audit.client import observe, private_batches, update_norm
from gradleak.audit.objectives import objectives
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Bench
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.records.statistics import interval


def measure(given: argparse.Namespace) -> None:
    """Appends one line a sentence that is not there yet."""
    first, last = map(int, given.rows.split("-"))
    plain = {
        "target": given.target,
        "data": f"{given.data}:split=dev,selection=all,rows={given.rows}",
        "limit": last - first + 1,
        "attacks": "energy",
    }
    times = given.noise.endswith("x")
    if not times:
        plain["defenses"] = [f"dp_sgd:noise_multiplier={given.noise}"]
    spec = AuditSpec.from_plain(plain)
    target = spec.target.open(torch.device("cpu"))
    prior, attack = spec.prior.open(target), EnergyAttack(candidates=given.candidates)
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    done = {(one["row"], one["noise"]) for one in map(json.loads, lines)}
    for index, private in enumerate(private_batches(spec, target)):
        if (first + index, given.noise) in done:
            continue
        seen = observe(spec, target, private, index)
        if times:
            seen = add_noise(seen, float(given.noise[:-1]))
        began, bench = time.process_time(), Bench(Streams.root("attacker", spec.seed), prior)
        (guess,) = attack.reconstruct([seen], bench)
        seconds = time.process_time() - began
        at_guess, at_truth = objectives(attack, [seen], [private], [guess], prior)
        true = private.batch.ids[0].tolist()[1:-1]
        pairs = list(zip(guess.sentences[0][1:-1], true, strict=True))
        right = sum(one == other for one, other in pairs)
        line = {
            "row": first + index,
            "noise": given.noise,
            "words": len(true),
            "right": right,
            "in_bag": len(set(true) & {one for one, _ in pairs}),
            "of_bag": len(set(true)),
            # Of guess over truth, likelihood and prior: below zero the search has failed
            "lead_nats": at_truth[0] - at_guess[0],
            "scored": guess.cost.steps,
            "cpu_seconds": round(seconds, 1),
        }
        with given.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)


def add_noise(observation: Observation, ratio: float) -> Observation:
    """Returns the observation under noise of so many times its norm, which is known."""
    entries = sum(tensor.numel() for tensor in observation.update.tensors.values())
    noise = GaussianNoise(ratio * update_norm(observation) / math.sqrt(entries))
    streams = Streams.root("client", 0).child("batch", observation.index)
    rounds = (replace(observation.rounds[-1], update=noise.protect(observation.update, [streams])),)
    return replace(observation, rounds=rounds, knows=replace(observation.knows, defenses=(noise,)))


def show(path: Path) -> None:
    """Prints the table, with intervals over sentences."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    print("| noise | n | words | words right | whole | search failed | scored | processor, s |")
    print("|---|---|---|---|---|---|---|---|")
    for noise in dict.fromkeys(line["noise"] for line in lines):
        some = [line for line in lines if line["noise"] == noise]
        each = [
            (line["row"], float(place < line["right"]))
            for line in some
            for place in range(line["words"])
        ]
        found = interval([value for _, value in each], [row for row, _ in each])
        share = f"{100 * found.mean:.0f} [{100 * found.low:.0f}, {100 * found.high:.0f}] %"
        whole = sum(line["right"] == line["words"] for line in some)
        failed = sum(line["lead_nats"] < -0.5 for line in some)
        scored, seconds = (
            sum(line[name] for line in some) / len(some) for name in ("scored", "cpu_seconds")
        )
        print(
            f"| {noise} | {len(some)} | {len(each)} | {share} | {whole} | {failed} | {scored:.0f} |"
            f" {seconds:.0f} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--noise", default="0.01")
    parser.add_argument("--rows", default="600-619")
    parser.add_argument("--candidates", type=int, default=30_000)
    parser.add_argument("--target", default="minilm")
    parser.add_argument("--data", default="cola")
    parser.add_argument("--out", type=Path, default=Path("noisy_words.jsonl"))
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        show(given.table)
    else:
        measure(given)
