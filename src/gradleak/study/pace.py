"""How long batches take here: tried for a few seconds, corrected by what calls really took, and
kept for the next run.

A try is an attack on a few batches, its progress stretched to the end. What a whole study will
take is foretold by one try of each kind (`probe_cells`); a run that fills a time tries what it does
not know (`Trials`) and learns from what it ran (`Pace`).
"""

import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gradleak.audit.client import hand_over, observe, private_batches
from gradleak.audit.ready import Opened, open_all
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack, Bench, Display, Progress, Silent, TrainableAttack
from gradleak.core.batch import PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.core.specs import to_string
from gradleak.core.streams import Streams
from gradleak.records.files import write_whole
from gradleak.records.schema import Record
from gradleak.study.cells import BETWEEN, Cell, kind_of, kinds_of

SCHEMA = "gradleak.pace/1"
FILE = "pace.json"
# Times as long as it ran before it was cut: what a call is taken for from then on, at least
LONGER = 1.5
# A GPU takes about as long for one as for many: alone, a batch would foretell too much
BATCHES_AT_ONCE = {"cpu": 2, "cuda": 16}


class LastOpened:
    """The target and the prior that were opened last: calls in a row that share them open them
    once."""

    def __init__(self, device: str, display: Display) -> None:
        self.device, self.display = device, display
        self.name: str | None = None
        self.held: Opened | None = None

    def holds(self, spec: AuditSpec) -> bool:
        return self.held is not None and self.name == name_opened(spec)

    def open(self, spec: AuditSpec) -> Opened:
        """Returns those of an audit. The ones held before are let go first, since both may not fit
        in memory."""
        if self.held is None or not self.holds(spec):
            self.let_go()
            self.held = open_all(spec, self.device, self.display)
            self.name = name_opened(spec)
        return self.held

    def let_go(self) -> None:
        self.name, self.held = None, None


def name_opened(spec: AuditSpec) -> str:
    """Names what is opened for an audit."""
    return BETWEEN.join((to_string(spec.target), spec.dtype, to_string(spec.prior)))


def learns(spec: AuditSpec) -> bool:
    """Whether an attack of it has to be fitted first, which no short try can foretell."""
    return any(
        isinstance(attack, TrainableAttack) and attack.weights is None for attack in spec.attacks
    )


@dataclass(frozen=True)
class Try:
    """How an attempt went."""

    seconds_each: float
    took: float
    whole: bool


def try_out(spec: AuditSpec, attack: Attack, opened: Opened, seconds: float) -> list[Try]:
    """Of attacks in turn every one that applies: how many batches get to the last is not known
    before."""
    tries: list[Try] = []
    refusal: GradleakError | None = None
    for member in attack.members:
        try:
            tries.append(_try(spec, member, opened, seconds))
        except GradleakError as error:
            refusal = error
    if refusal is not None and not tries:
        raise refusal
    return tries


def _try(spec: AuditSpec, attack: Attack, opened: Opened, seconds: float) -> Try:
    target = opened.target
    chosen = _of_all_lengths(
        private_batches(spec, target), BATCHES_AT_ONCE.get(target.device.type, 1)
    )
    observations = [observe(spec, target, private, place) for place, private in enumerate(chosen)]
    limited = [hand_over(spec, attack, one) for one in observations]
    progress, began = Progress(), time.monotonic()
    bench = Bench(Streams.root("attacker", spec.seed), opened.prior, progress, began + seconds)
    attack.reconstruct(limited, bench)
    ended, whole = time.monotonic(), not bench.out_of_time
    took = ended - began if whole else stretch(progress, began, ended)
    return Try(took / len(chosen), ended - began, whole)


def stretch(progress: Progress, began: float, ended: float) -> float:
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


