"""Files that a reader sees whole or not at all; private ones are their owner's alone, whatever the
umask.

Guesses are as private as the texts they were made of, so every file of a run is private. What is
written to be published, and holds no text, has the modes that the umask gives. What can go wrong
with a record is said here too, so that a person can mend it.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
ORDINARY_FILE = 0o666  # less the umask
# No fault of the command's: no room, or the disk is failing
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class RecordError(ValueError):
    """A record that cannot be written, found or read. The message is a whole sentence with the
    fix."""

    exit_code = 2


class DiskFull(RecordError):
    """Work began and cannot be written down."""

    exit_code = 3


@contextlib.contextmanager
def full_disk_explained(doing: str) -> Iterator[None]:
    """Turns the system's word that nothing more fits on the disk into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DiskFull(
            f"Cannot {doing}: {error.strerror}. Make room and run the same command again: it goes"
            " on from what was finished."
        ) from error


@contextlib.contextmanager
def explain_refusal(doing: str) -> Iterator[None]:
    """Turns the system's refusal into a sentence."""
    try:
        with full_disk_explained(doing):
            yield
    except OSError as error:
        raise RecordError(
            f"Cannot {doing}: {error.strerror}. Choose a folder you may write to, for example --out"
            " ./records."
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Writes a private text: aside, flushed and moved into place."""
    write_whole_bytes(path, text.encode())


def write_whole_bytes(path: Path, content: bytes) -> None:
    """Does the same for bytes."""
    with written_aside(path) as aside:
        aside.write_bytes(content)


def write_to_publish(path: Path, content: bytes) -> None:
    """Writes a file that holds no private text, whole or not at all, with the modes that other
    programs' files have."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replace_when_done(path, ORDINARY_FILE) as aside:
        aside.write_bytes(content)


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """An empty private file to be filled, which takes the place of `path` when the block ends
    without an error."""
    make_private_folder(path.parent)
    with _replace_when_done(path, PRIVATE_FILE) as aside:
        aside.chmod(PRIVATE_FILE)  # a umask may have taken what its owner needs
        yield aside
        aside.chmod(PRIVATE_FILE)  # a library may have put a file of its own there


def make_private_folder(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, for their owner alone; folders that
    are there keep their modes."""
    for one in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        with contextlib.suppress(FileExistsError):  # another process was first
            one.mkdir(PRIVATE_FOLDER)
            one.chmod(PRIVATE_FOLDER)  # a umask may have taken what its owner needs
    folder.mkdir(exist_ok=True)  # refuses a file in its place


@contextlib.contextmanager
def _replace_when_done(path: Path, mode: int) -> Iterator[Path]:
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
