"""What an inverter is fed with and how it reads words, measured.

    python benchmarks/inverter_features.py [--steps 300] [--defense sign]

Made-up sentences of frequent and rare words on a small target; token accuracy on sentences that
were not learnt from.
"""

import argparse
import itertools
import random

import torch

from gradleak.audit.client import observe, private_batches
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Bench, ClientSetting, TrainableAttack
from gradleak.core.batch import Example
from gradleak.core.streams import Streams
from gradleak.metrics.texts import accuracy
from gradleak.targets.tiny import WORDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--view", default="lamp")
    parser.add_argument("--defense", action="append", default=[])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--secrets", type=int, default=100)
    chosen = parser.parse_args()
    print(
        f"{chosen.target}, view {chosen.view}, defenses {chosen.defense or 'none'}, {chosen.steps}"
        " steps of 64 clients"
    )
    for features, words in itertools.product(("hashed", "factors"), ("learned", "known")):
        attack = f"lti_p:steps={chosen.steps},learning_rate=0.001,features={features},words={words}"
        plain = {
            "target": chosen.target,
            "view": chosen.view,
            "defenses": chosen.defense,
            "attacks": [attack],
        }
        found = _accuracy(AuditSpec.from_plain(plain), chosen.secrets, torch.device(chosen.device))
        print(
            f"{features:8} features, {words:8} words: {100 * found:5.1f} % of the tokens",
            flush=True,
        )


def _accuracy(spec: AuditSpec, secrets: int, device: torch.device) -> float:
    target = spec.target.open(device)
    bench = Bench(Streams.root("attacker", 0), spec.prior.open(target))
    (attack,) = spec.attacks
    assert isinstance(attack, TrainableAttack)
    setting = ClientSetting(spec.target, target, spec.protocol, spec.defenses, spec.view)
    fitted = attack.fit(setting, sentences(2000, seed=1), bench)
    private = private_batches(spec, target, sentences(secrets, seed=2))
    seen = [observe(spec, target, batch, index) for index, batch in enumerate(private)]
    pairs = zip(private, fitted.reconstruct(seen, bench), strict=True)
    values = [
        accuracy(batch.batch.ids[0].tolist(), guess.sentences[0])
        for batch, guess in pairs
        if batch.batch.ids is not None
    ]
    return sum(values) / len(values)


def sentences(count: int, seed: int, words: int = 12) -> list[Example]:
    """Sentences whose words follow Zipf's law, in no order."""
    draw = random.Random(seed)
    known = [word for word in WORDS if word.isalpha()]
    chances = [1 / (rank + 3) for rank in range(len(known))]
    return [
        Example(" ".join(draw.choices(known, chances, k=words)), draw.randrange(2))
        for _ in range(count)
    ]


if __name__ == "__main__":
    main()
