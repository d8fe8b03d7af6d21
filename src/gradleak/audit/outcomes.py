"""What attacking one group of observations gave, kept on disk as soon as it is known so that an
interrupted audit goes on."""

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from gradleak.core.attack import Reconstruction, Scale
from gradleak.core.errors import GradleakError
from gradleak.records.files import write_whole
from gradleak.records.plain import from_plain, to_plain
from gradleak.records.schema import FindingRecord

CALL = "call.json"
# Files of parts, finished or with what is finished of them; not such as are being written (.0-0-8…)
KEPT = "[0-9]*-*-*.*"
NoiseRatios = dict[str, float]  # by tensor; under the empty name, of all that is seen


@dataclass(frozen=True)
class Outcome:
    """One attack on one client batch."""

    reconstruction: Reconstruction
    update_norm: float
    objective_at_guess: float | None = None  # both are known when nothing is attacked any more
    objective_at_truth: float | None = None
    scale: Scale = field(default_factory=Scale)  # of both


@dataclass(eq=False)
class AttackOutcomes:
    """What one attack gave, a batch at a time, and beside it two guesses without the update."""

    KINDS: ClassVar[int] = 3
    found: list[Outcome] = field(default_factory=list)
    blind: list[Outcome] = field(default_factory=list)  # the likeliest
    draw: list[Outcome] = field(default_factory=list)  # one drawn for this attack

    def add(self, found: Outcome, blind: Outcome, draw: Outcome) -> None:
        """Adds one batch."""
        self.found.append(found)
        self.blind.append(blind)
        self.draw.append(draw)


@dataclass(eq=False)
class AuditResult:
    """What comes out of one audit of a group; an audit that is refused has nothing else."""

    attacks: dict[str, AttackOutcomes]
    findings: list[FindingRecord] = field(default_factory=list)
    noise: list[NoiseRatios] = field(default_factory=list)  # of every batch
    refusal: GradleakError | None = None  # why it cannot be attacked


class CallParts:
    """A folder of finished parts of one call, removed when its records are written. Holds guesses,
    never secrets.

    A file beside them names the audits of the call, so that whoever goes on from them makes the
    same one.
    """

    def __init__(self, folder: Path | None, call: str, audits: Sequence[str] = ()) -> None:
        self.out, self.audits = folder, audits
        self.folder = None if folder is None else folder / "parts" / call

    def load(self, name: str, count: int | None = None) -> list[Outcome] | None:
        """Returns a finished part, if there is one of so many outcomes: an earlier run may have
        cut the call in other parts."""
        path = None if self.folder is None else self.folder / f"{name}.json"
        if path is None or not path.is_file():
            return None
        found = from_plain(list[Outcome], json.loads(path.read_text()), path.name)
        return found if count in (None, len(found)) else None

    def save(self, name: str, outcomes: Sequence[Outcome]) -> None:
        """Writes a part whole or not at all."""
        checkpoint = self.checkpoint(name)
        if self.folder is None or checkpoint is None:
            return
        write_whole(self.folder / f"{name}.json", json.dumps(to_plain(outcomes, keep_nan=True)))
        checkpoint.unlink(missing_ok=True)

    def checkpoint(self, name: str) -> Path | None:
        """Where an attack that is several in turn keeps what is finished of a part."""
        if self.folder is None:
            return None
        if self.audits and not (self.folder / CALL).exists():
            write_whole(self.folder / CALL, json.dumps(list(self.audits)))
        return self.folder / f"{name}.checkpoint"

    def clear(self) -> None:
        """Removes the parts of a finished audit."""
        if self.folder is None or not self.folder.is_dir():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # parts of other audits are in it
            self.folder.parent.rmdir()


def begun_calls(folder: Path) -> list[tuple[str, ...]]:
    """The audits, by their ids, of each call that was cut in this folder and left finished
    parts."""
    calls: set[tuple[str, ...]] = set()
    for path in folder.glob(f"parts/*/{CALL}"):
        with contextlib.suppress(OSError):  # another run has just finished it
            if any(path.parent.glob(KEPT)):
                calls.add(tuple(json.loads(path.read_text())))
    return sorted(calls)


def has_kept(folder: Path, call: str = "") -> bool:
    """Whether a call that was cut has left anything to go on from."""
    return any(folder.glob(f"parts/{call}*/{KEPT}"))


@dataclass(frozen=True)
class Kept:
    """What a call that was cut has left: on how many batches each attack, by its place, has
    finished; and how many are a part.

    Of several audits in one call it is the mean over them.
    """

    done: dict[int, float]
    part: float

    @classmethod
    def of(cls, folder: Path, call: str, audits: int = 1) -> "Kept":
        done, part = dict[int, float](), 0.0
        for path in folder.glob(f"parts/{call}-*/*-*-*.json"):
            place, start, end = map(int, path.stem.split("-"))
            done[place] = done.get(place, 0.0) + (end - start) / audits
            part = max(part, (end - start) / audits)
        return cls(done, part)
