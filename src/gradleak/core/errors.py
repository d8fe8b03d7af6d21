"""Errors a person reads: one sentence that says what is wrong, where, and how to fix it.

Where a name or a path was mistyped it says what was probably meant.
"""

import difflib
import os
from collections.abc import Collection, Iterable
from pathlib import Path


class GradleakError(Exception):
    """Something the user can mend. The message is a whole sentence; the exit code is what the
    command returns."""

    exit_code = 2


class RunFailed(GradleakError):
    """Work began and could not be finished; whatever was computed before is on disk."""

    exit_code = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'tag'?).` for a near miss, `.` otherwise."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)." if near else "."


def refuse_unknown(what: str, word: str, known: Collection[str], listed: str) -> None:
    """Refuses a word that is none of those known: `Unknown utility 'mc' (did you mean 'mcc'?).
    Utilities: mcc, f1, accuracy.`"""
    if word not in known:
        raise GradleakError(
            f"{what} {word!r}{did_you_mean(word, known)} {listed}: {', '.join(known)}."
        )


def near_paths(written: str, otherwise: str, folders: bool = False) -> str:
    """`did you mean ./notes.csv?` where something of a like name lies beside a path that is not
    there, else the other advice."""
    path = written.rstrip("/")
    near = difflib.get_close_matches(
        os.path.basename(path), _beside(path, folders), n=3, cutoff=0.6
    )
    return (
        f"did you mean {' or '.join(os.path.join(os.path.dirname(path), name) for name in near)}?"
        if near
        else otherwise
    )


def _beside(path: str, folders: bool) -> list[str]:
    """Names of the files, or of the folders, in the folder where the path would be."""
    try:
        return sorted(
            other.name
            for other in Path(path).expanduser().parent.iterdir()
            if other.is_dir() == folders
        )
    except OSError:
        return []
