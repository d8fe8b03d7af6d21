"""Model weights in a few bits a number: whole numbers with one scale for every 32 neighbours,
packed without gaps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

GROUP = 32


def pack(tensor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Bits and scales of a tensor whose size is a multiple of 32."""
    groups = tensor.detach().float().reshape(-1, GROUP)
    top = 2 ** (bits - 1) - 1
    scales = (groups.abs().amax(1, keepdim=True) / top).clamp_min(1e-8).half()
    whole = (groups / scales.float()).round().clamp(-top, top).to(torch.int16) + top
    digits = (whole.numpy()[..., None] >> np.arange(bits - 1, -1, -1)) & 1
    return torch.from_numpy(np.packbits(digits.astype(np.uint8).reshape(-1))), scales[:, 0]


def unpack(packed: Tensor, scales: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """The tensor again, as float32."""
    count = int(np.prod(shape))
    digits = np.unpackbits(packed.numpy(), count=count * bits).reshape(count, bits)
    whole = np.zeros(count, np.int16)
    for place in range(bits):  # a product of whole numbers would take five times as long
        whole = 2 * whole + digits[:, place]
    whole -= 2 ** (bits - 1) - 1
    return (
        torch.from_numpy(whole.astype(np.float32)).view(-1, GROUP) * scales.float()[:, None]
    ).view(shape)


def save_packed(
    path: Path, weights: dict[str, Tensor], bits: dict[str, int], facts: dict[str, Any]
) -> None:
    """Matrices in the given number of bits, vectors in half precision, facts as metadata."""
    stored: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, tensor in weights.items():
        if name in bits:
            stored[f"{name}|bits"], stored[f"{name}|scales"] = pack(tensor.cpu(), bits[name])
            shapes[name] = list(tensor.shape)
        else:
            stored[name] = tensor.detach().cpu().half()
    save_file(
        stored,
        path,
        metadata={
            "facts": json.dumps(facts),
            "bits": json.dumps(bits),
            "shapes": json.dumps(shapes),
        },
    )


def load_packed(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights as float32, and the facts."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        bits, shapes = json.loads(metadata["bits"]), json.loads(metadata["shapes"])
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = {
        name: unpack(
            stored[f"{name}|bits"], stored[f"{name}|scales"], bits[name], tuple(shapes[name])
        )
        for name in bits
    } | {name: tensor.float() for name, tensor in stored.items() if "|" not in name}
    return weights, json.loads(metadata["facts"])
