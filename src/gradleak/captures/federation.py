"""The captures of a federated run: a folder for each client, and beside them what came down.

    FOLDER/sent/3f2a….safetensors             weights from the server, once for all who had the same
    FOLDER/client-7/round-00001.safetensors   what left the client in that round
    FOLDER/client-7/round-00001-evaluate.json a message without arrays: metrics, an error, masks

What left a client is kept as it left, so that it can be compared bit by bit. An update is the
difference to what came down, which the reply names by its hash.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradleak.captures.capture_file import Capture, find_versions, read_capture, write_capture
from gradleak.captures.folder_index import (
    INDEX,
    NOTE_FORMAT,
    is_note,
    name_capture,
    survey_folder,
)
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
from gradleak.captures.layout import BYTES, LONGEST_HEADER, SUFFIX
from gradleak.records.files import write_whole

if TYPE_CHECKING:
    from torch import Tensor

SENT, CLIENT, NOTE = "sent", "client-", ".json"
MOST_COUNTS = 16  # of a tensor without fractions, which is written out where it has no more entries


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
    path = folder / name_folder(header.client) / f"{_name_round(header, part)}{SUFFIX}"
    note = path.with_suffix(NOTE)
    if not kept:
        return _write_note(note, whole)
    try:
        write_capture(path, Capture(whole, kept))
    except CaptureError as error:  # NaN, or nothing but zeros
        reason = {**whole.platform, "not_captured": str(error)}
        return _write_note(note, replace(whole, platform=reason))
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


def name_folder(client: str) -> str:
    """Returns the folder of a client, whatever it calls itself."""
    header = CaptureHeader(
        "weights", ModelFacts("", {}, "", ()), ProtocolFacts("fedavg", None, None)
    )
    return name_capture(replace(header, client=client or "unnamed")).removesuffix(SUFFIX)


def hash_state(tensors: "Mapping[str, Tensor]") -> str:
    """Returns the hash of named weights: names, shapes and values, in single precision."""
    import torch

    digest = hashlib.sha256()
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
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype in BYTES and tensor.numel():
            kept[name] = tensor
        elif tensor.numel() <= MOST_COUNTS:
            counts[name] = tensor.tolist()
        else:
            counts[name] = f"{tensor.numel()} entries of {dtype}"
    return kept, {"counts": counts} if counts else {}


def _name_round(header: CaptureHeader, part: str) -> str:
    named = name_capture(replace(header, client=part)).removesuffix(SUFFIX)
    return named.replace(CLIENT, "") or "update"


def _write_note(path: Path, header: CaptureHeader) -> Path:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    text = write_header(complete(header, now, find_versions()))
    write_whole(
        path, json.dumps({"format": NOTE_FORMAT}, indent=1)[:-2] + f',\n "header": {text}\n}}'
    )
    path.with_suffix(SUFFIX).unlink(missing_ok=True)  # of a run before into the same folder
    return path


def _read_note(path: Path) -> CaptureHeader:
    if not is_note(path) or path.stat().st_size > LONGEST_HEADER:
        raise CaptureError("it is no note of a message that gradleak wrote.")
    plain = load_json(path.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(plain, dict) or plain.get("format") != NOTE_FORMAT:
        raise CaptureError("it is no note of a message that gradleak wrote.")
    return read_header_text(json.dumps(plain.get("header")))
