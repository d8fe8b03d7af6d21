"""The prior we trained and ship: a small English language model over BERT's uncased vocabulary."""

import hashlib
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradleak.core.errors import GradleakError
from gradleak.core.prior import Prior, PriorSpec
from gradleak.core.registry import register
from gradleak.core.target import Target
from gradleak.priors.frequent_words import FrequentWords
from gradleak.priors.language_model import SameVocabulary
from gradleak.priors.packed import load_packed

WEIGHTS = "english.safetensors"
EMBEDDINGS = "model.embed_tokens.weight"
RARE_WORD = "rare_word"
PROBE = "The quick brown fox, 1234 unbelievable words & more!"


@register("prior", "english")
@dataclass(frozen=True)
class English(PriorSpec):
    """Our small English language model; for targets with BERT's uncased vocabulary (card:
    docs/prior.md)."""

    def open(self, target: Target) -> Prior:
        weights, facts = _read()
        if not fits(target, facts["vocabulary"]):
            raise GradleakError(
                "The english prior speaks BERT's uncased vocabulary, which this target does not"
                " have: use --prior frequent_words, or causal_lm:path=… with any causal language"
                " model."
            )
        return SameVocabulary(_model(weights, facts), target)


def english_model() -> Any:
    """The shipped language model itself, over BERT's uncased vocabulary."""
    return _model(*_read())


def _read() -> tuple[dict[str, Tensor], dict[str, Any]]:
    with as_file(files("gradleak.priors") / WEIGHTS) as path:
        if not path.is_file():
            raise GradleakError(
                "The weights of the english prior are not installed: use --prior frequent_words or"
                " causal_lm:path=…."
            )
        return load_packed(path)


def _model(weights: dict[str, Tensor], facts: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = _with_rare_words(weights, facts["common"], facts["config"]["vocab_size"])
    with torch.random.fork_rng(devices=[]):  # what the library draws is overwritten
        model = LlamaForCausalLM(LlamaConfig(**facts["config"]))
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown, unknown
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embeddings
    return model


def _with_rare_words(weights: dict[str, Tensor], common: str, words: int) -> dict[str, Tensor]:
    """The whole table of embeddings: words too rare in training share one row."""
    rest, rare = (
        {name: tensor for name, tensor in weights.items() if name != RARE_WORD},
        weights[RARE_WORD],
    )
    marks = np.unpackbits(np.frombuffer(bytes.fromhex(common), dtype=np.uint8)).astype(bool)[:words]
    table = rare.repeat(len(marks), 1)
    table[torch.from_numpy(marks)] = weights[EMBEDDINGS]
    return {**rest, EMBEDDINGS: table}


@register("prior", "auto")
@dataclass(frozen=True)
class Auto(PriorSpec):
    """`english` where the target has BERT's uncased vocabulary, `frequent_words` elsewhere."""

    def open(self, target: Target) -> Prior:
        try:
            return English().open(target)
        except GradleakError:
            return FrequentWords().open(target)


def fits(target: Target, vocabulary: str) -> bool:
    """Whether the target tokenises as the prior was trained."""
    return fingerprint(target.encode([PROBE])[0], len(target.vocabulary.allowed)) == vocabulary


def fingerprint(probe_ids: list[int], size: int) -> str:
    """Tells vocabularies apart by their size and a probe text's ids."""
    return hashlib.sha256(f"{size}:{probe_ids}".encode()).hexdigest()[:16]
