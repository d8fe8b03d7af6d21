"""At most, for the settings of studies/partial_table2.yaml: the oracle through parts of an update
under DP-SGD (C = 1), SST-2, batch size 1.

A pass over lists of words serves all views and noise levels, since products add up by part. A few
places of each sentence, drawn at random, stand for all of them, so that shares of words are
unbiased and whole sentences are not counted. One line of JSON a sentence goes to --out.

    python benchmarks/partial_bounds.py --out partial.jsonl
    python benchmarks/partial_bounds.py --table partial.jsonl
"""

import argparse
import json
import time
from pathlib import Path

import torch
from oracle import multiply, write

from gradleak.audit.client import private_batches
from gradleak.audit.spec import AuditSpec
from gradleak.bounds.information import most_bits, most_success, most_success_of_run
from gradleak.bounds.oracle import decide, free_places, list_words
from gradleak.core.batch import Batch
from gradleak.core.defense import Sampling
from gradleak.core.streams import Streams
from gradleak.defenses.differential_privacy import analytic_epsilon, opacus_epsilon
from gradleak.matching.noisy_channel import GradientSums
from gradleak.records.statistics import interval
from gradleak.views import Everything, PartsView

LEVELS = (0.01, 0.1, 0.3, 0.5)
DRAWS = 3
VIEWS = {
    "everything": Everything(),
    "all layers": PartsView("all", ()),
    "layer 1": PartsView("1", ()),
    "layer 1 query": PartsView("1", ("query",)),
    "layer 1 attention_output": PartsView("1", ("attention_output",)),
    "layer 1 ffn_in": PartsView("1", ("ffn_in",)),
    "layer 1 ffn_out": PartsView("1", ("ffn_out",)),
}
RATE, STEPS, DELTA = 32 / 67_349, 4_209, 2e-5


def measure(out: Path, limit: int, most: int, places: int) -> None:
    done = (
        {json.loads(line)["row"] for line in out.read_text().splitlines()} if out.exists() else {}
    )
    spec = AuditSpec.from_plain(
        {"target": "minilm", "data": "sst2", "limit": limit, "attacks": "blind"}
    )
    target = spec.target.open(torch.device("cpu"))
    prior = spec.prior.open(target)
    sums = GradientSums(target, tuple(target.parameters), needs_whole=True)
    shown = {}
    for name, view in VIEWS.items():
        visible = set(view.visible(target))
        seen = [{part.name, part.parameter} & visible for part in target.parts]
        shown[name] = torch.tensor([bool(one) for one in seen])
    for row, private in enumerate(private_batches(spec, target)):
        if row in done:
            continue
        began, batch, length = time.process_time(), private.batch, private.lengths[0]
        generator = Streams.root("client", 0).child("partial", row).generator()
        free = torch.tensor(free_places(target.vocabulary, batch.ids[0].tolist(), length))
        chosen = free[torch.randperm(len(free), generator=generator)[:places]].tolist()
        noises = [
            {part.name: torch.randn(part.shape, generator=generator) for part in sums.seen}
            for _ in range(DRAWS)
        ]
        cells: dict[str, list[bool]] = {}
        without = []
        for place in chosen:
            listed = list_words(prior, target.vocabulary, batch.ids[0, :length], place, most)
            ids = batch.ids.repeat(len(listed.words), 1)
            ids[:, place] = listed.words
            candidates = Batch(
                ids=ids, mask=batch.mask.expand_as(ids), labels=batch.labels.expand(len(ids))
            )
            found = multiply(sums, candidates, noises)
            own = (1 / found[:, 0].sum(0).sqrt()).clamp(max=1.0)  # by all tensors that train
            without.append(decide(listed, torch.zeros(len(ids))).is_right)
            for name, parts in shown.items():
                squares, along_true, *along_noises = found[parts].sum(0)
                for level in LEVELS:
                    for along_noise in along_noises:
                        inner = own * (own[0] * along_true + level * along_noise)
                        likelihood = (inner - own.square() * squares / 2) / level**2
                        right = decide(listed, likelihood).is_right
                        cells.setdefault(f"{name} {level}", []).append(right)
        line = {
            "row": row,
            "cells": cells,
            "without": without,
            "on_each_list": most,
            "cpu_seconds": time.process_time() - began,
        }
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(row, length, "tokens", round(line["cpu_seconds"]), "s", flush=True)


def show(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    words = [(line["row"], one) for line in lines for one in line["without"]]
    without = interval([float(one) for _, one in words], [row for row, _ in words])
    spent = sum(line["cpu_seconds"] for line in lines)
    print(
        f"{len(lines)} sentences, {len(words)} words, {DRAWS} draws, {lines[0]['on_each_list']} on"
        f" each list; without the update {write(without)}; {spent:.0f} s of processor"
    )
    print("| seen | " + " | ".join(f"σ = {level}" for level in LEVELS) + " |")
    print("|---" * (1 + len(LEVELS)) + "|")
    for name in VIEWS:
        cells = []
        for level in LEVELS:
            found = [
                (line["row"], float(one))
                for line in lines
                for one in line["cells"][f"{name} {level}"]
            ]
            cells.append(write(interval([one for _, one in found], [row for row, _ in found])))
        print(f"| {name} | {' | '.join(cells)} |")
    print(
        "| bits about a sentence, at most | "
        + " | ".join(f"{most_bits(1 / level):,.3g}" for level in LEVELS)
        + " |"
    )
    known = [f"{100 * most_success(without.high, 1 / level):.1f} %" for level in LEVELS]
    print(f"| guaranteed, one update of who takes part | {' | '.join(known)} |")
    curves = [most_success_of_run(without.high, Sampling(level, RATE, STEPS)) for level in LEVELS]
    hidden = ["not computed" if one is None else f"{100 * one:.1f} %" for one in curves]
    print(f"| guaranteed, the run of who may take part | {' | '.join(hidden)} |")
    one = [f"{analytic_epsilon(level, DELTA):,.4g}" for level in LEVELS]
    print(f"| ε of one release, δ = {DELTA:g} | {' | '.join(one)} |")
    run = [
        opacus_epsilon("PRV", level, RATE, STEPS, DELTA)
        or opacus_epsilon("RDP", level, RATE, STEPS, DELTA)
        for level in LEVELS
    ]
    written = ["not known" if one is None else f"{one:,.4g}" for one in run]
    print(f"| ε of the run, q = 32/67,349, T = 4,209 | {' | '.join(written)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--places", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("partial.jsonl"))
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        show(given.table)
    else:
        measure(given.out, given.limit, given.words, given.places)
