"""How long batches take here: tried for a few seconds, corrected by what calls really took, and
kept for the next run."""

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gradleak.audit.display import Display
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack
from gradleak.core.prior import AnyPrior
from gradleak.core.specs import to_string
from gradleak.core.target import Target
from gradleak.core.trainable import TrainableAttack
from gradleak.records.files import write_whole
from gradleak.records.schema import Record
from gradleak.study.probe import kind_of, try_out

SCHEMA = "gradleak.pace/1"
FILE = "pace.json"
BETWEEN = " | "  # the parts of a kind; the attack is the last
# Times as long as it ran before it was cut: what a call is taken for from then on, at least
LONGER = 1.5


class Opened:
    """The target and the prior that were opened last: calls in a row that share them open them
    once."""

    def __init__(self, device: str, display: Display) -> None:
        self.device, self.display = device, display
        self.name: str | None = None
        self.held: tuple[Target, AnyPrior] | None = None

    def holds(self, spec: AuditSpec) -> bool:
        return self.held is not None and self.name == opened_as(spec)

    def of(self, spec: AuditSpec) -> tuple[Target, AnyPrior]:
        """Those of an audit. The ones held before are let go first, since both may not fit in
        memory."""
        if self.held is None or self.name != opened_as(spec):
            self.let_go()
            self.display.say(f"Opening {to_string(spec.target)} on {self.device}")
            target = spec.target.open(torch.device(self.device), getattr(torch, spec.dtype))
            self.name, self.held = opened_as(spec), (target, spec.prior.open(target))
        return self.held

    def let_go(self) -> None:
        self.name, self.held = None, None


def opened_as(spec: AuditSpec) -> str:
    """Names what is opened for an audit."""
    return BETWEEN.join((to_string(spec.target), spec.dtype, to_string(spec.prior)))


def kinds_of(spec: AuditSpec) -> dict[str, tuple[str, Attack]]:
    """What the time of each attack of an audit depends on, and the attack, by its key."""
    return {
        key: (BETWEEN.join(kind_of(spec, attack)), attack)
        for key, attack in spec.attack_keys().items()
    }


def learns(spec: AuditSpec) -> bool:
    """Whether an attack of it has to be fitted first, which no short try can foretell."""
    return any(
        isinstance(attack, TrainableAttack) and attack.weights is None for attack in spec.attacks
    )


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
        total = batches * _known(self.beside, spec)
        for place, (kind, _) in enumerate(kinds_of(spec).values()):
            each = self.seconds_each(kind)
            if each is None:
                return None
            total += each * max(0, batches - (done or {}).get(place, 0))
        return total

    def seconds_of_part(self, specs: Sequence[AuditSpec], batches: float) -> float:
        """What a part of so many batches of each of these audits takes, of the attack that takes
        longest."""
        places = zip(*(kinds_of(spec).values() for spec in specs), strict=True)
        return max(
            sum((self.seconds_each(kind) or 0.0) * batches for kind, _ in place) for place in places
        )

    def seconds_alike(self, kind: str) -> float | None:
        """What a batch of this kind took; as long as none did, one of the same attack on the
        same target, or else anywhere."""
        target, attack = _attack_on_target(kind)
        for alike in (
            [kind],
            [one for one in self.measured if _attack_on_target(one) == (target, attack)],
            self.measured,
        ):
            found = [
                self.measured[one]
                for one in alike
                if one in self.measured and _attack_on_target(one)[1] == attack
            ]
            if found:
                return sum(found) / len(found)
        return None

    def has_measured(self, spec: AuditSpec) -> bool:
        """Whether every attack of an audit has come to its end on this target before, whatever
        the data and the defense."""
        known = {_attack_on_target(kind) for kind in self.measured}
        return all(_attack_on_target(kind) in known for kind, _ in kinds_of(spec).values())

    def seconds_to_open(self, spec: AuditSpec) -> float:
        return _known(self.opening, spec)

    def learn(self, specs: Sequence[AuditSpec], records: Sequence[Record], seconds: float) -> None:
        """Takes in that a call with these audits took so long, and what each attack took of it."""
        found: dict[str, tuple[float, int]] = {}
        for spec, record in zip(specs, records, strict=True):
            for key, (kind, _) in kinds_of(spec).items():
                took, batches = found.get(kind, (0.0, 0))
                found[kind] = (
                    took + record.attacks[key].cost.seconds,
                    batches + spec.limit * spec.draws,
                )
        for kind, (took, batches) in found.items():
            _average(self.measured, kind, took / batches)
        rest = max(0.0, seconds - sum(took for took, _ in found.values()))
        _average(
            self.beside, opened_as(specs[0]), rest / sum(spec.limit * spec.draws for spec in specs)
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
        both = [name for name in self.measured if name in self.tried]
        both = [
            name for name in both if _attack_on_target(name)[1] == _attack_on_target(kind)[1]
        ] or both
        tried = sum(self.tried[name] for name in both)
        return sum(self.measured[name] for name in both) / tried if tried else 1.0


def attack_of(kind: str) -> str:
    """The attack of a kind, as it is written on one line."""
    return _attack_on_target(kind)[1]


def _attack_on_target(kind: str) -> tuple[str, str]:
    target, *_, attack = kind.split(BETWEEN)
    return target, attack


def _known(values: Mapping[str, float], spec: AuditSpec) -> float:
    """The value of what is opened for an audit; as long as there is none, the mean of the
    others."""
    return values.get(opened_as(spec), sum(values.values()) / len(values) if values else 0.0)


def _average(values: dict[str, float], name: str, found: float) -> None:
    """What was found last counts as much as all before."""
    values[name] = (values[name] + found) / 2 if name in values else found


@dataclass
class Trials:
    """Tries attacks whose pace is not known yet, each for a few seconds, as long as the time set
    aside for that lasts."""

    pace: Pace
    opened: Opened
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
                target, prior = self.open(spec)
                self.pace.tried[kind] = sum(
                    one.seconds_each for one in try_out(spec, attack, target, prior, self.seconds)
                )
            except Exception:
                self.pace.tried[kind] = 0.0
            self.left -= self.clock() - began

    def open(self, spec: AuditSpec) -> tuple[Target, AnyPrior]:
        """What an audit works with; how long opening it takes is noted."""
        began, held = self.clock(), self.opened.holds(spec)
        found = self.opened.of(spec)
        if not held:
            self.pace.opening[opened_as(spec)] = self.clock() - began
            self.opening += self.pace.opening[opened_as(spec)]
        return found


def read_pace(folder: Path, machine: str) -> Pace:
    """What earlier runs on such a machine left; a file that cannot be read is no loss, since all
    can be tried again."""
    return Pace(**_kept(folder).get(machine, {}))


def write_pace(folder: Path, machine: str, pace: Pace) -> None:
    """Adds what is known to what lies there: runs that share a folder add to each other's."""
    kept = _kept(folder)
    there = Pace(**kept.get(machine, {}))
    kept[machine] = {
        "tried": there.tried | {kind: seconds for kind, seconds in pace.tried.items() if seconds},
        "measured": there.measured | pace.measured,
        "at_least": there.at_least | pace.at_least,
        "opening": there.opening | pace.opening,
        "beside": there.beside | pace.beside,
    }
    write_whole(
        folder / FILE,
        json.dumps({"schema": SCHEMA, "machines": kept}, ensure_ascii=False, indent=1) + "\n",
    )


def _kept(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
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
