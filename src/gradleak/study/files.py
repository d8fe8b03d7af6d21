"""Files that a reader sees whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Written aside, flushed and moved into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
