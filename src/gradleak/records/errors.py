"""What can be wrong with a record, said so that a person can mend it."""

import contextlib
import errno
from collections.abc import Iterator

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
