"""Weights of image classifiers: from a local file, or named by what they were drawn from."""

import hashlib
from pathlib import Path

from torch import nn

from gradleak.core.errors import GradleakError


def load_weights(module: nn.Module, path: str, name: str) -> None:
    """Reads a safetensors file into a module; every tensor must be there, and fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(path).expanduser()
    if not file.is_file():
        raise GradleakError(
            f"There is no file {path}: weights names a safetensors file with the parameters of"
            f" {name}."
        )
    try:
        module.load_state_dict(load_file(file))
    except (SafetensorError, RuntimeError) as error:
        raise GradleakError(
            f"{path} does not hold the weights of {name}: {str(error).splitlines()[-1].strip()}."
        ) from error


def fingerprint_of(weights: str | None, seed: int) -> str:
    """The hash of the file, or the seed the weights were drawn from."""
    if weights is None:
        return f"made:seed={seed}"
    return "sha256:" + hashlib.sha256(Path(weights).expanduser().read_bytes()).hexdigest()[:16]
