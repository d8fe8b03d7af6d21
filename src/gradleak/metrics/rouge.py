"""ROUGE F-measures (Lin 2004), honest and as the LAMP code scores.

LAMP leaves [CLS] and [SEP] in the strings, so that a wholly wrong guess of 8 words scores ROUGE-1 =
0.2. The honest metrics remove them; the legacy ones exist for comparison with published tables.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from gradleak.core.metric import Metric, Pair
from gradleak.core.registry import register

LAMP = "LAMP (Balunović et al. 2022), released code"


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


@register("metric", "rouge1_legacy")
@dataclass(frozen=True)
class Rouge1Legacy(Rouge):
    """Overlap of words, [CLS] and [SEP] counted as words."""

    cites = LAMP
    legacy = True
    measure = "rouge1"


@register("metric", "rouge2_legacy")
@dataclass(frozen=True)
class Rouge2Legacy(Rouge):
    """Overlap of pairs of words, [CLS] and [SEP] counted as words."""

    cites = LAMP
    legacy = True
    measure = "rouge2"


@register("metric", "rougeL_legacy")
@dataclass(frozen=True)
class RougeLLegacy(Rouge):
    """The longest common subsequence, [CLS] and [SEP] counted as words."""

    cites = LAMP
    legacy = True
    measure = "rougeL"
