"""Losses of the first steps of an attack, as a CUDA graph against plain launches: python
benchmarks/graph.py --device cuda.

Prints the largest relative difference between the two over all sentences and kept steps, and what a
step takes in each.
"""

import argparse
import time
from dataclasses import replace

import torch

import gradleak.attacks.gradient_matching.loop as loop_module
import gradleak.attacks.gradient_matching.slopes as slopes_module
from gradleak.attacks.recipes.lamp import LampCos, LampL2L1
from gradleak.audit.client import observe, private_batches
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Bench
from gradleak.core.observation import Observation
from gradleak.core.prior import Prior
from gradleak.core.streams import Streams


def losses(
    attack: LampCos | LampL2L1, observations: list[Observation], prior: Prior
) -> tuple[torch.Tensor, float]:
    """The loss of every sentence at every step, and seconds a step."""
    loop = replace(attack.loop, discrete=None, answer_by_prior=None)
    began = time.perf_counter()
    found = loop.reconstruct(observations, Bench(Streams.root("attacker", 0), prior))
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / attack.steps
    return torch.tensor([[loss for _, loss in guess.trace.losses] for guess in found]), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--target", default="minilm")
    parser.add_argument("--observations", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    chosen = parser.parse_args()
    spec = AuditSpec.from_plain(
        {"target": chosen.target, "limit": chosen.observations, "attacks": ["tag"], "view": "lamp"}
    )
    target = spec.target.open(torch.device(chosen.device))
    prior = spec.prior.open(target)
    observations = [
        observe(spec, target, secret, index)
        for index, secret in enumerate(private_batches(spec, target))
    ]
    loop_module.LOSS_EVERY = 1
    recording = slopes_module.record
    for attack in (LampCos(steps=chosen.steps, starts=50), LampL2L1(steps=chosen.steps, starts=50)):
        recorded, graph_seconds = losses(attack, observations, prior)
        slopes_module.record = lambda function, example: function
        plain, plain_seconds = losses(attack, observations, prior)
        slopes_module.record = recording
        difference = float(((recorded - plain) / plain).abs().max())
        print(
            f"{attack.name}: {len(observations)} canaries, {chosen.steps} steps, largest relative"
            f" difference {difference:.1e}; start included {1e3 * graph_seconds:.0f} ms a step as a"
            f" graph, {1e3 * plain_seconds:.0f} without"
        )


if __name__ == "__main__":
    main()
