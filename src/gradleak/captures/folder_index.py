"""Captures of several rounds and clients in one folder, and the index that spares opening all of
them."""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from gradleak.captures.header import (
    CaptureError,
    CaptureHeader,
    load_json,
    read_header_text,
    write_header,
)
from gradleak.captures.layout import LONGEST_HEADER, SUFFIX, is_capture, read_header
from gradleak.records.files import write_whole

INDEX = "index.json"
INDEX_FORMAT = "gradleak.captures/1"
NOTE_FORMAT = "gradleak.message/1"  # of a message without arrays
# What a writer that was killed leaves behind, by the names that records/files.py gives
HALF_WRITTEN = re.compile(r"\.(.+\.safetensors|index\.json)\.[0-9a-f]{16}\.tmp")
LONGEST_INDEX = 8 * LONGEST_HEADER  # bytes; a longer one is made anew each time


@dataclass(frozen=True)
class FolderIndex:
    """What lies in a folder of captures."""

    captures: tuple[tuple[Path, CaptureHeader], ...]  # by round, client and name
    unreadable: tuple[tuple[Path, str], ...]  # with the reason


@dataclass(frozen=True)
class _Entry:
    """A file as the index knows it: its state, and its header or why there is none."""

    state: tuple[int, int]  # bytes, and nanoseconds of its last change
    header: CaptureHeader | None
    reason: str


def index_folder(folder: Path | str) -> list[tuple[Path, CaptureHeader]]:
    """Lists the captures of a folder with their headers, by round and client."""
    return list(survey_folder(folder).captures)


def survey_folder(folder: Path | str) -> FolderIndex:
    """Looks at the captures of a folder, those that cannot be read too, and renews its index."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CaptureError(f"{folder} is not a folder. Name a folder that holds captures.")
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    except OSError as error:
        raise CaptureError(f"{folder} cannot be listed ({error.strerror}).") from error
    known = dict(_read_index(folder / INDEX))
    entries = {path: _survey(path, known.get(path.name)) for path in paths}
    found = {path.name: entry for path, entry in entries.items()}
    if found != known:
        _write_index(folder / INDEX, found)
    captures = [(path, entry.header) for path, entry in entries.items() if entry.header is not None]
    return FolderIndex(
        tuple(sorted(captures, key=_place)),
        tuple((path, entry.reason) for path, entry in entries.items() if entry.header is None),
    )


def name_capture(header: CaptureHeader) -> str:
    """Returns a file name for a capture among others: its round and client, so written that it
    stays in its folder whatever a client calls itself."""
    round_ = "" if header.round is None else f"round-{header.round:05d}"
    client = re.sub(r"[^A-Za-z0-9_-]+", "_", header.client)[:60]
    if client != header.client:  # others may read alike
        client += f"-{sha256(header.client.encode()).hexdigest()[:8]}"
    name = "-".join(part for part in (round_, f"client-{client}" if client else "") if part)
    return f"{name or 'update'}{SUFFIX}"


def is_index(path: Path) -> bool:
    """Whether a file is the index of a folder of captures."""
    if path.name != INDEX or path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return INDEX_FORMAT.encode() in file.read(100)


def is_note(path: Path) -> bool:
    """Whether a file says what a message without arrays held."""
    if path.suffix != ".json" or path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return NOTE_FORMAT.encode() in file.read(100)


def holds_captures(folder: Path) -> bool:
    """Whether captures were written into this very folder."""
    return any(map(is_of_captures, sorted(folder.iterdir())))


def is_of_captures(path: Path) -> bool:
    """Whether a file is a capture, whole or broken or half written, a note of a message, or the
    index of a folder of them."""
    half = HALF_WRITTEN.fullmatch(path.name) is not None and path.is_file()
    return half or is_capture(path) or is_index(path) or is_note(path)


def _survey(path: Path, known: _Entry | None) -> _Entry:
    try:
        state = path.stat()
        now = (state.st_size, state.st_mtime_ns)
        if known is not None and known.state == now:
            return known
        return _Entry(now, read_header(path), "")
    except CaptureError as error:
        return _Entry(now, None, str(error).removeprefix(f"{path}: "))
    except OSError as error:  # a link that leads nowhere
        return _Entry((0, 0), None, f"it cannot be opened ({error.strerror}).")


def _place(one: tuple[Path, CaptureHeader]) -> tuple[int, str, str]:
    path, header = one
    return (-1 if header.round is None else header.round, header.client, path.name)


def _read_index(path: Path) -> Iterator[tuple[str, _Entry]]:
    """What an index says, as far as it can be believed; a broken one says nothing."""
    if not is_index(path) or path.stat().st_size > LONGEST_INDEX:
        return
    with contextlib.suppress(
        OSError, ValueError, KeyError, TypeError, AttributeError, CaptureError
    ):
        plain: Any = load_json(path.read_text(encoding="utf-8"))
        if plain["format"] != INDEX_FORMAT:
            return
        for name, entry in plain["captures"].items():
            header = entry["header"]
            read = None if header is None else read_header_text(json.dumps(header))
            size, changed = entry["state"]
            yield name, _Entry((size, changed), read, str(entry["reason"]))


def _write_index(path: Path, entries: dict[str, _Entry]) -> None:
    """Writes the index, unless a file of somebody else has its name, or the folder cannot be
    written into: everything is found without it."""
    if path.exists() and not is_index(path):
        return
    plain = {
        "format": INDEX_FORMAT,
        "captures": {
            name: {
                "state": list(entry.state),
                "header": json.loads(write_header(entry.header)) if entry.header else None,
                "reason": entry.reason,
            }
            for name, entry in entries.items()
        },
    }
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(plain, ensure_ascii=False))
