"""The header of a capture's file, read by hand and checked before a byte of a tensor is.

A capture is a safetensors file: eight bytes that count the header, the header as JSON, the bytes of
the tensors without gaps. It may come from anybody, so that nothing in it is believed: safetensors
itself takes names that stand twice, any number of empty tensors, any rank and any name.
"""

import contextlib
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gradleak.captures.header import (
    FORMAT,
    METADATA,
    CaptureError,
    CaptureHeader,
    check_names,
    load_json,
    name_in_errors,
    quote,
    read_header_text,
)

SUFFIX = ".safetensors"
OPENED = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
COUNT = 8  # bytes that say how long the header is
LONGEST_HEADER = 8 * 2**20  # bytes; that of MiniLM has 20,000
HIGHEST_RANK = 8
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
ENTRY = {"dtype", "shape", "data_offsets"}
AGAIN = "The file is broken or was changed: capture the update again."


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of a file: what it is and where its bytes lie."""

    name: str
    dtype: str  # torch's word: "bfloat16"
    shape: tuple[int, ...]
    begin: int  # bytes after the header
    end: int

    @property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """All that a file says before its tensors."""

    header: CaptureHeader
    tensors: tuple[TensorFacts, ...]  # in the file's order
    tied: Mapping[str, str]  # other names of tensors that are stored once, and the name of each
    begin: int  # where in the file the tensors begin

    @property
    def bytes(self) -> int:
        """What the tensors take, on disk as in memory."""
        return sum(facts.end - facts.begin for facts in self.tensors)


def read_layout(path: Path | str) -> Layout:
    """Reads and checks a capture's header and the list of its tensors, and no tensor."""
    with open_capture(Path(path)) as file:
        return parse_layout(file, Path(path))


def read_header(path: Path | str) -> CaptureHeader:
    """Reads a capture's header, and no tensor."""
    return read_layout(path).header


def is_capture(path: Path) -> bool:
    """Whether a file says near its beginning that it is a capture, be it whole or broken."""
    if path.suffix != SUFFIX or path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return FORMAT.rpartition("/")[0].encode() in file.read(COUNT + LONGEST_HEADER)


