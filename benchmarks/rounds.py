"""What many rounds of one sentence add up to, the server's model still or moving: docs/bounds.md.

Of the model that stands still the noises of K rounds are drawn as their sums. The model that moves
goes against each noised update by the learning rate, as a server would, and every round has its own
gradients and noise; log-likelihoods add. One line of JSON a sentence goes to --out.

    python benchmarks/rounds.py --rows 600-609 --most-words 6 --out rounds.jsonl
    python benchmarks/rounds.py --table rounds.jsonl
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import torch
from oracle import DP_SGD, PLAIN, multiply, write
from torch import Tensor

from gradleak.audit.client import private_batches
from gradleak.audit.spec import AuditSpec
from gradleak.bounds.oracle import decide_all, free_places, list_sentences
from gradleak.core.batch import Batch
from gradleak.core.streams import Streams
from gradleak.matching.noisy_channel import GradientSums, NoisyChannel, sum_others
from gradleak.records.statistics import interval

ROUNDS = (1, 10, 100)
ALONE = (DP_SGD, 0.01)  # what dp_sgd 0.1 is held against after 100 rounds
LEVELS = ((DP_SGD, 0.1), (PLAIN, 0.00771))  # the second is some ten times the gradient
CLIPS = {DP_SGD: 1.0, PLAIN: float("inf")}


def make_likelihood(products: Tensor, clip: float, spread: float, rounds: float = 1.0) -> Tensor:
    """Returns the log-likelihood of what came of so many rounds of a model that stands still; the
    last row of the products is with the sum of the rounds' standard noises."""
    squares, along_true, along_noise = products
    own = (clip / squares.sqrt()).clamp(max=1.0)
    inner = own * (rounds * own[0] * along_true + spread * along_noise)
    return (inner - rounds * own.square() * squares / 2) / spread**2


def measure(given: argparse.Namespace) -> None:
    first, last = map(int, given.rows.split("-"))
    spec = AuditSpec.from_plain(
        {
            "target": given.target,
            "data": f"cola:split=dev,rows={given.rows}",
            "limit": last - first + 1,
            "attacks": "blind",
        }
    )
    target = spec.target.open(torch.device("cpu"))
    prior = spec.prior.open(target)
    out = given.out
    done = (
        {json.loads(line)["row"] for line in out.read_text().splitlines()} if out.exists() else {}
    )
    for index, private in enumerate(private_batches(spec, target)):
        row, batch, length = first + index, private.batch, private.lengths[0]
        places = free_places(target.vocabulary, batch.ids[0].tolist(), length)
        if row in done or len(places) > given.most_words:
            continue
        began = time.process_time()
        lists = list_sentences(batch, 0, length, target.vocabulary, prior, given.words)
        ids = lists.ids
        candidates = Batch(
            ids=ids, mask=batch.mask.expand_as(ids), labels=batch.labels.expand(len(ids))
        )
        sums = GradientSums(target, tuple(target.parameters), needs_whole=True)
        generator = Streams.root("client", 0).child("rounds", row).generator()

        def draw(times: float = 1.0, generator=generator, sums=sums):  # type: ignore[no-untyped-def]
            return {
                part.name: times**0.5 * torch.randn(part.shape, generator=generator)
                for part in sums.seen
            }

        steps = [after - before for before, after in zip((0, *ROUNDS), ROUNDS, strict=False)]
        found = multiply(sums, candidates, [draw(), *(draw(step) for step in steps)]).sum(0)
        cells = {}

        def note(name: str, rounds: int, likelihood: Tensor, cells=cells, lists=lists) -> None:  # type: ignore[no-untyped-def]
            odds = decide_all(lists, likelihood)
            cells[f"{name} {rounds}"] = [[word.is_right, word.posterior] for word in odds.words]

        note(f"{ALONE[0]} {ALONE[1]}", 1, make_likelihood(found[:3], CLIPS[ALONE[0]], ALONE[1]))
        for name, level in LEVELS:
            for number, rounds in enumerate(ROUNDS):
                noise = found[3 : 4 + number].sum(0)
                products = torch.stack([found[0], found[1], noise])
                likelihood = make_likelihood(products, CLIPS[name], level, rounds)
                note(f"{name} {level}", rounds, likelihood)
        name, level = LEVELS[0]
        for rate in given.learning_rate:
            moving, total = copy.deepcopy(target), torch.zeros(len(ids), dtype=torch.float64)
            sums = GradientSums(moving, tuple(moving.parameters), needs_whole=True)
            for number in range(1, max(ROUNDS) + 1):
                noise = draw(sums=sums)
                products = multiply(sums, candidates, [noise]).sum(0)
                total += make_likelihood(products, CLIPS[name], level)
                if number in ROUNDS:
                    note(f"{name} {level} moved by {rate:g}", number, total)
                move(moving, batch, noise, level, rate)
            change = sum(
                float((tensor - target.parameters[key]).detach().double().square().sum())
                for key, tensor in moving.parameters.items()
            )
            size = sum(
                float(one.detach().double().square().sum()) for one in target.parameters.values()
            )
            cells[f"changed by {rate:g}"] = (change / size) ** 0.5
        without = decide_all(lists, torch.zeros(len(ids)))
        line = {
            "row": row,
            "words": given.words,
            "cells": cells,
            "without": [word.is_right_without for word in without.words],
            "cpu_seconds": time.process_time() - began,
        }
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(row, len(places), "words", round(line["cpu_seconds"]), "s", flush=True)


@torch.no_grad()
def move(target, batch, noise, level: float, rate: float) -> None:  # type: ignore[no-untyped-def]
    """Takes the server's step along the noised, clipped gradient of one example."""
    both = Batch(
        ids=batch.ids.repeat(2, 1), mask=batch.mask.repeat(2, 1), labels=batch.labels.repeat(2)
    )
    # The sum over the "others" of a pair of the same sentence: one clipped gradient
    gradient = sum_others(target, both, 0, NoisyChannel(0.0, CLIPS[DP_SGD], clips_each=True))
    assert gradient is not None
    for part in target.parts:
        part.of(target.parameters[part.parameter]).sub_(
            rate * (gradient[part.name] + level * noise[part.name])
        )


def show(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [line["row"] for line in lines for _ in line["without"]]
    without = interval([float(one) for line in lines for one in line["without"]], rows)
    print(
        f"{len(lines)} sentences, {len(rows)} words, {lines[0]['words']} on each list; without the"
        f" update {write(without)} right"
    )
    names = [name for name in lines[0]["cells"] if not name.startswith("changed")]
    print("| setting, rounds | words right | posterior of the truth |\n|---|---|---|")
    for name in names:
        words = [word for line in lines for word in line["cells"][name]]
        right = interval([float(word[0]) for word in words], rows)
        print(f"| {name} | {write(right)} | {100 * statistics.mean(w[1] for w in words):.0f} % |")
    for name in (one for one in lines[0]["cells"] if one.startswith("changed")):
        mean = statistics.mean(line["cells"][name] for line in lines)
        print(f"the moving model, {name}, ends {mean:.2g} of its weights' norm away")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="600-609")
    parser.add_argument("--target", default="minilm")
    parser.add_argument("--words", type=int, default=8)
    parser.add_argument("--most-words", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, nargs="*", default=[0.01])
    parser.add_argument("--out", type=Path, default=Path("rounds.jsonl"))
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        show(given.table)
    else:
        measure(given)
