"""Words that are tried wherever they might stand."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.energy.settings import SearchSettings
from gradleak.attacks.search.rows import Rows
from gradleak.core.target import Target

Likely = tuple[Int[Tensor, "rows likely"], Int[Tensor, "rows many"]]


def likely_words(rows: Rows, misfit: Float[Tensor, "rows words"], settings: SearchSettings) -> Likely:
    """The words that fit best, more for more places (rows with fewer places repeat their first), and many of them."""
    counts = settings.words + settings.words_a_place * (~rows.fixed).flatten(1).sum(1)
    best = misfit.topk(min(max(int(counts.max()), settings.many), misfit.shape[1]), largest=False).indices
    few = best[:, : int(counts.max())]
    kept = torch.arange(few.shape[1], device=best.device) < counts[:, None]
    return rows.words[torch.where(kept, few, few[:, :1])], rows.words[best[:, : settings.many]]


def punctuation(rows: Rows) -> Int[Tensor, "words"]:
    """Tokens of one punctuation mark: slopes often miss them, and nearly every sentence has some."""
    decode = rows.target.decode
    words = set(rows.words.tolist())
    marks = [word for mark in ".,?!'-:;()\"" for word in rows.target.encode([mark])[0] if word in words and decode([word])]
    return torch.tensor(sorted(set(marks)), device=rows.words.device, dtype=torch.int64)


def filler_of(target: Target) -> int:
    """The word that stands for none: [MASK] where the model has one, otherwise its padding or the first ordinary word."""
    for number in target.vocabulary.specials:
        if "mask" in target.decode([number], keep_special=True).lower():
            return number
    return int(target.vocabulary.allowed.nonzero()[0, 0])