@dataclass
class Pace:
    """Seconds for a batch of each kind on one sort of machine. A kind is an attack with all that
    its time depends on."""

    tried: dict[str, float] = field(default_factory=dict)  # stretched from a short try
    measured: dict[str, float] = field(default_factory=dict)  # by calls that came to their end
    at_least: dict[str, float] = field(default_factory=dict)  # by calls that were cut
    opening: dict[str, float] = field(default_factory=dict)  # seconds for a target with its prior
    # With them: clients, blind guesses, scores and records of a batch
    beside: dict[str, float] = field(default_factory=dict)

    def seconds_each(self, kind: str) -> float | None:
        """What a batch of this kind will take: as measured, or as tried and corrected by how
        right other tries were."""
        if kind in self.measured:
            return self.measured[kind]
        found = self.tried[kind] * self._correction(kind) if kind in self.tried else None
        least = self.at_least.get(kind)
        return found if least is None else max(least, found or 0.0)

    def seconds(self, spec: AuditSpec, done: Mapping[int, float] | None = None) -> float | None:
        """What an audit will take, its opening not counted; `done`: the batches that an earlier
        call finished, by attack."""
        batches = spec.limit * spec.draws
        total = batches * _look_up(self.beside, spec)
        for place, (kind, _) in enumerate(kinds_of(spec).values()):
            each = self.seconds_each(kind)
            if each is None:
                return None
            total += each * max(0, batches - (done or {}).get(place, 0))
        return total

    def seconds_of_part(self, specs: Sequence[AuditSpec], batches: float) -> float:
        """What a part of so many batches of each of these audits takes, of the attack that takes
        longest."""
        return max(
            sum((self.seconds_each(kind) or 0.0) * batches for kind, _ in place)
            for place in zip(*(kinds_of(spec).values() for spec in specs), strict=True)
        )

    def seconds_alike(self, kind: str) -> float | None:
        """What a batch of this kind took; as long as none did, one of the same attack on the
        same target, or else anywhere."""
        same_attack = [one for one in self.measured if attack_of(one) == attack_of(kind)]
        for alike in (
            [one for one in same_attack if one == kind],
            [one for one in same_attack if _attack_on_target(one) == _attack_on_target(kind)],
            same_attack,
        ):
            if alike:
                return sum(self.measured[one] for one in alike) / len(alike)
        return None

    def has_measured(self, spec: AuditSpec) -> bool:
        """Whether every attack of an audit has come to its end on this target before, whatever
        the data and the defense."""
        known = {_attack_on_target(kind) for kind in self.measured}
        return all(_attack_on_target(kind) in known for kind, _ in kinds_of(spec).values())

    def seconds_to_open(self, spec: AuditSpec) -> float:
        return _look_up(self.opening, spec)

    def learn(self, specs: Sequence[AuditSpec], records: Sequence[Record], seconds: float) -> None:
        """Takes in that a call with these audits took so long, and what each attack took of it."""
        found = sum_by_kind(
            (kind, record.attacks[key].cost.seconds, spec.limit * spec.draws)
            for spec, record in zip(specs, records, strict=True)
            for key, (kind, _) in kinds_of(spec).items()
        )
        for kind, (took, batches) in found.items():
            _average(self.measured, kind, took / batches)
        rest = max(0.0, seconds - sum(took for took, _ in found.values()))
        _average(
            self.beside,
            name_opened(specs[0]),
            rest / sum(spec.limit * spec.draws for spec in specs),
        )

    def learn_of_cut(
        self, specs: Sequence[AuditSpec], seconds: float, done: int, part: float
    ) -> None:
        """Takes in that a call ran so long and was not at its end, so that it is not begun in vain
        again and again.

        `done` counts the batches it finished in that time, each with each attack. Where it finished
        none, the time was too short for a part (so many batches of each audit) or, if its size is
        not known, for the whole.
        """
        kinds = [
            (kind, spec.limit * spec.draws) for spec in specs for kind, _ in kinds_of(spec).values()
        ]
        count = sum(batches for _, batches in kinds)
        in_vain = min(count, part * len(specs)) or count
        least = seconds * count / done if done else LONGER * seconds * count / in_vain
        foretold = sum((self.seconds_each(kind) or 0.0) * batches for kind, batches in kinds)
        for kind, each in {kind: self.seconds_each(kind) for kind, _ in kinds}.items():
            longer = max(each, each * least / foretold) if each else least / count
            (self.measured if kind in self.measured else self.at_least)[kind] = longer

    def _correction(self, kind: str) -> float:
        """How much longer than tried batches really took: of this attack, or else of all that
        were both tried and measured."""
        every = [name for name in self.measured if name in self.tried]
        both = [name for name in every if attack_of(name) == attack_of(kind)] or every
        tried = sum(self.tried[name] for name in both)
        return sum(self.measured[name] for name in both) / tried if tried else 1.0


def sum_by_kind(parts: Iterable[tuple[str, float, int]]) -> dict[str, tuple[float, int]]:
    """Sums seconds and batches of each kind."""
    found: dict[str, tuple[float, int]] = {}
    for kind, seconds, batches in parts:
        took, count = found.get(kind, (0.0, 0))
        found[kind] = (took + seconds, count + batches)
    return found


