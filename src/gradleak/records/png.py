"""PNG files of eight bits a channel, not interlaced, written and read with the standard library and
numpy.

Every record of pictures holds them as PNG, and `show`, `report` and `score` read them again. A
library for images would have to be installed with all of gradleak for that, and would write other
bytes, so that records of one audit would differ. Other formats, and PNG files of other kinds, are
read through Pillow (datasets/).
"""

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradleak.records.files import RecordError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
A_ROW = 10  # pictures side by side
GAP = 2  # pixels between them, white
SHORTEST_SIDE = 64  # smaller pictures are drawn larger, each pixel a square
PREFIX = "data:image/png;base64,"
CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # by colour type: grey, RGB, grey with alpha, RGB with alpha
COLOUR = {1: 0, 3: 2}
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Pixels:
    """Rows from the top, channels of a pixel side by side."""

    shape: tuple[int, int, int]  # height, width, channels
    data: bytes

    def array(self) -> Bytes:
        return np.frombuffer(self.data, dtype=np.uint8).reshape(self.shape)


def write(pixels: Pixels) -> bytes:
    """The bytes of a PNG file; every row as it is, without a filter."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), dtype=np.uint8)
    rows[:, 1:] = pixels.array().reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR[channels], 0, 0, 0)
    packed = zlib.compress(rows.tobytes(), 9)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def read(content: bytes) -> Pixels:
    """The pixels of a PNG file; an alpha channel is dropped."""
    chunks = list(_chunks(content))
    kinds = dict(chunks)
    if b"IHDR" not in kinds or len(kinds[b"IHDR"]) != 13:
        raise RecordError("This is not a PNG file.")
    width, height, bits, colour, _, _, interlaced = struct.unpack(">IIBBBBB", kinds[b"IHDR"])
    if bits != 8 or colour not in CHANNELS or interlaced:
        raise RecordError(
            "Only PNG files of 8 bits a channel, without palette and not interlaced, can be read."
        )
    channels = CHANNELS[colour]
    packed = zlib.decompress(b"".join(part for kind, part in chunks if kind == b"IDAT"))
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(height, 1 + width * channels)
    pixels = _undo_filters(rows[:, 0], rows[:, 1:].reshape(height, width, channels))
    kept = pixels[..., : channels - 1] if channels in (2, 4) else pixels
    return Pixels((height, width, kept.shape[-1]), np.ascontiguousarray(kept).tobytes())


def data_uri(pixels: Pixels) -> str:
    """The picture as text that browsers draw and records hold."""
    return PREFIX + base64.b64encode(write(pixels)).decode()


def from_data_uri(text: str) -> Pixels:
    """The picture such text holds."""
    return read(base64.b64decode(text.removeprefix(PREFIX)))


def _undo_filters(filters: Bytes, raw: Bytes) -> Bytes:
    """Undoes the filters (PNG specification, section 9).

    A pixel depends on those to its left, above, and above left, so all pixels of an antidiagonal
    are done together.
    """
    height, width, channels = raw.shape
    done = np.zeros((height + 1, width + 1, channels), dtype=np.int16)
    for diagonal in range(height + width - 1):
        rows = np.arange(max(0, diagonal - width + 1), min(height, diagonal + 1))
        columns = diagonal - rows
        left, up, corner = done[rows + 1, columns], done[rows, columns + 1], done[rows, columns]
        kind = filters[rows][:, None]
        predicted = np.select(
            [kind == 1, kind == 2, kind == 3, kind == 4],
            [left, up, (left + up) // 2, _paeth(left, up, corner)],
        )
        done[rows + 1, columns + 1] = (raw[rows, columns] + predicted) & 255
    return done[1:, 1:].astype(np.uint8)


def _paeth(
    left: npt.NDArray[np.int16], up: npt.NDArray[np.int16], corner: npt.NDArray[np.int16]
) -> npt.NDArray[np.int16]:
    """Whichever of the three is nearest to left + up − corner, in this order."""
    by_left, by_up, by_corner = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
    return np.where(
        (by_left <= by_up) & (by_left <= by_corner), left, np.where(by_up <= by_corner, up, corner)
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    length, check = struct.pack(">I", len(content)), zlib.crc32(kind + content)
    return length + kind + content + struct.pack(">I", check)


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    if not content.startswith(SIGNATURE):
        raise RecordError("This is not a PNG file.")
    place = len(SIGNATURE)
    while place + 12 <= len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        yield content[place + 4 : place + 8], content[place + 8 : place + 8 + length]
        place += 12 + length


def draw_grid(pairs: Sequence[tuple[str | None, str]]) -> bytes:
    """A PNG file of (secret, guess) as data URIs: guesses in rows of ten, below their secrets
    where those are given."""
    rows = []
    for start in range(0, len(pairs), A_ROW):
        secrets, guesses = zip(*pairs[start : start + A_ROW], strict=True)
        shown = [text for text in secrets if text is not None]
        rows += [
            np.concatenate([_frame(text) for text in texts], axis=1)
            for texts in (shown, guesses)
            if len(texts) == len(guesses)
        ]
    width = max(row.shape[1] for row in rows)
    whole = np.concatenate(
        [
            np.pad(row, ((0, 0), (0, width - row.shape[1]), (0, 0)), constant_values=255)
            for row in rows
        ]
    )
    height, width, channels = whole.shape
    return write(Pixels((height, width, channels), whole.tobytes()))


def _frame(text: str) -> Bytes:
    pixels = from_data_uri(text).array()
    scale = max(1, -(-SHORTEST_SIDE // min(pixels.shape[:2])))
    larger = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
    return np.pad(larger, ((0, GAP), (0, GAP), (0, 0)), constant_values=255)
