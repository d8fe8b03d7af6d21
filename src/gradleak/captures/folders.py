"""Folders of captures: of several rounds and clients, with the index that spares opening all of
them; and of a federated run, with a folder for each client and beside them what came down.

    FOLDER/sent/3f2a….safetensors             weights from the server, once for all who had the same
    FOLDER/client-7/round-00001.safetensors   what left the client in that round
    FOLDER/client-7/round-00001-evaluate.json a message without arrays: metrics, an error, masks

What left a client is kept as it left, so that it can be compared bit by bit. An update is the
difference to what came down, which the reply names by its hash.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradleak.captures.capture_file import Capture, read_capture, write_capture
from gradleak.captures.header import (
    CaptureError,
    CaptureHeader,
    ModelFacts,
    ProtocolFacts,
    complete,
    load_json,
    read_header_text,
    write_header,
)
from gradleak.captures.layout import BYTES, LONGEST_HEADER, SUFFIX, is_capture, read_header
from gradleak.records.files import write_whole

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "index.json"
INDEX_FORMAT = "gradleak.captures/1"
NOTE_FORMAT = "gradleak.message/1"  # of a message without arrays
# What a writer that was killed leaves behind, by the names that records/files.py gives
HALF_WRITTEN = re.compile(r"\.(.+\.safetensors|index\.json)\.[0-9a-f]{16}\.tmp")
LONGEST_INDEX = 8 * LONGEST_HEADER  # bytes; a longer one is made anew each time
SENT, CLIENT, NOTE = "sent", "client-", ".json"
MOST_COUNTS = 16  # of a tensor without fractions, which is written out where it has no more entries


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
    return f"{_write_name(header.round, header.client) or 'update'}{SUFFIX}"


def _write_name(round: int | None, client: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", client)[:60]
    if safe != client:  # others may read alike
        safe += f"-{sha256(client.encode()).hexdigest()[:8]}"
    parts = ("" if round is None else f"round-{round:05d}", f"{CLIENT}{safe}" if safe else "")
    return "-".join(filter(None, parts))


def is_index(path: Path) -> bool:
    """Whether a file is the index of a folder of captures."""
    return path.name == INDEX and _begins_with(path, INDEX_FORMAT)


def is_note(path: Path) -> bool:
    """Whether a file says what a message without arrays held."""
    return path.suffix == NOTE and _begins_with(path, NOTE_FORMAT)


def _begins_with(path: Path, form: str) -> bool:
    """Whether an ordinary file names its form in its first bytes."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return form.encode() in file.read(100)


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
        for name, entry in plain["captures"].items() if plain["format"] == INDEX_FORMAT else ():
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


@dataclass(frozen=True)
class ClientMessage:
    """What one client sent in one round, or that it sent something that could not be kept."""

    path: Path
    header: CaptureHeader

    @property
    def has_arrays(self) -> bool:
        return self.path.suffix == SUFFIX


@dataclass(frozen=True)
class Federation:
    """Everything that was captured of a federated run."""

    folder: Path
    messages: tuple[ClientMessage, ...]  # by round and client
    unreadable: tuple[tuple[Path, str], ...]  # with the reason

    def read_sent(self, message: ClientMessage) -> "dict[str, Tensor]":
        """Returns the weights that came down to the client before it sent this."""
        path = name_sent(self.folder, message.header.model.weights_hash)
        if not message.header.model.weights_hash or not path.exists():
            raise CaptureError(
                f"{message.path} is what a client sent, and {path} is missing: the weights that"
                " came down to it. Keep the folder of a run whole."
            )
        return dict(read_capture(path).tensors)


def write_sent(folder: Path, tensors: "Mapping[str, Tensor]", platform: Mapping[str, Any]) -> str:
    """Writes weights that came down, unless another client had the same; returns their hash."""
    digest = hash_state(tensors)
    path = name_sent(folder, digest)
    if not path.exists():
        kept, counts = split_counts(tensors)
        header = CaptureHeader(
            "weights",
            ModelFacts("", {}, digest, tuple(kept)),
            ProtocolFacts("fedavg", None, None),
            when="what the server sent to clients",
            other_records=counts,
            platform=dict(platform),
        )
        write_capture(path, Capture(header, kept))
    return digest


