"""Any Hugging Face classifier of texts or tokens, or causal language model, by hub id or folder."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from gradleak.core.errors import GradleakError
from gradleak.core.not_ours import quiet_transformers
from gradleak.core.registry import Count, register
from gradleak.core.streams import Streams
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.causal_language_model import CausalLanguageModel
from gradleak.targets.loading import (
    architectures_of,
    fingerprint_of,
    is_language_model,
    load_model,
    load_tokenizer,
    source_of,
)
from gradleak.targets.opened import LossOver
from gradleak.targets.problems import PROBLEMS, ProblemName
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.token_classifier import TokenClassifier

TOKENS: ProblemName = "token_classification"


@register("target", "huggingface")
@dataclass(frozen=True)
class HuggingFace(TargetSpec):
    """A sequence or token classifier by hub id or folder (BERT, DistilBERT, RoBERTa, MPNet …).
    Code from the hub is never run."""

    added_later: ClassVar[frozenset[str]] = frozenset({"problem_type"})

    path: str
    classes: Count | None = None  # the checkpoint's own number, or 2 where it has no head
    head_std: float = 0.02  # spread of a random head, where the checkpoint has none (LAMP)
    head_seed: int = 0  # every audit of one study attacks the same head
    # groups, modules or layers (layers:1-3) that do not train, hence are not sent
    frozen: tuple[str, ...] = ()
    attend_padding: bool = False  # pass no attention mask, as LAMP's released code does at B > 1
    allow_pickle: bool = False  # load .bin weights, which can run code
    # What its head learns, in transformers' words; by itself what config.json says
    problem_type: ProblemName | None = None

    @property
    def labels_are_open(self) -> bool:
        stated = self.problem_type or stated_problem(self.path, self.classes)
        return stated != "single_label_classification"

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
            problem=self.problem_type or stated_problem(self.path, self.classes),
        )

    def fingerprint(self) -> str:
        return fingerprint_of(self.path)


@register("target", "causal_lm")
@dataclass(frozen=True)
class CausalLM(TargetSpec):
    """A causal language model by hub id, folder or GGUF file (GPT-2, Llama …), trained to predict
    the next token. Hub code is never run."""

    labels_are_tokens: ClassVar[bool] = True
    added_later: ClassVar[frozenset[str]] = frozenset({"loss_over"})

    path: str
    # groups, modules or layers (layers:1-3) that do not train, hence are not sent
    frozen: tuple[str, ...] = ()
    allow_pickle: bool = False  # load .bin weights, which can run code
    # A batch's loss is the mean over its texts, or over its tokens, as transformers has it
    loss_over: LossOver = "texts"

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        return open_language_model(
            self.path,
            source_of(self.path),
            device,
            dtype,
            frozen=self.frozen,
            safetensors_only=not self.allow_pickle,
            loss_over=self.loss_over,
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
    loss_over: LossOver = "texts",
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
    return CausalLanguageModel(name, model.to(device), tokenizer, frozen, loss_over=loss_over)


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
    problem: ProblemName = "single_label_classification",
) -> TextClassifier | TokenClassifier:
    """Loads model and tokenizer and draws a missing head."""
    of_tokens, library = problem == TOKENS, quiet_transformers()
    auto_class, called = (
        (library.AutoModelForTokenClassification, "token classifier")
        if of_tokens
        else (library.AutoModelForSequenceClassification, "sequence classifier")
    )
    tokenizer = load_tokenizer(name, source)
    options: dict[str, Any] = {} if classes is None else {"num_labels": classes}
    model, missing = load_model(auto_class, called, name, source, dtype, safetensors_only, options)
    _refuse_other_problem(name, model.config, problem, classes)
    model.config.problem_type = None if of_tokens else problem
    _draw_missing(model, missing, head_std, head_seed)
    stated = tuple(model.config.architectures or ())
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    return (TokenClassifier if of_tokens else TextClassifier)(
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


def stated_problem(path: str, classes: int | None = None) -> ProblemName:
    """What the head of a folder's model learns by its config.json, as transformers reads it; of a
    hub id, which is not read yet, one class."""
    if any(name.endswith("ForTokenClassification") for name in architectures_of(path)):
        return TOKENS
    config = Path(path).expanduser() / "config.json"
    try:
        stated = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stated = {}  # whoever opens the model says what is wrong with it
    stated = stated if isinstance(stated, dict) else {}
    problem = stated.get("problem_type")
    if problem in PROBLEMS:
        return cast(ProblemName, problem)
    outputs = len(stated.get("id2label") or (0, 1)) if classes is None else classes
    return "regression" if outputs == 1 else "single_label_classification"


def _refuse_other_problem(
    name: str, config: Any, problem: ProblemName, classes: int | None
) -> None:
    """Refuses a checkpoint of the hub whose head learns something else than was asked for."""
    stated = config.problem_type or ("regression" if config.num_labels == 1 else None)
    if any(one.endswith("ForTokenClassification") for one in config.architectures or ()):
        stated = TOKENS
    if stated not in (None, problem) and problem == "single_label_classification":
        raise GradleakError(
            f"{name} is a model of the kind {stated}: add problem_type={stated} to the target, or"
            " problem_type=single_label_classification and classes=… with a folder of it."
        )


@torch.no_grad()
def _draw_missing(model: Any, missing: set[str], std: float, seed: int) -> None:
    """Normal weights and zero biases for what the checkpoint lacks, from a stream of their own."""
    root = Streams.root("head", seed)
    for name, parameter in model.named_parameters():
        if name in missing:
            drawn = torch.randn(parameter.shape, generator=root.child(name).generator()) * std
            parameter.copy_(drawn if parameter.ndim > 1 else torch.zeros_like(drawn))
