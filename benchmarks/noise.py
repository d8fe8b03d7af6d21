"""What energy reads through noise: python benchmarks/noise.py --layers 1 --modules query key value
--ratio 1 3 --limit 4.

Noise of one size on every entry, its norm so many times that of what is seen of each text's
gradient; the attacker knows its size and the lengths. Prints the share of tokens that are right,
and how often the truth has the better likelihood (the search failed).
"""

import argparse
import math
import time
from dataclasses import replace

import torch

from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.audit import AuditSpec
from gradleak.audit.client import observe, private_batches, update_norm
from gradleak.audit.objectives import objectives
from gradleak.core.attack import Bench
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.defenses.clipping_and_noise import GaussianNoise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="minilm")
    parser.add_argument("--data", default="canaries")
    parser.add_argument("--layers", default="1")
    parser.add_argument("--modules", nargs="*", default=["query", "key", "value"])
    parser.add_argument("--ratio", nargs="+", type=float, default=[1.0, 3.0])
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--restarts", type=int, default=4)
    parser.add_argument(
        "--whole", action="store_true", help="all that LAMP sees, instead of layers and modules"
    )
    parser.add_argument(
        "--no-judge",
        action="store_true",
        help="without the last search by the likelihood of the whole update",
    )
    parser.add_argument("--device", default="cpu")
    measure(parser.parse_args())


def measure(chosen: argparse.Namespace) -> None:
    view = (
        "lamp"
        if chosen.whole
        else {"name": "parts", "layers": chosen.layers, "modules": chosen.modules}
    )
    shown = (
        "all that LAMP sees"
        if chosen.whole
        else f"layers {chosen.layers} {','.join(chosen.modules) or 'whole'}"
    )
    settings = {
        "target": chosen.target,
        "data": chosen.data,
        "limit": chosen.limit,
        "prior": "auto",
        "attacks": ["energy"],
    }
    spec = AuditSpec.from_plain(settings | {"view": view})
    target = spec.target.open(torch.device(chosen.device))
    private, prior = private_batches(spec, target), spec.prior.open(target)
    attack = EnergyAttack(restarts=chosen.restarts, judge=not chosen.no_judge)
    for ratio in chosen.ratio:
        seen = [
            through_noise(observe(spec, target, batch, index), ratio)
            for index, batch in enumerate(private)
        ]
        began = time.monotonic()
        found = attack.reconstruct(seen, Bench(Streams.root("attacker", spec.seed), prior))
        seconds = (time.monotonic() - began) / len(seen)
        right = [
            share_right(guess.sentences[0], batch.batch.ids[0].tolist())
            for guess, batch in zip(found, private, strict=True)
        ]
        # At guess and truth alike, without the prior that the search weighs beside it.
        at_guess, at_truth = objectives(attack, seen, [batch.batch for batch in private], found)
        failed = sum(truth < guess - 1e-3 for guess, truth in zip(at_guess, at_truth, strict=True))
        print(
            f"{chosen.target} {chosen.data} {shown} noise/signal {ratio:g}: n {len(seen)}, tokens"
            f" right {100 * sum(right) / len(right):.1f} %, truth likelier {failed}, {seconds:.1f}"
            " s each",
            flush=True,
        )


def through_noise(observation: Observation, ratio: float) -> Observation:
    entries = sum(tensor.numel() for tensor in observation.update.tensors.values())
    noise = GaussianNoise(ratio * update_norm(observation) / math.sqrt(entries))
    sent = noise.protect(
        observation.update, [Streams.root("client", 0).child("batch", observation.index)]
    )
    rounds = (replace(observation.rounds[-1], update=sent),)
    return replace(observation, rounds=rounds, knows=replace(observation.knows, defenses=(noise,)))


def share_right(guess: tuple[int, ...], true: list[int]) -> float:
    inside = list(zip(guess[1:-1], true[1:-1], strict=True))
    return sum(one == other for one, other in inside) / len(inside)


if __name__ == "__main__":
    main()
