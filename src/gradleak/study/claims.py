"""Who works on a cell: of two runs that share a folder one takes it. A claim ends with its
process, however that ends."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from gradleak.records.files import make_private_folder

try:
    import fcntl
# Windows has no such locks: runs that share a folder may do a cell twice there, to the same record
except ImportError:
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def claim(folder: Path, cell: str, *, wait: bool = False) -> Iterator[bool]:
    """Whether the cell is ours until the block ends; with `wait`, only once nobody else holds
    it."""
    path = folder / "claims" / cell
    make_private_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield _locked(descriptor, wait)
    finally:
        os.close(descriptor)  # gives the lock back


def _locked(descriptor: int, wait: bool) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
