"""Training gradients a second, all clients of a batch in one pass against one at a time, in one
run.

    GRADLEAK_DATA=FOLDER python benchmarks/inverter.py [--device cuda] [--batch 512] \\
        [--defense sign]

Both ways run the same clients through the same defenses and hash what they send; of pictures
(`--target lenet --batch 4096`) what is sent is taken as it is, and a last line says how many
examples a second an inverter of the paper's size learns from.
"""

import argparse
import time
from collections.abc import Callable

import torch

from gradleak.attacks.learning_to_invert.features import (
    Features,
    HashedFeatures,
    SimulatedFeatures,
    WholeFeatures,
)
from gradleak.attacks.learning_to_invert.picture_attacks import LtiPictures
from gradleak.attacks.learning_to_invert.simulation import Simulation
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Bench, ClientSetting
from gradleak.core.batch import Batch
from gradleak.core.defense import protect_in_turn
from gradleak.core.streams import Streams
from gradleak.datasets.made_up import Shapes
from gradleak.priors.picture_priors import OnePicture

BLACK = OnePicture(torch.zeros(3, 8, 8))  # a prior that these attacks do not ask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--target", default="lti_lm")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--one-by-one", type=int, default=16, help="clients of the slow way")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--learn", type=int, default=20, help="steps of an inverter of pictures")
    parser.add_argument("--defense", action="append", default=[])
    chosen = parser.parse_args()
    spec = AuditSpec.from_plain(
        {"target": chosen.target, "defenses": chosen.defense, "attacks": ["blind"]}
    )
    target = spec.target.open(torch.device(chosen.device))
    pictures = target.medium == "image"
    setting = ClientSetting(spec.target, target, spec.protocol, spec.defenses, spec.view, 1)
    features: Features = (
        WholeFeatures(setting) if pictures else HashedFeatures(setting, 0.1, 0, signed=False)
    )
    simulated = SimulatedFeatures(Simulation(setting), features)
    make = _with_pictures if pictures else _clients
    batches, streams = make(setting, chosen.batch, chosen.tokens), Streams.root("benchmark", 0)

    def one_by_one() -> None:
        for client in range(chosen.one_by_one):
            update = spec.protocol.update(target, batches[client : client + 1], rngs=[streams])
            features(spec.view.show(target, protect_in_turn(spec.defenses, update, [streams])))

    slow = chosen.one_by_one / _seconds(one_by_one, chosen.repeats, target.device)
    fast = chosen.batch / _seconds(
        lambda: simulated(batches, streams), chosen.repeats, target.device
    )
    print(
        f"{chosen.target} on {_name(target.device)}, defenses {chosen.defense or 'none'},"
        f" {features.size} features"
    )
    print(f"one at a time          {slow:12.1f} gradients a second")
    print(
        f"{chosen.batch:5} in one pass      {fast:12.1f} gradients a second   {fast / slow:.1f}"
        " times"
    )
    if pictures:
        _learn(setting, chosen.learn, chosen.batch)
    if target.device.type == "cuda":
        print(
            "peak memory           "
            f" {torch.cuda.max_memory_allocated(target.device) / 2**30:12.1f} GiB"
        )


def _clients(setting: ClientSetting, count: int, tokens: int) -> Batch:
    """Clients that hold one text of random words each."""
    target = setting.target
    allowed = target.vocabulary.allowed.nonzero()[:, 0].cpu()
    drawn = torch.randint(
        len(allowed), (count, 1, tokens), generator=torch.Generator().manual_seed(0)
    )
    ids = allowed[drawn].to(target.device)
    labels = (
        ids
        if target.labels_are_tokens
        else torch.zeros(count, 1, dtype=torch.int64, device=target.device)
    )
    return Batch(ids=ids, mask=torch.ones_like(ids).bool(), labels=labels)


def _with_pictures(setting: ClientSetting, count: int, tokens: int) -> Batch:
    """Clients that hold one picture of noise each; a picture has no tokens."""
    drawn = setting.target.probe(count, tokens, torch.Generator().manual_seed(0))
    assert drawn.pixels is not None
    return Batch.of_pixels(drawn.pixels[:, None], drawn.labels[:, None])


def _learn(setting: ClientSetting, steps: int, batch: int) -> None:
    """Trains an inverter on made-up pictures and says how fast it goes."""
    attack = LtiPictures(steps=steps, training_batch=batch, learning_rate=1e-4)
    side = setting.target.probe(1, 1).pixels
    assert side is not None
    bench = Bench(Streams.root("benchmark", 0), BLACK)
    fitted = attack.fit(setting, Shapes("public", side.shape[-1]).load(1000), bench)
    print(f"lti_pictures {fitted.summary}")


def _seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The best of some calls, after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


if __name__ == "__main__":
    main()
