"""A model that the user holds, opened for an audit as a copy: the user's own is left as it is."""

import copy
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradleak.captures import hash_state
from gradleak.core.errors import GradleakError
from gradleak.core.registry import register
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.adapters import add_adapters, has_adapters, refuse_other_adapters
from gradleak.targets.causal_language_model import CausalLanguageModel
from gradleak.targets.loading import is_language_model
from gradleak.targets.opened import LossOver
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.token_classifier import TokenClassifier

# What puts a model inside another module, and the attribute under which it lies there:
# DistributedDataParallel and DataParallel, torch.compile, Opacus.
WRAPPERS = ("module", "_orig_mod", "_module")
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


@register("target", "in_memory")
@dataclass(frozen=True)
class InMemory(TargetSpec):
    """A model that was audited from Python, where its owner held it; it cannot be opened by name.

    Records of `gradleak.score` name it so that two models are told apart.
    """

    model: str  # its class
    weights: str  # the first digits of their hash

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        raise GradleakError(
            f"This {self.model} was audited from memory, and no file holds it: save it with"
            " model.save_pretrained(FOLDER) and name that folder as the target."
        )

    def fingerprint(self) -> str:
        return f"sha256:{self.weights}"


def unwrap(model: Any) -> Any:
    """Returns the model inside what parallel training, compilation, Opacus or peft put around it;
    peft's adapters stay in it."""
    # By its only child: wrappers of Opacus and torch.compile have all attributes of what is inside.
    while isinstance(model, nn.Module):
        inside = dict(model.named_children())
        if hasattr(model, "get_base_model") and has_adapters(model):
            refuse_other_adapters(model.peft_config)  # type: ignore[arg-type]
            model = model.get_base_model()  # type: ignore[operator]
            continue
        if len(inside) != 1 or not inside.keys() & set(WRAPPERS):
            break
        (model,) = inside.values()
    return model


def list_trained(model: nn.Module) -> list[str]:
    """Returns the names of the parameters that train, tied ones once."""
    return [name for name, value in unwrap(model).named_parameters() if value.requires_grad]


def open_in_memory(
    model: Any,
    tokenizer: Any,
    device: torch.device,
    trained: frozenset[str] | None = None,
    loss_over: LossOver = "tokens",
) -> Target:
    """Opens a copy of a model; `trained` names the parameters that do, if not as they say."""
    inner = unwrap(model)
    name = type(inner).__name__
    refuse_strange(inner, name)
    sent = frozenset(list_trained(inner)) if trained is None else trained
    frozen = tuple(name for name, _ in inner.named_parameters() if name not in sent)
    copied = _copy(inner).to(device)
    if copied.config.pad_token_id is None:
        copied.config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    if is_language_model((name,)):
        return CausalLanguageModel(name, copied, tokenizer, frozen, loss_over=loss_over)
    if name.endswith("ForTokenClassification"):
        return TokenClassifier(name, copied, tokenizer, frozen, loss_over=loss_over)
    return TextClassifier(name, copied, tokenizer, frozen)


def refuse_strange(model: Any, name: str) -> None:
    """Refuses what is no model that can be audited."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise GradleakError(
            f"gradleak audits Hugging Face models, and this is a {name} without a config: pass a"
            " sequence or token classifier or a causal language model of transformers."
        )
    if has_adapters(model):
        refuse_other_adapters(model.peft_config)  # type: ignore[arg-type]
    if not (is_language_model((name,)) or name.endswith(CLASSIFIERS)):
        raise GradleakError(
            f"gradleak audits sequence classifiers, token classifiers and causal language models,"
            f" and this is a {name}."
        )


@torch.no_grad()
def _copy(model: Any) -> Any:
    """Returns the model in single precision, or double where it is, without hooks or gradients.

    It is built anew and not deep-copied: hooks would come along, and run. Attention is computed
    step by step, as second derivatives need it. Weights are drawn where the model is built, and
    the global generator is left as it was.
    """
    config = copy.deepcopy(model.config)
    double = any(value.dtype == torch.float64 for value in model.parameters())
    try:
        with torch.random.fork_rng(devices=[]):
            made = type(model)._from_config(config, attn_implementation="eager")
        if has_adapters(model):
            made = add_adapters(made, model.peft_config)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise GradleakError(
            f"A copy of this {type(model).__name__} cannot be built from its config: {error}"
        ) from error
    made = made.to(torch.float64 if double else torch.float32)
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    lacking, strange = made.load_state_dict(state, strict=False)
    if lacking or strange:
        raise GradleakError(
            f"A copy of this {type(model).__name__} cannot be built from its config: the copy"
            f" {'lacks' if strange else 'has besides'} {(strange or lacking)[0]}."
        )
    return made


def hash_vocabulary(tokenizer: Any) -> str:
    """Returns the hash of a tokenizer's words with their ids."""
    try:
        words = tokenizer.get_vocab()
    except AttributeError as error:
        raise GradleakError(
            f"tokenizer= wants a tokenizer of transformers, not a {type(tokenizer).__name__}."
        ) from error
    digest = hashlib.sha256()
    for word, number in sorted(words.items()):
        digest.update(f"{number} {word}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


def hash_weights(model: Any) -> str:
    """Returns the hash of a model's state: names, shapes and values, in single precision.

    A copy in single precision of a model in half precision has the same.
    """
    return hash_state(unwrap(model).state_dict())