@contextlib.contextmanager
def open_capture(path: Path) -> Iterator[BinaryIO]:
    """Opens an ordinary file to be read. Whatever else has that name is refused, and a pipe is not
    waited for."""
    try:
        descriptor = os.open(path, OPENED)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise CaptureError(
            f"{path} cannot be opened ({reason}). Name a capture, a file that ends in {SUFFIX}."
        ) from error
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        what = "a folder" if stat.S_ISDIR(kind) else "no ordinary file"
        raise CaptureError(f"{path} is {what}. Name a capture, a file that ends in {SUFFIX}.")
    with os.fdopen(descriptor, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise CaptureError(
                f"{path} cannot be read ({error.strerror}). Copy the file to a disk that works."
            ) from error


def parse_layout(file: BinaryIO, path: Path) -> Layout:
    """Reads the header of an open file; `path` is the name that errors give to it."""
    with name_in_errors(path, f" {AGAIN}"):
        return _parse(file)


def _parse(file: BinaryIO) -> Layout:
    length = os.fstat(file.fileno()).st_size
    count = file.read(COUNT)
    header_bytes = int.from_bytes(count, "little")
    if len(count) < COUNT:
        raise CaptureError(f"it has {length} bytes, which is too short for a capture")
    if header_bytes > LONGEST_HEADER:
        raise CaptureError(
            f"it claims a header of {header_bytes:,} bytes, and a capture's has at most"
            f" {LONGEST_HEADER:,}; or it is no safetensors file"
        )
    if COUNT + header_bytes > length:
        raise CaptureError(
            f"it claims a header of {header_bytes:,} bytes and has {length:,} in all: it was cut"
        )
    raw = file.read(header_bytes)
    if len(raw) < header_bytes:
        raise CaptureError("it became shorter while it was read")
    entries = _read_json_header(raw)
    header, tied = _read_metadata(entries.pop(METADATA, None))
    check_names(entries)
    begin = COUNT + header_bytes
    tensors = sorted(
        (_read_entry(name, entry) for name, entry in entries.items()),
        key=lambda facts: (facts.begin, facts.end),
    )
    _check_tiling(tensors, length - begin)
    for name, stored in tied.items():
        if name in entries or stored not in entries:
            raise CaptureError(f"it says that {quote(name)} is tied to a tensor that is not there")
    return Layout(header, tuple(tensors), tied, begin)


def _read_json_header(raw: bytes) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise CaptureError("it is no safetensors file: its header does not begin with a brace")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise CaptureError("its header is no UTF-8") from error
    entries: dict[str, Any] = load_json(text)  # it begins with a brace
    return entries


def _read_metadata(metadata: Any) -> tuple[CaptureHeader, dict[str, str]]:
    if not isinstance(metadata, dict) or not isinstance(found := metadata.get("format"), str):
        raise CaptureError(
            "it is a file of tensors without a capture's header. Write it with"
            " gradleak.captures.write_capture, which takes named tensors of any origin."
        )
    if found != FORMAT:
        name, _, version = FORMAT.rpartition("/")
        if found.startswith(f"{name}/"):
            raise CaptureError(
                f"it has the form {quote(found)}, and this version reads {version}. Use the version"
                " of gradleak that wrote it."
            )
        raise CaptureError(
            f"it is a file of tensors of the form {quote(found)} and no capture. Write it with"
            " gradleak.captures.write_capture, which takes named tensors of any origin."
        )
    if not all(isinstance(value, str) for value in metadata.values()) or "header" not in metadata:
        raise CaptureError("it lacks the header of a capture")
    return read_header_text(metadata["header"]), _read_tied(metadata.get("tied", "{}"))


def _read_tied(text: str) -> dict[str, str]:
    tied = load_json(text)
    if not isinstance(tied, dict) or not all(isinstance(name, str) for name in tied.values()):
        raise CaptureError("its list of tied tensors is no list of names")
    check_names(tied)
    return tied


def _read_entry(name: str, entry: Any) -> TensorFacts:
    if not isinstance(entry, dict) or set(entry) != ENTRY:
        raise CaptureError(
            f"its tensor {quote(name)} must have dtype, shape and data_offsets alone"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CaptureError(
            f"its tensor {quote(name)} has the dtype {quote(str(dtype))}, and a capture holds"
            f" {', '.join(DTYPES.values())} alone"
        )
    if not _is_whole(shape) or len(shape) > HIGHEST_RANK or any(axis < 1 for axis in shape):
        raise CaptureError(
            f"its tensor {quote(name)} has a shape that no parameter has: at most {HIGHEST_RANK}"
            " axes, each of 1 or more"
        )
    if not _is_whole(offsets) or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise CaptureError(
            f"the data_offsets of its tensor {quote(name)} are not where it begins and ends"
        )
    facts = TensorFacts(name, DTYPES[dtype], tuple(shape), *offsets)
    if facts.end - facts.begin != facts.size * BYTES[facts.dtype]:
        raise CaptureError(
            f"its tensor {quote(name)} has other bytes than its shape and dtype need"
        )
    return facts


def _is_whole(values: Any) -> bool:
    """Whether it is a list of whole numbers that a file can mean: JSON's are as long as they
    like."""
    return isinstance(values, list) and all(
        type(value) is int and abs(value) < 2**63 for value in values
    )


def _check_tiling(tensors: list[TensorFacts], length: int) -> None:
    """The tensors must fill what is behind the header, without gaps and without sharing a byte."""
    if not tensors:
        raise CaptureError("it holds no tensor")
    end = 0
    for facts in tensors:
        if facts.begin != end:
            how = "shares bytes with" if facts.begin < end else "leaves a gap behind"
            raise CaptureError(f"its tensor {quote(facts.name)} {how} the one before it")
        end = facts.end
    if end > length:
        raise CaptureError(
            f"its tensors take {end:,} bytes and {length:,} are there: it was cut, or never whole"
        )
    if end < length:
        raise CaptureError(f"{length - end:,} bytes behind its last tensor belong to none")