def attack_of(kind: str) -> str:
    """The attack of a kind, as it is written on one line."""
    return _attack_on_target(kind)[1]


def _attack_on_target(kind: str) -> tuple[str, str]:
    target, *_, attack = kind.split(BETWEEN)
    return target, attack


def _look_up(values: Mapping[str, float], spec: AuditSpec) -> float:
    """The value of what is opened for an audit; as long as there is none, the mean of the
    others."""
    return values.get(name_opened(spec), sum(values.values()) / len(values) if values else 0.0)


def _average(values: dict[str, float], name: str, found: float) -> None:
    """What was found last counts as much as all before."""
    values[name] = (values[name] + found) / 2 if name in values else found


@dataclass
class Trials:
    """Tries attacks whose pace is not known yet, each for a few seconds, as long as the time set
    aside for that lasts."""

    pace: Pace
    opened: LastOpened
    seconds: float  # for each
    left: float  # seconds for all
    clock: Callable[[], float] = time.monotonic
    opening: float = 0.0  # seconds that went into opening so far

    def make_sure(self, spec: AuditSpec) -> None:
        """Tries those attacks of an audit that were never tried. One that cannot be is free: its
        cell will say what is wrong."""
        for kind, attack in kinds_of(spec).values():
            if self.pace.seconds_each(kind) is not None or self.left <= 0:
                continue
            began = self.clock()
            try:
                tries = try_out(spec, attack, self.open(spec), self.seconds)
                self.pace.tried[kind] = sum(one.seconds_each for one in tries)
            except Exception:
                self.pace.tried[kind] = 0.0
            self.left -= self.clock() - began

    def open(self, spec: AuditSpec) -> Opened:
        """What an audit works with; how long opening it takes is noted."""
        began, held = self.clock(), self.opened.holds(spec)
        found = self.opened.open(spec)
        if not held:
            self.pace.opening[name_opened(spec)] = self.clock() - began
            self.opening += self.pace.opening[name_opened(spec)]
        return found


def read_pace(folder: Path, machine: str) -> Pace:
    """What earlier runs on such a machine left; a file that cannot be read is no loss, since all
    can be tried again."""
    return Pace(**_read_kept(folder).get(machine, {}))


def write_pace(folder: Path, machine: str, pace: Pace) -> None:
    """Adds what is known to what lies there: runs that share a folder add to each other's."""
    kept = _read_kept(folder)
    there = kept.get(machine, {})
    tried = {kind: seconds for kind, seconds in pace.tried.items() if seconds}
    found = {**vars(pace), "tried": tried}
    kept[machine] = {name: there.get(name, {}) | values for name, values in found.items()}
    write_whole(
        folder / FILE,
        json.dumps({"schema": SCHEMA, "machines": kept}, ensure_ascii=False, indent=1) + "\n",
    )


def _read_kept(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    try:
        plain = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return dict(plain["machines"]) if plain["schema"] == SCHEMA else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def machine_of(device: str) -> str:
    """Names what the time depends on first of all: the GPU, or the processor with its cores."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


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


def probe_cells(cells: Sequence[Cell], device: str, seconds: float) -> Iterator[Probe]:
    """Each attack on each target, data set, protocol, kind of defense and batch size, once;
    nothing is kept."""
    groups: dict[str, list[tuple[AuditSpec, Attack]]] = {}
    for cell in cells:
        for attack in cell.spec.attacks:
            groups.setdefault(kind_of(cell.spec, attack), []).append((cell.spec, attack))
    opened: dict[str, Opened] = {}
    for uses in groups.values():
        spec, attack = uses[0]
        defense = " + ".join(one.name for one in spec.defenses) or "none"
        batches = sum(one.limit * one.draws for one, _ in uses)
        named = (to_string(spec.target), to_string(attack), defense, spec.batch_size, batches)
        try:
            name = name_opened(spec)
            if name not in opened:
                opened[name] = open_all(spec, device, Silent())
            tries = try_out(spec, attack, opened[name], seconds)
            each, took = sum(one.seconds_each for one in tries), sum(one.took for one in tries)
            yield Probe(*named, each, took, all(one.whole for one in tries))
        except (GradleakError, RuntimeError) as error:
            yield Probe(*named, 0.0, 0.0, False, " ".join(str(error).split()))


def peak_memory(device: str) -> int:
    """The most bytes this process held so far: on the GPU where it computes there."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
