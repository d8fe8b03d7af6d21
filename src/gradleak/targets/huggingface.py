"""Any Hugging Face sequence classifier or causal language model, by hub id or local folder."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from gradleak.core.errors import GradleakError
from gradleak.core.not_ours import quiet_transformers
from gradleak.core.registry import Count, register
from gradleak.core.streams import Streams
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.causal_language_model import CausalLanguageModel
from gradleak.targets.loading import (
    fingerprint_of,
    is_language_model,
    load_model,
    load_tokenizer,
    source_of,
)
from gradleak.targets.text_classifier import TextClassifier


@register("target", "huggingface")
@dataclass(frozen=True)
class HuggingFace(TargetSpec):
    """A sequence classifier by hub id or folder (BERT, DistilBERT, RoBERTa, MPNet, ELECTRA …).
    Code from the hub is never run."""

    path: str
    classes: Count | None = None  # the checkpoint's own number, or 2 where it has no head
    head_std: float = 0.02  # spread of a random head, where the checkpoint has none (LAMP)
    head_seed: int = 0  # every audit of one study attacks the same head
    # groups, modules or layers (layers:1-3) that do not train, hence are not sent
    frozen: tuple[str, ...] = ()
    attend_padding: bool = False  # pass no attention mask, as LAMP's released code does at B > 1
    allow_pickle: bool = False  # load .bin weights, which can run code

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        return open_classifier(
            self.path,
            source_of(self.path),
            device,
            dtype,
            classes=self.classes,
            head_std=self.head_std,
            head_seed=self.head_seed,
            frozen=self.frozen,
            attend_padding=self.attend_padding,
            safetensors_only=not self.allow_pickle,
        )

    def fingerprint(self) -> str:
        return fingerprint_of(self.path)


@register("target", "causal_lm")
@dataclass(frozen=True)
class CausalLM(TargetSpec):
    """A causal language model by hub id, folder or GGUF file (GPT-2, Llama …), trained to predict
    the next token. Hub code is never run."""

    labels_are_tokens: ClassVar[bool] = True

    path: str
    # groups, modules or layers (layers:1-3) that do not train, hence are not sent
    frozen: tuple[str, ...] = ()
    allow_pickle: bool = False  # load .bin weights, which can run code

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        return open_language_model(
            self.path,
            source_of(self.path),
            device,
            dtype,
            frozen=self.frozen,
            safetensors_only=not self.allow_pickle,
        )

    def fingerprint(self) -> str:
        return fingerprint_of(self.path)


def open_language_model(
    name: str,
    source: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    frozen: tuple[str, ...] = (),
    safetensors_only: bool = True,
) -> CausalLanguageModel:
    """Loads model and tokenizer of a whole causal language model."""
    auto_class = quiet_transformers().AutoModelForCausalLM
    tokenizer = load_tokenizer(name, source)
    model, missing = load_model(
        auto_class, "causal language model", name, source, dtype, safetensors_only, {}
    )
    if missing:
        raise GradleakError(
            f"The checkpoint {name} has no {min(missing)}: it is not a whole causal language model,"
            " and a random part would make the audit another model's."
        )
    return CausalLanguageModel(name, model.to(device), tokenizer, frozen)


def open_classifier(
    name: str,
    source: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    classes: int | None,
    head_std: float,
    head_seed: int,
    frozen: tuple[str, ...] = (),
    attend_padding: bool = False,
    safetensors_only: bool = True,
) -> TextClassifier:
    """Loads model and tokenizer and draws a missing head."""
    auto_class = quiet_transformers().AutoModelForSequenceClassification
    tokenizer = load_tokenizer(name, source)
    if isinstance(source, Path):
        _refuse_regression(name, source, classes)
    options: dict[str, Any] = {} if classes is None else {"num_labels": classes}
    model, missing = load_model(
        auto_class, "sequence classifier", name, source, dtype, safetensors_only, options
    )
    _draw_missing(model, missing, head_std, head_seed)
    stated = tuple(model.config.architectures or ())
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    return TextClassifier(
        name,
        model.to(device),
        tokenizer,
        frozen,
        attend_padding,
        describe_drawn_parts(name, missing, stated),
    )


def describe_drawn_parts(name: str, missing: Iterable[str], architectures: Sequence[str]) -> str:
    """`with a random head (classifier), which BertModel does not have`: what a checkpoint lacks
    and was drawn."""
    modules = sorted({parameter.rpartition(".")[0] for parameter in missing})
    if not modules:
        return ""
    shown = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
    of = architectures[0] if architectures else "its checkpoint"
    advice = (
        f" (to train it as a language model: causal_lm:path={name})"
        if is_language_model(architectures)
        else ""
    )
    # A head may have a layer before its last, and a pooler
    part = "a random head" if len(modules) <= 3 else "random parts"
    return f"with {part} ({shown}), which {of} does not have{advice}"


def _refuse_regression(name: str, folder: Path, classes: int | None) -> None:
    config = folder / "config.json"
    stated = json.loads(config.read_text()).get("id2label") if config.exists() else None
    if classes is None and stated is not None and len(stated) == 1:
        raise GradleakError(
            f"{name} is a regression model (1 output): gradleak audits classifiers. Use one with"
            " two or more labels."
        )


@torch.no_grad()
def _draw_missing(model: Any, missing: set[str], std: float, seed: int) -> None:
    """Normal weights and zero biases for what the checkpoint lacks, from a stream of their own."""
    root = Streams.root("head", seed)
    for name, parameter in model.named_parameters():
        if name in missing:
            drawn = torch.randn(parameter.shape, generator=root.child(name).generator()) * std
            parameter.copy_(drawn if parameter.ndim > 1 else torch.zeros_like(drawn))
