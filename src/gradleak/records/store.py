"""Records on disk: a JSON file each, and one of details beside it, written whole or not at all; the
key of their hashes is kept apart."""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradleak.records.errors import RecordError, explain_refusal
from gradleak.records.files import make_private_folder, write_whole, write_whole_bytes
from gradleak.records.plain import to_plain
from gradleak.records.schema import Record
from gradleak.records.summary import Summary, hash_of, read_summary

KEY_BYTES = 32


@dataclass(frozen=True)
class SecretKey:
    """What makes hashes of private texts useless to whoever holds the records alone: short texts
    could be guessed and hashed."""

    value: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.value) != KEY_BYTES:
            raise RecordError(
                f"A key has {KEY_BYTES} bytes, not {len(self.value)}; delete the broken key file to"
                " get a new one."
            )


def keyed_hash(key: SecretKey, text: str) -> str:
    """HMAC-SHA256 of the text, in hex."""
    return hmac.new(key.value, text.encode(), hashlib.sha256).hexdigest()


def open_key(folder: Path, name: str = "secrets") -> SecretKey:
    """The key in `folder/keys/<name>.key`, made on first use: readable by its owner only and
    ignored by git."""
    keys = folder / "keys"
    path = keys / f"{name}.key"
    with explain_refusal(f"keep a key in {keys}"):
        make_private_folder(keys)
        write_whole(keys / ".gitignore", "*\n")
        if not path.exists():
            _create_key(path)
        return SecretKey(path.read_bytes())


def check_writable(folder: Path) -> None:
    """Makes the folder and tries to write into it, so that a long run does not fail at its end."""
    with explain_refusal(f"write records into {folder}"):
        make_private_folder(folder)
        probe = _unused_name(folder, "probe")
        probe.touch(exist_ok=False)
        probe.unlink()


def write_record(folder: Path, record: Record) -> Path:
    """Writes `folder/<id>.json`; a reader sees the old file or the new one, never half of one."""
    path = folder / f"{record.id}.json"
    rewrite_record(path, record)
    return path


def rewrite_record(path: Path, record: Record) -> None:
    """Writes a record where it lies, whatever its file is called.

    Its details come first and the record, which names them, after: a reader finds the old ones
    whole or the new ones. Then the old ones go.
    """
    content = _dump(record.details.to_json(), None)
    summary = Summary.of(path, record, hash_of(content))
    details = summary.details_path
    with explain_refusal(f"write records into {path.parent}"):
        write_whole_bytes(details, content)
        rewrite_summary(summary)
        for old in details.parent.glob(f"{record.id}-*.json"):
            if old != details:
                old.unlink(missing_ok=True)


def rewrite_summary(summary: Summary) -> None:
    """Writes a record's own file; its details stay as they are."""
    plain = summary.record.to_json()
    for long in (plain, *plain["attacks"].values()):
        for name in ("secrets", "examples", "batches"):
            long.pop(name, None)
    plain |= {"columns": to_plain(summary.columns), "details": summary.details}
    with explain_refusal(f"write records into {summary.path.parent}"):
        write_whole_bytes(summary.path, _dump(plain, 1))


def _dump(plain: dict[str, Any], indent: int | None) -> bytes:
    return (json.dumps(plain, indent=indent, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_record(path: Path) -> Record:
    """Reads one record with its details."""
    return read_summary(path).whole()


def _create_key(path: Path) -> None:
    """Written aside and linked into place: of processes that start together one makes the key
    and none sees half of it."""
    unfinished = _unused_name(path.parent, path.stem)
    try:
        with os.fdopen(
            os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
        ) as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _unused_name(folder: Path, stem: str) -> Path:
    return folder / f".{stem}.{secrets.token_hex(8)}.tmp"
