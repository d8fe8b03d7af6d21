"""Files that a reader sees whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Written aside, flushed and moved into place."""
    write_whole_bytes(path, text.encode())


def write_whole_bytes(path: Path, content: bytes) -> None:
    """The same for bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".", suffix=".tmp", delete=False) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
