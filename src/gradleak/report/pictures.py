"""Pictures side by side, secrets above the guesses made of them."""

from collections.abc import Mapping

import numpy as np
from rich.text import Text

from gradleak.records import png
from gradleak.records.schema import AttackRecord, ExampleRecord

A_ROW = 10  # pictures side by side
GAP = 2  # pixels between them, white
SHORTEST_SIDE = 64  # smaller pictures are drawn larger, each pixel a square


def has_pictures(attack: AttackRecord) -> bool:
    """Whether its guesses are pictures."""
    return any(example.guess is not None and example.guess.startswith(png.PREFIX) for example in attack.examples)


def picture_line(example: ExampleRecord) -> Text:
    """What a picture's guess scored."""
    values = [f"{name} {value:.3g}" for name, value in example.values.items() if value is not None]
    return Text("a picture: " + ", ".join(values), style="dim")


def picture_grid(attack: AttackRecord, secrets: Mapping[tuple[int, int], str]) -> bytes:
    """A PNG file: guesses in rows of ten, each below its secret where that may be shown."""
    pairs = [(secrets.get((one.batch, one.position)), one.guess) for one in attack.examples if one.guess is not None]
    rows = []
    for start in range(0, len(pairs), A_ROW):
        some = pairs[start : start + A_ROW]
        kinds = [column for column in zip(*some, strict=True) if all(text is not None for text in column)]
        rows += [np.concatenate([_framed(text) for text in texts if text is not None], axis=1) for texts in kinds]
    width = max(row.shape[1] for row in rows)
    padded = [np.pad(row, ((0, 0), (0, width - row.shape[1]), (0, 0)), constant_values=255) for row in rows]
    whole = np.concatenate(padded)
    return png.write(png.Pixels((whole.shape[0], whole.shape[1], whole.shape[2]), whole.tobytes()))


def _framed(text: str) -> png.Bytes:
    pixels = png.from_data_uri(text).array()
    scale = max(1, -(-SHORTEST_SIDE // min(pixels.shape[:2])))
    larger = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
    return np.pad(larger, ((0, GAP), (0, GAP), (0, 0)), constant_values=255)
