"""How often anybody could be right at a word, by noise: the oracle of docs/bounds.md on real texts.

One pass over every list of words serves all noise levels of DP-SGD (C = 1) and of plain Gaussian
noise: products of each candidate's gradient with the true gradient and with one draw of the noise,
and its squares. Batches of four need no pass of their own: who is told the other three can subtract
them, so that noise on a mean of four is four times that noise on one (a test holds the two
together). One line of JSON a sentence goes to --out, so that a run that was cut goes on from there.

    python benchmarks/oracle.py --rows 600-649 --out oracle.jsonl
    python benchmarks/oracle.py --table oracle.jsonl
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gradleak.audit.client import private_batches
from gradleak.audit.spec import AuditSpec
from gradleak.bounds.oracle import decide, free_places, list_words
from gradleak.core.batch import Batch
from gradleak.core.streams import Streams
from gradleak.matching.noisy_channel import GradientSums
from gradleak.records.statistics import interval

LEVELS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
DP_SGD, PLAIN, OF_FOUR = "dp_sgd", "gaussian_noise", "gaussian_noise, batches of 4"
CLIPS = {DP_SGD: 1.0, PLAIN: float("inf"), OF_FOUR: float("inf")}
TIMES = {DP_SGD: 1, PLAIN: 1, OF_FOUR: 4}  # the noise on one example, in units of the level
AT_ONCE = 128  # sentences in a pass


def measure(rows: str, most: int, out: Path, target_name: str, data: str, seconds: float) -> None:
    """Appends one line a sentence that is not there yet, for so many seconds."""
    first, last = map(int, rows.split("-"))
    spec = AuditSpec.from_plain(
        {
            "target": target_name,
            "data": f"{data}:split=dev,rows={rows}",
            "limit": last - first + 1,
            "attacks": "blind",
        }
    )
    target = spec.target.open(torch.device("cpu"))
    prior = spec.prior.open(target)
    done = (
        {json.loads(line)["row"] for line in out.read_text().splitlines()} if out.exists() else {}
    )
    sums = GradientSums(target, tuple(target.parameters), needs_whole=True)
    began = time.monotonic()
    for index, private in enumerate(private_batches(spec, target)):
        row, batch = first + index, private.batch
        if row in done or time.monotonic() - began > seconds:
            continue
        started, started_cpu, by_prior = time.monotonic(), time.process_time(), 0.0
        generator = Streams.root("client", 0).child("oracle", row).generator()
        shapes = {part.name: part.shape for part in sums.seen}
        noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        words = []
        for place in free_places(target.vocabulary, batch.ids[0].tolist(), private.lengths[0]):
            before = time.process_time()
            listed = list_words(prior, target.vocabulary, batch.ids[0], place, most)
            by_prior += time.process_time() - before
            ids = batch.ids.repeat(len(listed.words), 1)
            ids[:, place] = listed.words
            candidates = Batch(
                ids=ids, mask=batch.mask.expand_as(ids), labels=batch.labels.expand(len(ids))
            )
            squares_of, true_along, noise_along = multiply(sums, candidates, [noise]).sum(0)
            cells = {}
            for defense, clip in CLIPS.items():
                own = (clip / squares_of.sqrt()).clamp(max=1.0)
                with_true = own * own[0] * true_along
                squares = own.square() * squares_of
                leads = (squares[0] + squares - 2 * with_true)[1:]
                for level in LEVELS:
                    spread = level * TIMES[defense]
                    inner = with_true + spread * own * noise_along
                    odds = decide(listed, (inner - squares / 2) / spread**2)
                    cells[f"{defense} {level}"] = {
                        "right": odds.is_right,
                        "posterior": odds.posterior,
                        "lead": float(leads.min()) / (2 * spread**2),
                    }
            without = decide(listed, torch.zeros(len(listed.words)))
            words.append(
                {
                    "levels": cells,
                    "right_without": without.is_right_without,
                    "prior": without.prior,
                    "norm": float(squares_of[0].sqrt()),
                }
            )
        line = {
            "row": row,
            "words": words,
            "seconds": time.monotonic() - started,
            "cpu_seconds": time.process_time() - started_cpu,
            "cpu_seconds_of_the_prior": by_prior,
            "on_each_list": most,
        }
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(row, len(words), "words", round(line["cpu_seconds"]), "s of processor", flush=True)


@torch.no_grad()
def multiply(
    sums: GradientSums, candidates: Batch, noises: Sequence[Mapping[str, Tensor]]
) -> Tensor:
    """Returns, for each part of the model, the squares of candidates' gradients, their products
    with the first one's and with each noise: [parts, 2 + noises, candidates].

    The product with the first is taken by tokens, where one with a matrix is a third of a pass.
    """
    made = torch.zeros(len(sums.names), 2 + len(noises), len(candidates.mask), dtype=torch.float64)
    dtype = sums.target.dtype
    first = sums.gradients.of(candidates[:1], double=False, sums=dtype)
    for start in range(0, len(candidates.mask), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        found = sums.gradients.of(candidates[some], double=False, sums=dtype)
        for place, name in enumerate(sums.names):
            gradients = found[name]
            made[place, 0, some] = gradients.pair_up(gradients).double()
            made[place, 1, some] = gradients.products(first[name])[:, 0].double()
            for row, noise in enumerate(noises):
                made[place, 2 + row, some] = gradients.along(noise[name]).double()
    return made


def show(path: Path) -> None:
    """Prints the table, with intervals over sentences."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    words = [(line["row"], word) for line in lines for word in line["words"]]
    rows = [row for row, _ in words]
    without = interval([float(word["right_without"]) for _, word in words], rows)
    print(f"{len(lines)} sentences, {len(words)} words, {lines[0]['on_each_list']} on each list;")
    prior = statistics.mean(word["prior"] for _, word in words)
    print(f"without the update {write(without)} right, posterior of the truth {100 * prior:.0f} %")
    spent = sum(line["cpu_seconds"] for line in lines)
    of_prior = sum(line["cpu_seconds_of_the_prior"] for line in lines)
    print(f"{spent / len(words):.1f} s of processor a word, {of_prior / spent:.0%} of it the prior")
    for defense in CLIPS:
        print(f"\n| {defense} | words right | whole sentences | posterior | lead, nats | bits |")
        print("|---|---|---|---|---|---|")
        for level in LEVELS:
            cells = [word["levels"][f"{defense} {level}"] for _, word in words]
            right = interval([float(cell["right"]) for cell in cells], rows)
            whole = [
                float(all(word["levels"][f"{defense} {level}"]["right"] for word in line["words"]))
                for line in lines
            ]
            posterior = statistics.mean(cell["posterior"] for cell in cells)
            lead = statistics.median(cell["lead"] for cell in cells)
            bits = f"{0.5 / level**2 / 0.6931471805599453:,.3g}" if defense == DP_SGD else "none"
            print(
                f"| {level} | {write(right)} | {write(interval(whole))} |"
                f" {100 * posterior:.0f} % | {lead:,.3g} | {bits} |"
            )


def write(found) -> str:  # type: ignore[no-untyped-def]
    return f"{100 * found.mean:.0f} [{100 * found.low:.0f}, {100 * found.high:.0f}] %"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="600-649")
    parser.add_argument("--words", type=int, default=150)
    parser.add_argument("--target", default="minilm")
    parser.add_argument("--data", default="cola")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=Path("oracle.jsonl"))
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        show(given.table)
    else:
        measure(given.rows, given.words, given.out, given.target, given.data, given.seconds)
