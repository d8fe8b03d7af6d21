"""What a study will take: each attack is tried for a few seconds on a few batches, and its
progress is stretched to the end."""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gradleak.audit.client import observe, private_batches
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack, Bench, Progress
from gradleak.core.batch import PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact
from gradleak.core.prior import AnyPrior
from gradleak.core.specs import to_string
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.study.cells import Cell

# A GPU takes about as long for one as for many: alone, a batch would foretell too much
BATCHES_AT_ONCE = {"cpu": 2, "cuda": 16}


@dataclass(frozen=True)
class Probe:
    """One attack on batches of one size through defenses of one kind: the time it takes for a
    batch, over so many of them."""

    target: str
    attack: str
    defense: str
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
    """Each attack on each target, data set, protocol, kind of defense and batch size, once;
    nothing is kept."""
    groups: dict[tuple[str, ...], list[tuple[AuditSpec, Attack]]] = {}
    for cell in cells:
        for attack in cell.spec.attacks:
            groups.setdefault(kind_of(cell.spec, attack), []).append((cell.spec, attack))
    opened: dict[str, Target] = {}
    priors: dict[tuple[str, str], AnyPrior] = {}
    for uses in groups.values():
        spec, attack = uses[0]
        target, defense = (
            to_string(spec.target),
            " + ".join(one.name for one in spec.defenses) or "none",
        )
        batches = sum(one.limit * one.draws for one, _ in uses)
        named = (target, to_string(attack), defense, spec.batch_size, batches)
        try:
            if target not in opened:
                opened[target] = spec.target.open(torch.device(device), getattr(torch, spec.dtype))
            prior = (target, to_string(spec.prior))
            if prior not in priors:
                priors[prior] = spec.prior.open(opened[target])
            tries = try_out(spec, attack, opened[target], priors[prior], seconds)
            each, took = sum(one.seconds_each for one in tries), sum(one.took for one in tries)
            yield Probe(*named, each, took, all(one.whole for one in tries))
        except (GradleakError, RuntimeError) as error:
            yield Probe(*named, 0.0, 0.0, False, " ".join(str(error).split()))


@dataclass(frozen=True)
class Try:
    """How an attempt went."""

    seconds_each: float
    took: float
    whole: bool


def kind_of(spec: AuditSpec, attack: Attack) -> tuple[str, ...]:
    """What the time a batch takes depends on. The strength of a defense is not in it, nor the
    view."""
    defenses = " ".join(defense.name for defense in spec.defenses)
    return (
        to_string(spec.target),
        to_string(spec.data),
        to_string(spec.protocol),
        defenses,
        str(spec.batch_size),
        to_string(attack),
    )


def try_out(
    spec: AuditSpec, attack: Attack, target: Target, prior: AnyPrior, seconds: float
) -> list[Try]:
    """Of attacks in turn every one that applies: how many batches get to the last is not known
    before."""
    tries: list[Try] = []
    refusal: GradleakError | None = None
    for member in attack.members:
        try:
            tries.append(_try(spec, member, target, prior, seconds))
        except GradleakError as error:
            refusal = error
    if refusal is not None and not tries:
        raise refusal
    return tries


def _try(spec: AuditSpec, attack: Attack, target: Target, prior: AnyPrior, seconds: float) -> Try:
    chosen = _of_all_lengths(
        private_batches(spec, target), BATCHES_AT_ONCE.get(target.device.type, 1)
    )
    observations = [observe(spec, target, private, place) for place, private in enumerate(chosen)]
    limited = [one.limited_to(spec.told(attack) | {Fact.DEFENSE}) for one in observations]
    progress, began = Progress(), time.monotonic()
    streams = Streams.root("attacker", spec.seed)
    bench = Bench(streams, prior, progress, began + seconds)
    attack.reconstruct(limited, bench)
    ended, whole = time.monotonic(), not bench.out_of_time
    took = ended - began if whole else stretched(progress, began, ended)
    return Try(took / len(chosen), ended - began, whole)


def stretched(progress: Progress, began: float, ended: float) -> float:
    """What the whole takes if every phase goes on at its pace and every try is needed; phases
    not reached are missing."""
    seconds, at = 0.0, began
    for phase in progress.phases:
        seconds, at = seconds + phase.seconds(at), phase.at
    return progress.tries * (seconds + ended - at)


def _of_all_lengths(private: Sequence[PrivateBatch], count: int) -> list[PrivateBatch]:
    """So many of them, evenly taken from the shortest to the longest: the first may be neither."""
    by_length = sorted(private, key=lambda one: int(one.batch.mask.sum()))
    count = min(count, len(by_length))
    return [by_length[(2 * place + 1) * len(by_length) // (2 * count)] for place in range(count)]


def peak_memory(device: str) -> int:
    """The most bytes this process held so far: on the GPU where it computes there."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
