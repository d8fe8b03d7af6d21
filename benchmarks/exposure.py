"""How far a PIN, a day and a made-up name stand out of all others, by noise: docs/bounds.md.

Every option in the place of the secret goes through one pass, which serves all noise levels of
DP-SGD (C = 1). One line of JSON a secret goes to --out; --table prints it.

    python benchmarks/exposure.py --out exposure.jsonl
    python benchmarks/exposure.py --table exposure.jsonl
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from oracle import multiply

from gradleak.audit.spec import AuditSpec
from gradleak.bounds.exposure import find_form, list_options, rank
from gradleak.core.batch import Batch, Example
from gradleak.core.streams import Streams
from gradleak.matching.noisy_channel import GradientSums

LEVELS = (0.01, 0.03, 0.1, 0.3, 1.0)
SECRETS = (  # made up; the names are by the rule of bounds/exposure.py
    ("My PIN is {}.", "4471"),
    ("Use {} to unlock it.", "9063"),
    ("The code is {} again.", "2718"),
    ("Ask {} for the key.", "Belchilia"),
    ("{} is ill again.", "Quinlamond"),
    ("I saw {} today.", "Ormokar"),
    ("I was born on {}.", "1984-03-17"),
)


def measure(out: Path, target_name: str) -> None:
    """Appends one line for each secret that is not there yet."""
    done = (
        [json.loads(line)["secret"] for line in out.read_text().splitlines()]
        if out.exists()
        else []
    )
    spec = AuditSpec.from_plain({"target": target_name, "attacks": "blind"})
    target = spec.target.open(torch.device("cpu"))
    sums = GradientSums(target, tuple(target.parameters), needs_whole=True)
    for text, secret in SECRETS:
        if secret in done:
            continue
        start, form = text.index("{"), find_form(secret)
        span = (start, start + len(secret))
        example = Example(text.format(secret), 1, (span,))
        private = target.private_batch([example])
        assert form is not None
        options = list_options(target, example, private.batch, 0, private.lengths[0], span, form)
        if options is None:
            print(secret, "has no other of as many tokens")
            continue
        began = time.process_time()
        generator = Streams.root("client", 0).child("exposure", secret).generator()
        noise = {part.name: torch.randn(part.shape, generator=generator) for part in sums.seen}
        ids = options.ids
        batch = private.batch
        candidates = Batch(
            ids=ids, mask=batch.mask.expand_as(ids), labels=batch.labels.expand(len(ids))
        )
        squares, along_true, along_noise = multiply(sums, candidates, [noise]).sum(0)
        own = 1 / squares.sqrt().clamp_min(1.0)
        ranks = {}
        for level in LEVELS:
            inner = own * (own[0] * along_true + level * along_noise)
            found = rank(options, (inner - own.square() * squares / 2) / level**2)
            ranks[str(level)] = {"rank": found.rank, "posterior": found.posterior}
        line = {
            "secret": secret,
            "form": options.form,
            "options": len(ids),
            "dropped": options.dropped,
            "tokens": private.lengths[0],
            "levels": ranks,
            "cpu_seconds": time.process_time() - began,
        }
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(secret, len(ids), "options", round(line["cpu_seconds"]), "s", flush=True)


def show(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    head = " | ".join(f"{level}" for level in LEVELS)
    print(f"| form | secrets | options | left out | {head} | of | seconds a secret |")
    print("|---" * (6 + len(LEVELS)) + "|")
    for form in dict.fromkeys(line["form"] for line in lines):
        some = [line for line in lines if line["form"] == form]
        cells = []
        for level in LEVELS:
            ranks = [line["levels"][str(level)]["rank"] for line in some]
            bits = [
                math.log2(line["options"] / place) for line, place in zip(some, ranks, strict=True)
            ]
            written = ", ".join(f"{place:,}" for place in ranks)
            cells.append(f"{sum(bits) / len(bits):.1f} ({written})")
        options = ", ".join(f"{line['options']:,}" for line in some)
        dropped = ", ".join(f"{line['dropped']:,}" for line in some)
        most = sum(math.log2(line["options"]) for line in some) / len(some)
        seconds = sum(line["cpu_seconds"] for line in some) / len(some)
        print(
            f"| {form} | {len(some)} | {options} | {dropped} | {' | '.join(cells)} |"
            f" {most:.1f} | {seconds:.0f} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="minilm")
    parser.add_argument("--out", type=Path, default=Path("exposure.jsonl"))
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        show(given.table)
    else:
        measure(given.out, given.target)
