"""Speed of the engine against plain autograd, as ratios from one run: python benchmarks/engine.py
[--device cuda].

Three things are timed on the default target: scoring 200 candidates at once against one at a time;
one continuous step (loss and its slope) for many observations at once against as many plain
double-backward steps; the same as a CUDA graph.
"""

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from gradleak.attacks.gradient_matching.slopes import open_slopes
from gradleak.attacks.search.hypotheses import Assumptions
from gradleak.attacks.search.search_rows import Rows, group_problems, lay_out
from gradleak.audit.client import observe, private_batches
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching import L2L1, Cosine, Distance, SquaredL2, for_observations
from gradleak.priors.english import FrequentWords

CANDIDATES = 200
DISTANCES: tuple[Distance, ...] = (Cosine(), SquaredL2(), L2L1())


@dataclass(frozen=True)
class Setting:
    target: Target
    observations: list[Observation]
    repeats: int

    def seconds(self, function: Callable[[], object]) -> float:
        """The median time of a call, after one that warms up."""
        function()
        times = []
        for _ in range(self.repeats):
            self.wait()
            began = time.perf_counter()
            function()
            self.wait()
            times.append(time.perf_counter() - began)
        return median(times)

    def wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--target", default="minilm")
    parser.add_argument("--observations", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    # The first canaries have 11 to 13 tokens; one sentence repeated would hide the cost of padding.
    spec = AuditSpec.from_plain(
        {"target": chosen.target, "limit": chosen.observations, "attacks": ["tag"], "view": "lamp"}
    )
    target = spec.target.open(torch.device(chosen.device))
    private = private_batches(spec, target)
    setting = Setting(
        target,
        [observe(spec, target, secret, index) for index, secret in enumerate(private)],
        chosen.repeats,
    )
    rows = lay_out(group_problems(setting.observations, Assumptions())[0])
    card = (
        torch.cuda.get_device_name(chosen.device)
        if chosen.device.startswith("cuda")
        else platform.machine()
    )
    tokens = [max(problem.hypothesis.lengths) for problem in rows.problems]
    print(
        f"{chosen.target} on {chosen.device} ({card}, {torch.get_num_threads()} threads), torch"
        f" {torch.__version__}"
    )
    print(
        f"{len(tokens)} observations of {min(tokens)} to {max(tokens)} tokens, median of"
        f" {chosen.repeats} runs"
    )
    for distance in DISTANCES:
        score_candidates(setting, rows, distance)
        continuous_step(setting, rows, distance)


def score_candidates(setting: Setting, rows: Rows, distance: Distance) -> None:
    one = [rows.problems[0].observation]
    embeddings = draw(rows, slice(0, 1))[:, None].expand(-1, CANDIDATES, -1, -1, -1)
    fast = for_observations(one, distance)
    plain = for_observations(one, distance, plain=True)
    together = setting.seconds(lambda: fast.distances(rows.batch(embeddings, slice(0, 1))))
    # Plain autograd on a sample of the candidates, one at a time, scaled up: all 200 take minutes
    # on a CPU.
    sample = 10
    alone = setting.seconds(
        lambda: [plain.distances(rows.batch(embeddings[:, :1], slice(0, 1))) for _ in range(sample)]
    )
    show(f"score {CANDIDATES} candidates, {distance}", together, alone * CANDIDATES / sample)


def continuous_step(setting: Setting, rows: Rows, distance: Distance) -> None:
    embeddings = draw(rows, slice(None))
    observations = [problem.observation for problem in rows.problems]
    bench, unweighed = (
        Bench(Streams.root("engine", 0), FrequentWords().open(rows.target)),
        torch.zeros(len(observations)),
    )
    slopes = open_slopes(for_observations(observations, distance), rows, bench, unweighed)
    together = setting.seconds(lambda: slopes(embeddings))
    sample = min(4, len(observations))
    plain = [
        for_observations([observation], distance, plain=True)
        for observation in observations[:sample]
    ]

    def one_by_one() -> None:
        for row in range(sample):
            leaf = embeddings[row : row + 1].detach().requires_grad_()
            batch: Batch = rows.batch(leaf[:, None], slice(row, row + 1))
            torch.autograd.grad(plain[row].distances(batch).sum(), leaf)

    alone = setting.seconds(one_by_one) * len(observations) / sample
    show(f"step of {len(observations)} observations, {distance}", together, alone)


def draw(rows: Rows, kept: slice) -> torch.Tensor:
    shape = (*rows.mask[kept].shape, rows.target.hidden_size)
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(rows.target.device) * 0.05
    )


def show(what: str, together: float, alone: float) -> None:
    print(
        f"{what:55s} together {together * 1e3:9.1f} ms   one at a time {alone * 1e3:9.1f} ms  "
        f" ratio {alone / together:6.1f}"
    )


if __name__ == "__main__":
    main()
