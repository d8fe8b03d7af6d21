"""Models with adapters of peft: LoRA on a classifier or a language model.

peft puts a pair of small matrices beside linear layers: y = W x + s·B (A x), of which A and B train
and are sent, with the modules that are saved whole, such as a classifier's head. Both are linear
layers themselves, so that attacks need nothing new of them but to know what they are fed.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from gradleak.core.errors import GradleakError
from gradleak.core.registry import Count, register
from gradleak.core.specs import resolve
from gradleak.core.streams import Streams
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.causal_language_model import CausalLanguageModel
from gradleak.targets.loading import fingerprint_of
from gradleak.targets.opened import OpenedTransformer
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.token_classifier import TokenClassifier

PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT")


def has_adapters(model: Any) -> bool:
    """Returns whether peft has put adapters into a model."""
    return bool(getattr(model, "peft_config", None))


def refuse_other_adapters(configs: Mapping[str, Any]) -> None:
    """Refuses all adapters but one of LoRA, by name."""
    for config in configs.values():
        kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
        if kind in PROMPTS:
            raise GradleakError(
                f"This model learns a prompt ({kind} of peft): its updates are gradients of prompt"
                " vectors and of no layer, which no attack here rebuilds texts from. Audit LoRA, or"
                " the full fine-tuning."
            )
        if kind != "LORA" or getattr(config, "use_dora", False):
            raise GradleakError(
                f"This model has adapters of the kind {'DoRA' if kind == 'LORA' else kind}, and"
                " gradleak audits LoRA: use LoraConfig, or audit the full fine-tuning."
            )
    if len(configs) != 1:
        raise GradleakError(
            f"This model has {len(configs)} adapters ({', '.join(configs)}): keep the one that"
            " trains (delete_adapter)."
        )


def add_adapters(model: nn.Module, configs: Mapping[str, Any]) -> Any:
    """Puts adapters of the same shapes into a copy of the model they came from."""
    peft = import_peft()
    ((name, config),) = configs.items()
    config = copy.deepcopy(config)
    config.inference_mode = False
    config.init_lora_weights = True  # other ways to begin change the weights beside them too
    with torch.random.fork_rng(devices=[]):
        return peft.get_peft_model(model, config, adapter_name=name).get_base_model()


def import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise GradleakError("Adapters need peft: pip install 'gradleak[lora]'.") from error
    return peft


@register("target", "lora")
@dataclass(frozen=True)
class Lora(TargetSpec):
    """LoRA adapters on a classifier, trained by peft or drawn anew; the head trains with them.

    Drawn anew, B is zero: that is the first step of a training.
    """

    base: str = "minilm"  # any target, by its line
    path: str | None = None  # the folder that peft saved adapters to
    rank: Count = 8
    modules: tuple[str, ...] = ()  # peft's own choice for the architecture
    seed: int = 0

    @property
    def labels_are_open(self) -> bool:
        return _read_base(self.base).labels_are_open

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        return _open(self, "SEQ_CLS", device, dtype)

    def fingerprint(self) -> str:
        return _fingerprint(self)


@register("target", "causal_lora")
@dataclass(frozen=True)
class CausalLora(TargetSpec):
    """The same on a causal language model."""

    labels_are_tokens: ClassVar[bool] = True

    base: str = "tiny_causal:shape=llama"  # any target, by its line
    path: str | None = None  # the folder that peft saved adapters to
    rank: Count = 8
    modules: tuple[str, ...] = ()  # peft's own choice for the architecture
    seed: int = 0

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        return _open(self, "CAUSAL_LM", device, dtype)

    def fingerprint(self) -> str:
        return _fingerprint(self)


def _open(
    spec: Lora | CausalLora, task: str, device: torch.device, dtype: torch.dtype
) -> OpenedTransformer:
    peft, opened = import_peft(), _read_base(spec.base).open(device, dtype)
    if not isinstance(opened, OpenedTransformer) or (
        opened.labels_are_tokens != spec.labels_are_tokens
    ):
        raise GradleakError(f"{spec.base} cannot take adapters here: use lora or causal_lora.")
    if isinstance(opened, TokenClassifier):
        raise GradleakError(
            f"{spec.base} is a token classifier, which is opened with adapters from a captured"
            " update alone: capture a step of your own loop (gradleak.capture)."
        )
    with torch.random.fork_rng(devices=[]):
        if spec.path is None:
            config = peft.LoraConfig(
                task_type=task, r=spec.rank, target_modules=list(spec.modules) or None
            )
            adapted = peft.get_peft_model(opened.module, config)
            _redraw(adapted, Streams.root("lora", spec.seed))
        else:
            adapted = peft.PeftModel.from_pretrained(opened.module, spec.path, is_trainable=True)
    refuse_other_adapters(adapted.peft_config)
    inner = adapted.get_base_model().to(device, dtype)
    frozen = tuple(name for name, one in inner.named_parameters() if not one.requires_grad)
    if spec.labels_are_tokens:
        return CausalLanguageModel("causal_lora", inner, opened.tokenizer, frozen)
    drawn: str = opened.drawn  # type: ignore[attr-defined]
    return TextClassifier("lora", inner, opened.tokenizer, frozen, drawn=drawn)


def _read_base(line: str) -> TargetSpec:
    spec = resolve("target", line)
    assert isinstance(spec, TargetSpec)
    return spec


@torch.no_grad()
def _redraw(model: nn.Module, streams: Streams) -> None:
    """Draws A anew as peft does, from named streams."""
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            # Kaiming's uniform with a = √5, as peft has it: ±1/√inputs
            drawn = torch.rand(parameter.shape, generator=streams.child(name).generator())
            parameter.copy_((2 * drawn - 1) / parameter.shape[1] ** 0.5)


def _fingerprint(spec: Lora | CausalLora) -> str:
    base = _read_base(spec.base).fingerprint()
    if spec.path is None:
        return f"{base}+lora:seed={spec.seed}"
    return f"{base}+{fingerprint_of(str(Path(spec.path).expanduser()))}"