def write_reply(
    folder: Path, header: CaptureHeader, tensors: "Mapping[str, Tensor]", part: str = ""
) -> Path:
    """Writes what left a client; without arrays it is a note. `part` tells several messages of
    one round apart."""
    kept, counts = split_counts(tensors)
    whole = replace(header, other_records=header.other_records | counts)
    name = _write_name(header.round, part).replace(CLIENT, "") or "update"
    place = _write_name(None, header.client or "unnamed")  # whatever it calls itself
    path = folder / place / f"{name}{SUFFIX}"
    note = path.with_suffix(NOTE)
    if not kept:
        return _write_note(note, whole)
    try:
        write_capture(path, Capture(whole, kept))
    except CaptureError as error:  # NaN, or nothing but zeros
        platform = {**whole.platform, "not_captured": str(error)}
        return _write_note(note, replace(whole, platform=platform))
    note.unlink(missing_ok=True)
    return path


def survey_federation(folder: Path | str) -> Federation:
    """Lists all that clients sent, by round and client."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CaptureError(f"{folder} is not a folder. Name the folder of a federated run.")
    found, unreadable = list[ClientMessage](), list[tuple[Path, str]]()
    for place in sorted(folder.glob(f"{CLIENT}*")):
        if not place.is_dir():
            continue
        survey = survey_folder(place)
        found += [ClientMessage(*one) for one in survey.captures]
        unreadable += survey.unreadable
        for path in sorted(place.glob(f"*{NOTE}")):
            if path.name != INDEX:
                try:
                    found.append(ClientMessage(path, _read_note(path)))
                except CaptureError as error:
                    unreadable.append((path, str(error)))
    if not found and not unreadable:
        raise CaptureError(
            f"{folder} holds no captures of clients. Name the folder that CaptureMod, CaptureGrid"
            " or an observer of NVFlare wrote into."
        )
    found.sort(key=lambda one: (one.header.round or 0, rank_client(one.header.client), one.path))
    return Federation(folder, tuple(found), tuple(unreadable))


def rank_client(client: str) -> tuple[int, str]:
    """Ranks clients as people do: 2 before 10."""
    return (int(client) if client.isascii() and client.isdecimal() else -1, client)


def name_sent(folder: Path, digest: str) -> Path:
    """Returns the file of weights that came down."""
    return folder / SENT / f"{digest[:32]}{SUFFIX}"


def hash_state(tensors: "Mapping[str, Tensor]") -> str:
    """Returns the hash of named weights: names, shapes and values, in single precision."""
    import torch

    digest = sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name}{tuple(value.shape)}".encode())
        exact = value.detach().cpu()
        exact = exact.float() if exact.dtype in (torch.bfloat16, torch.float16) else exact
        digest.update(exact.contiguous().numpy().tobytes())
    return digest.hexdigest()


def split_counts(tensors: "Mapping[str, Tensor]") -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """Tells tensors that a capture holds from those without fractions, which are counts."""
    kept, counts = dict[str, "Tensor"](), dict[str, Any]()
    for name, tensor in tensors.items():
        dtype, entries = str(tensor.dtype).removeprefix("torch."), tensor.numel()
        if dtype in BYTES and entries:
            kept[name] = tensor
        else:
            few = entries <= MOST_COUNTS
            counts[name] = tensor.tolist() if few else f"{entries} entries of {dtype}"
    return kept, {"counts": counts} if counts else {}


def _write_note(path: Path, header: CaptureHeader) -> Path:
    text = write_header(complete(header))
    write_whole(
        path, json.dumps({"format": NOTE_FORMAT}, indent=1)[:-2] + f',\n "header": {text}\n}}'
    )
    path.with_suffix(SUFFIX).unlink(missing_ok=True)  # of a run before into the same folder
    return path


def _read_note(path: Path) -> CaptureHeader:
    plain: Any = None
    if is_note(path) and path.stat().st_size <= LONGEST_HEADER:
        plain = load_json(path.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(plain, dict) or plain.get("format") != NOTE_FORMAT:
        raise CaptureError("it is no note of a message that gradleak wrote.")
    return read_header_text(json.dumps(plain.get("header")))
