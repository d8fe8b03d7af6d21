"""Pictures side by side in one PNG file, secrets above guesses."""

from collections.abc import Sequence

import numpy as np

from gradleak.records.png import Bytes, Pixels, from_data_uri, write

A_ROW = 10  # pictures side by side
GAP = 2  # pixels between them, white
SHORTEST_SIDE = 64  # smaller pictures are drawn larger, each pixel a square


def grid(pairs: Sequence[tuple[str | None, str]]) -> bytes:
    """A PNG file of (secret, guess) as data URIs: guesses in rows of ten, below their secrets where those are given."""
    rows = []
    for start in range(0, len(pairs), A_ROW):
        secrets, guesses = zip(*pairs[start : start + A_ROW], strict=True)
        shown = [text for text in secrets if text is not None]
        rows += [_row(texts) for texts in (shown, guesses) if len(texts) == len(guesses)]
    width = max(row.shape[1] for row in rows)
    whole = np.concatenate([np.pad(row, ((0, 0), (0, width - row.shape[1]), (0, 0)), constant_values=255) for row in rows])
    height, width, channels = whole.shape
    return write(Pixels((height, width, channels), whole.tobytes()))


def _row(texts: Sequence[str]) -> Bytes:
    return np.concatenate([_framed(text) for text in texts], axis=1)


def _framed(text: str) -> Bytes:
    pixels = from_data_uri(text).array()
    scale = max(1, -(-SHORTEST_SIDE // min(pixels.shape[:2])))
    larger = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
    return np.pad(larger, ((0, GAP), (0, GAP), (0, 0)), constant_values=255)
