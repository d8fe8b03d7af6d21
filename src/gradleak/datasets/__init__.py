"""Where private batches come from: files, hub ids, the papers' datasets, built-in canaries."""

import json
from pathlib import Path

from gradleak.core.dataset import Dataset, as_dataset
from gradleak.core.registry import list_registered
from gradleak.datasets.benchmarks import Cola, RottenTomatoes, Sst2, Wikitext2
from gradleak.datasets.file import (
    ClientTexts,
    File,
    HeldTexts,
    Hub,
    OwnTexts,
    read_client_texts,
)
from gradleak.datasets.made_up import Canaries, Shapes
from gradleak.datasets.picture_sets import Cifar10, PictureFiles
from gradleak.datasets.rows import known_format
from gradleak.datasets.selection import Selection, TuningPart

__all__ = [
    "Canaries",
    "Cifar10",
    "ClientTexts",
    "Cola",
    "File",
    "HeldTexts",
    "Hub",
    "OwnTexts",
    "PictureFiles",
    "RottenTomatoes",
    "Selection",
    "Shapes",
    "Sst2",
    "TuningPart",
    "Wikitext2",
    "read_client_texts",
    "resolve_dataset",
]


def resolve_dataset(described: str) -> Dataset:
    """The dataset a line describes: `cola:split=dev`, or a file as in `notes.csv` and
    `notes.csv:text=note,label=null`."""
    return as_dataset(_as_file(described) or described)


def _as_file(described: str) -> str | None:
    """The line spelled out as a `file` dataset, if what it begins with is a path and not a
    registered name."""
    whole = Path(described.strip()).expanduser()
    path, _, fields = (
        (described.strip(), "", "") if whole.is_file() else described.strip().partition(":")
    )
    is_path = Path(path).expanduser().exists() or known_format(Path(path)) is not None
    if not path or path in list_registered("dataset") or not is_path:
        return None
    return f"file:path={json.dumps(path, ensure_ascii=False)}" + (f",{fields}" if fields else "")
