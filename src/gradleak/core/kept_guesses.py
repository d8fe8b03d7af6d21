"""Guesses as JSON values and back: what is kept of an attack that may be cut."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gradleak.core.attack import Cost, Reconstruction, Sentences, Stage, Trace
from gradleak.core.picture import Picture


def guess_to_plain(guess: Reconstruction) -> dict[str, Any]:
    """A guess with its pictures as text."""
    pictures = [
        [*picture.shape, base64.b64encode(picture.pixels).decode()] for picture in guess.pictures
    ]
    return {**asdict(guess), "pictures": pictures}


def guess_from_plain(plain: Mapping[str, Any]) -> Reconstruction:
    """The guess that `guess_to_plain` wrote."""
    trace = Trace(
        losses=tuple((step, loss) for step, loss in plain["trace"]["losses"]),
        guesses=tuple((step, _sentences(guess)) for step, guess in plain["trace"]["guesses"]),
    )
    return Reconstruction(
        _sentences(plain["sentences"]),
        plain["certified"],
        plain["loss"],
        None if plain["labels"] is None else tuple(plain["labels"]),
        trace,
        Cost(**plain["cost"]),
        tuple(map(stage_from_plain, plain["stages"])),
        plain["note"],
        pictures=tuple(
            Picture((*shape,), base64.b64decode(pixels)) for *shape, pixels in plain["pictures"]
        ),
    )


def stage_from_plain(plain: Mapping[str, Any]) -> Stage:
    """What one attack of several made of an observation."""
    return Stage(
        plain["attack"],
        _sentences(plain["sentences"]),
        plain["certified"],
        Cost(**plain["cost"]),
        plain.get("fate", "ran"),  # older versions kept those that ran only
        plain.get("reason", ""),
    )


def _sentences(plain: Sequence[Sequence[int]]) -> Sentences:
    return tuple(tuple(sentence) for sentence in plain)
