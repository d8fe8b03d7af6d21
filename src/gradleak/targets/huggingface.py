"""Any Hugging Face sequence classifier, by hub id or local folder."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from gradleak.core.errors import GradleakError
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.text_classifier import TextClassifier


@register("target", "huggingface")
@dataclass(frozen=True)
class HuggingFace(TargetSpec):
    """A sequence classifier by hub id or folder (BERT, DistilBERT, RoBERTa, MPNet, ELECTRA …). Code from the hub is never run."""

    path: str
    classes: int | None = None  # the checkpoint's own number, or 2 where it has no head
    head_std: float = 0.02  # spread of a random head, where the checkpoint has none (LAMP)
    head_seed: int = 0  # every audit of one study attacks the same head
    frozen: tuple[str, ...] = ()  # groups, modules or layers (layers:1-3) that do not train, hence are not sent
    attend_padding: bool = False  # pass no attention mask, as LAMP's released code does at B > 1
    allow_pickle: bool = False  # load .bin weights, which can run code

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        return open_classifier(
            self.path,
            Path(self.path) if Path(self.path).is_dir() else self.path,
            device,
            dtype,
            classes=self.classes,
            head=HeadSpec(self.head_std, self.head_seed),
            frozen=self.frozen,
            attend_padding=self.attend_padding,
            safetensors_only=not self.allow_pickle,
        )

    def fingerprint(self) -> str:
        folder = Path(self.path)
        weights = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")) if folder.is_dir() else []
        if not weights:
            return f"hub:{self.path}"
        together = "".join(sha256_of(file) for file in weights) if len(weights) > 1 else sha256_of(weights[0])
        return "sha256:" + (hashlib.sha256(together.encode()).hexdigest() if len(weights) > 1 else together)[:16]

    def with_pickle(self) -> "HuggingFace":
        return replace(self, allow_pickle=True)


@dataclass(frozen=True)
class HeadSpec:
    """How a missing classification head is drawn."""

    std: float
    seed: int


def open_classifier(
    name: str,
    source: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    classes: int | None,
    head: HeadSpec,
    frozen: tuple[str, ...] = (),
    attend_padding: bool = False,
    safetensors_only: bool = True,
) -> TextClassifier:
    """Loads model and tokenizer with eager attention (fused kernels have no second derivative) and draws a missing head."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = _load_tokenizer(transformers, name, source)
    with torch.random.fork_rng(devices=[]):  # the library draws missing weights from the global generator, for us to replace
        model, missing = _load_model(transformers, name, source, dtype, classes, safetensors_only)
    _draw_missing(model, missing, head)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    return TextClassifier(name, model.to(device), tokenizer, frozen, attend_padding)


def _load_tokenizer(transformers: Any, name: str, source: str | Path) -> Any:
    if isinstance(source, Path) and not any(
        (source / part).exists() for part in ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model")
    ):
        raise GradleakError(f"{name} has no tokenizer files (tokenizer.json, vocab.txt …): save the tokenizer into that folder.")
    try:
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise GradleakError(f"No tokenizer could be loaded for {name}: {_first_line(error)}") from error


def _load_model(
    transformers: Any, name: str, source: str | Path, dtype: torch.dtype, classes: int | None, safetensors_only: bool
) -> tuple[Any, set[str]]:
    options: dict[str, Any] = {} if classes is None else {"num_labels": classes}
    if isinstance(source, Path):
        _refuse_regression(name, source, classes)
        if safetensors_only and not list(source.glob("*.safetensors")):
            raise GradleakError(
                f"{name} has no .safetensors weights; pickled weights can run code. "
                "Convert them, or pass --allow-pickle if you trust them."
            )
    try:
        model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
            source,
            attn_implementation="eager",
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True if safetensors_only else None,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise GradleakError(f"The model {name} could not be loaded as a sequence classifier: {_first_line(error)}") from error
    return model, set(info["missing_keys"])


def _refuse_regression(name: str, folder: Path, classes: int | None) -> None:
    config = folder / "config.json"
    if not config.exists():
        raise GradleakError(f"{name} has no config.json: it is not a Hugging Face model folder.")
    stated = json.loads(config.read_text()).get("id2label")
    if classes is None and stated is not None and len(stated) == 1:
        raise GradleakError(
            f"{name} is a regression model (1 output): gradleak audits classifiers. Use one with two or more labels."
        )


@torch.no_grad()
def _draw_missing(model: Any, missing: set[str], head: HeadSpec) -> None:
    """Normal weights and zero biases for what the checkpoint lacks, from a stream of their own."""
    root = Streams.root("head", head.seed)
    for name, parameter in model.named_parameters():
        if name in missing:
            drawn = torch.randn(parameter.shape, generator=root.child(name).generator()) * head.std
            parameter.copy_(drawn if parameter.ndim > 1 else torch.zeros_like(drawn))


def sha256_of(path: Path) -> str:
    """The hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
