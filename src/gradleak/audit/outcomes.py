"""What attacking one group of observations gave, kept on disk as soon as it is known so that an interrupted audit goes on."""

import base64
import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradleak.core.attack import Cost, Reconstruction, Scale, Stage, Trace
from gradleak.core.picture import Picture
from gradleak.records.files import write_whole

CALL = "call.json"


@dataclass(frozen=True)
class Outcome:
    """One attack on one client batch."""

    reconstruction: Reconstruction
    update_norm: float
    objective_at_guess: float | None = None  # both are known when nothing is attacked any more
    objective_at_truth: float | None = None
    scale: Scale = field(default_factory=Scale)  # of both


class Parts:
    """A folder of finished parts of one call, removed when its records are written. Holds guesses, never secrets.

    A file beside them names the audits of the call, so that whoever goes on from them makes the same one.
    """

    def __init__(self, folder: Path | None, call: str, audits: Sequence[str] = ()) -> None:
        self.out, self.audits = folder, audits
        self.folder = None if folder is None else folder / "parts" / call

    def load(self, name: str) -> list[Outcome] | None:
        """A finished part, if there is one."""
        path = None if self.folder is None else self.folder / f"{name}.json"
        if path is None or not path.is_file():
            return None
        return [_read(plain) for plain in json.loads(path.read_text())]

    def save(self, name: str, outcomes: Sequence[Outcome]) -> None:
        """Writes a part whole or not at all."""
        if self.folder is None:
            return
        if self.audits and not (self.folder / CALL).exists():
            write_whole(self.folder / CALL, json.dumps(list(self.audits)))
        write_whole(self.folder / f"{name}.json", json.dumps([_plain(outcome) for outcome in outcomes]))

    def clear(self) -> None:
        """Removes the parts of a finished audit."""
        if self.folder is None or not self.folder.is_dir():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # parts of other audits are in it
            self.folder.parent.rmdir()


def begun_calls(folder: Path) -> list[tuple[str, ...]]:
    """The audits, by their ids, of each call that was cut in this folder and left finished parts."""
    calls: set[tuple[str, ...]] = set()
    for path in folder.glob(f"parts/*/{CALL}"):
        with contextlib.suppress(OSError):  # another run has just finished it
            calls.add(tuple(json.loads(path.read_text())))
    return sorted(calls)


@dataclass(frozen=True)
class Kept:
    """What a call that was cut has left: on how many batches each attack, by its place, has finished; and how many are a part."""

    done: dict[int, int]
    part: int

    @classmethod
    def of(cls, folder: Path, call: str) -> "Kept":
        done, part = dict[int, int](), 0
        for path in folder.glob(f"parts/{call}-*/*-*-*.json"):
            place, start, end = map(int, path.stem.split("-"))
            done[place] = done.get(place, 0) + end - start
            part = max(part, end - start)
        return cls(done, part)


def _plain(outcome: Outcome) -> dict[str, Any]:
    plain = asdict(outcome)
    plain["reconstruction"]["pictures"] = [
        [*picture.shape, base64.b64encode(picture.pixels).decode()] for picture in outcome.reconstruction.pictures
    ]
    return plain


def _read(plain: dict[str, Any]) -> Outcome:
    found = plain["reconstruction"]
    trace = Trace(
        losses=tuple((step, loss) for step, loss in found["trace"]["losses"]),
        guesses=tuple((step, _sentences(guess)) for step, guess in found["trace"]["guesses"]),
    )
    labels = None if found["labels"] is None else tuple(found["labels"])
    stages = tuple(
        Stage(
            one["attack"],
            _sentences(one["sentences"]),
            one["certified"],
            Cost(**one["cost"]),
            one.get("fate", "ran"),  # older versions kept those that ran only
            one.get("reason", ""),
        )
        for one in found["stages"]
    )
    cost = Cost(**found["cost"])
    reconstruction = Reconstruction(
        _sentences(found["sentences"]),
        found["certified"],
        found["loss"],
        labels,
        trace,
        cost,
        stages,
        found["note"],
        pictures=tuple(Picture((*shape,), base64.b64decode(pixels)) for *shape, pixels in found["pictures"]),
    )
    return Outcome(reconstruction, plain["update_norm"])  # objectives are computed anew: older versions kept them too


def _sentences(plain: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sentence) for sentence in plain)
