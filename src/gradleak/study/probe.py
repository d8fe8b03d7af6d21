"""What a study will take: each attack is tried for a few seconds on one batch, and its progress is stretched to the end."""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gradleak.audit.beliefs import Beliefs, open_beliefs
from gradleak.audit.client import observe, private_batches
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack, Bench, Progress
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact
from gradleak.core.specs import to_string
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.study.cells import Cell


@dataclass(frozen=True)
class Probe:
    """One attack on batches of one size: the time it takes for a batch, over so many of them."""

    target: str
    attack: str
    batch_size: int
    batches: int  # over all cells
    seconds_each: float
    tried: float  # seconds
    whole: bool  # it ended by itself; otherwise its progress was stretched
    problem: str = ""  # why it could not be tried

    @property
    def seconds(self) -> float:
        return self.seconds_each * self.batches


def probe(cells: Sequence[Cell], device: str, seconds: float) -> Iterator[Probe]:
    """Each attack on each target and batch size, once; nothing is kept."""
    groups: dict[tuple[str, str, int], list[tuple[AuditSpec, Attack]]] = {}
    for cell in cells:
        for attack in cell.spec.attacks:
            key = (to_string(cell.spec.target), to_string(attack), cell.spec.batch_size)
            groups.setdefault(key, []).append((cell.spec, attack))
    opened: dict[str, Target] = {}
    priors: dict[tuple[str, str], Beliefs] = {}
    for (target, name, size), uses in groups.items():
        spec, attack = uses[0]
        batches = sum(one.limit * one.draws for one, _ in uses)
        try:
            if target not in opened:
                opened[target] = spec.target.open(torch.device(device), getattr(torch, spec.dtype))
            prior = (target, to_string(spec.prior))
            if prior not in priors:
                priors[prior] = open_beliefs(spec, opened[target])
            took, share = _try(spec, attack, opened[target], priors[prior], seconds)
            yield Probe(target, name, size, batches, took / share, took, share == 1)
        except (GradleakError, RuntimeError) as error:
            yield Probe(target, name, size, batches, 0.0, 0.0, False, " ".join(str(error).split()))


def _try(spec: AuditSpec, attack: Attack, target: Target, beliefs: Beliefs, seconds: float) -> tuple[float, float]:
    """Seconds spent, and the share of the whole that was done in them."""
    first = replace(spec, limit=1)
    observation = observe(first, target, private_batches(first, target)[0], 0)
    limited = observation.limited_to(spec.told(attack) | {Fact.DEFENSE})
    progress, began = Progress(), time.monotonic()
    streams = Streams.root("attacker", spec.seed)
    bench = Bench(streams, beliefs.words, progress, began + seconds, pictures=beliefs.pictures)
    attack.reconstruct([limited], bench)
    took = time.monotonic() - began
    if not bench.out_of_time or progress.total <= 0:
        return took, 1.0
    return took, min(1.0, max(progress.done, 1) / progress.total)


def peak_memory(device: str) -> int:
    """The most bytes this process held so far: on the GPU where it computes there."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
