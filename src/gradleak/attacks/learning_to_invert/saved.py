"""Fits on disk: one safetensors file whose header says what was learnt, and for which setting."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradleak.core.errors import GradleakError
from gradleak.records.files import written_aside

FORMAT = "gradleak.fit/1"


def save_fit(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Writes a fit whole or not at all."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with written_aside(path) as aside:
        save_file(whole, aside, {"format": FORMAT, "facts": json.dumps(facts, sort_keys=True)})


def load_fit(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a fit."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        if header.get("format") != FORMAT:
            raise GradleakError(f"{path} is not a {FORMAT}: name a file that an audit left under fits.")
        return load_file(path), json.loads(header["facts"])
    except (OSError, SafetensorError) as error:
        raise GradleakError(f"Cannot read the fit {path}: {error}.") from error
