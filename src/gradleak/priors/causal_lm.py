"""Any causal language model of Hugging Face, by hub id or folder, GGUF files included."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradleak.core.errors import GradleakError
from gradleak.core.hub_access import find_model
from gradleak.core.prior import Prior, PriorSpec
from gradleak.core.registry import register
from gradleak.core.target import Target
from gradleak.priors.language_model import OwnVocabulary, SameVocabulary


@register("prior", "causal_lm")
@dataclass(frozen=True)
class CausalLM(PriorSpec):
    """A causal language model by hub id, folder or .gguf file; text is re-tokenised where the
    target's vocabulary differs."""

    path: str
    allow_pickle: bool = False  # load .bin weights, which can run code

    def open(self, target: Target) -> Prior:
        if not Path(self.path).exists():
            find_model(self.path)
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        file = Path(self.path)
        options: dict[str, Any] = {"trust_remote_code": False}
        source = self.path
        if file.suffix == ".gguf":
            source, options = str(file.parent), options | {"gguf_file": file.name}
        elif not self.allow_pickle:
            options["use_safetensors"] = True
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                source, **{k: v for k, v in options.items() if k != "use_safetensors"}
            )
            model = transformers.AutoModelForCausalLM.from_pretrained(source, **options).float()
        except (OSError, ValueError, ImportError) as error:
            first = str(error).strip().splitlines()[0]
            raise GradleakError(
                f"The prior {self.path} could not be loaded as a causal language model: {first}"
            ) from error
        if shares_vocabulary(tokenizer, target):
            return SameVocabulary(model, target)
        return OwnVocabulary(model, tokenizer, target)


def shares_vocabulary(tokenizer: Any, target: Target) -> bool:
    """Whether a tokenizer gives the target's own ids: same size, and the same ids and frame for
    a probe text."""
    probe = "The quick brown fox, 1234 unbelievable words & more!"
    same_ids = list(tokenizer(probe)["input_ids"]) == target.encode([probe])[0]
    return same_ids and len(tokenizer) == len(target.vocabulary.allowed)
