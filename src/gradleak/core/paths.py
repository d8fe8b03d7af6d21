"""Paths that a person mistyped."""

import difflib
import os
from pathlib import Path


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
