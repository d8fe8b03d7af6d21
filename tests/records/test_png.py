"""PNG files written and read back, filters included."""

import struct
import zlib

import numpy as np
import pytest

from gradleak.records import png
from gradleak.records.files import RecordError
from gradleak.records.png import A_ROW, GAP, SHORTEST_SIDE, draw_grid

RANDOM = np.random.default_rng(0)


def pixels(height: int, width: int, channels: int) -> png.Pixels:
    data = RANDOM.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return png.Pixels((height, width, channels), data.tobytes())


@pytest.mark.parametrize("shape", [(1, 1, 3), (5, 7, 3), (4, 9, 1)])
def test_what_is_written_is_read(shape: tuple[int, int, int]) -> None:
    made = pixels(*shape)
    assert png.read(png.write(made)) == made == png.from_data_uri(png.data_uri(made))


def filtered(made: png.Pixels) -> bytes:
    """The same file with the filters 0 to 4 in turn, encoded pixel by pixel as the specification
    says."""
    rows, (height, width, channels) = made.array().astype(int), made.shape
    lines = []
    for y in range(height):
        kind, line = y % 5, [y % 5]
        for x in range(width):
            for c in range(channels):
                a = rows[y, x - 1, c] if x else 0
                b = rows[y - 1, x, c] if y else 0
                d = rows[y - 1, x - 1, c] if x and y else 0
                nearest = min((a, b, d), key=lambda value: abs(a + b - d - value))
                line.append((rows[y, x, c] - (0, a, b, (a + b) // 2, nearest)[kind]) % 256)
        lines.append(bytes(line))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(lines))), (b"IEND", b""))
    return png.SIGNATURE + b"".join(png._chunk(kind, content) for kind, content in chunks)


def test_every_filter_is_undone() -> None:
    made = pixels(11, 6, 3)
    assert png.read(filtered(made)) == made


@pytest.mark.parametrize("content", [b"", b"GIF89a", png.SIGNATURE])
def test_what_is_no_png_is_refused(content: bytes) -> None:
    with pytest.raises(RecordError, match="not a PNG"):
        png.read(content)


def test_a_grid_has_secrets_above_guesses_and_guesses_alone_where_those_are_hidden() -> None:
    dark, bright = (
        png.data_uri(png.Pixels((32, 32, 3), bytes([shade]) * 3072)) for shade in (10, 240)
    )
    shown, hidden = (
        png.read(draw_grid([(secret, bright)] * (A_ROW + 1))).array() for secret in (dark, None)
    )
    side = SHORTEST_SIDE + GAP
    assert shown.shape == (4 * side, A_ROW * side, 3) and hidden.shape == (
        2 * side,
        A_ROW * side,
        3,
    )
    assert shown[0, 0, 0] == 10 and shown[side, 0, 0] == 240 and hidden[0, 0, 0] == 240
