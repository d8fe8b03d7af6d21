"""Writes a half-precision copy of MiniLM-L6 (45 MB) for machines where size matters: python
benchmarks/half_minilm.py FOLDER.

Use it with GRADLEAK_MINILM_HALF=FOLDER and --target minilm:weights=half. Its hash is pinned in
gradleak.targets.minilm.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gradleak.targets.loading import sha256_of
from gradleak.targets.minilm import installed_folder


def main(folder: Path) -> None:
    source = installed_folder()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    halved = {
        name: tensor.half() if tensor.dtype == torch.float32 else tensor
        for name, tensor in sorted(tensors.items())
    }
    save_file(halved, folder / "model.safetensors", metadata={"format": "pt"})
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.txt",
    ):
        shutil.copyfile(source / name, folder / name)
    print(f"{folder / 'model.safetensors'} sha256 {sha256_of(folder / 'model.safetensors')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
