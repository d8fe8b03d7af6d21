"""The most frequent words: the least an attacker knows of a language."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.errors import GradleakError
from gradleak.core.prior import Prior, PriorSpec, pick
from gradleak.core.registry import Count, register
from gradleak.core.streams import Streams
from gradleak.core.target import Target

# Common English words, most frequent first.
ENGLISH = (
    "the of and to a in is that it was for on with he as i his at be by had not are but from or"
    " have an they which one you were all her she there would their we him been has when who will"
    " no more if out so up said what its about than into them can only other time new some could"
    " these two may first then do any like my now over such our man me even most made after also"
    " did many off before must well back through years much where your way down should because long"
    " each just state people those too mr how little good world make very year still see own work"
    " men day get here old life both between being under three never know same last another while"
    " us might great go come since against right came take used himself few house use place during"
    " high without again home around small however found part school thought went say general once"
    " upon war every left got united number hand course water until away always public put head"
    " night fact though end called set better tell why look asked feel going yet nothing done young"
).split()


@register("prior", "frequent_words")
@dataclass(frozen=True)
class FrequentWords(PriorSpec):
    """Says the most frequent words in order of frequency, of English or of a text file of your
    own."""

    corpus: str | None = None  # a plain text file to count words in, instead of the built-in list
    length: Count = 10  # words of a typical sentence, when the length is not known

    def open(self, target: Target) -> Prior:
        words = ENGLISH if self.corpus is None else _count_words(Path(self.corpus))
        # together: GPT-2 has one token for a word after a space, another without
        (ids,) = target.encode([" ".join(words)])
        allowed = target.vocabulary.allowed
        return _Frequent(
            target, [number for number in dict.fromkeys(ids) if bool(allowed[number])], self.length
        )


class _Frequent(Prior):
    def __init__(self, target: Target, ids: list[int], length: int) -> None:
        if not ids:
            raise GradleakError(
                "No frequent word is in the target's vocabulary: give frequent_words:corpus=FILE in"
                " its language."
            )
        self.vocabulary = target.vocabulary
        self.ids = ids
        self.length = length
        ranks = torch.full((len(target.vocabulary.allowed),), float(len(ids)))
        ranks[torch.tensor(ids)] = torch.arange(len(ids), dtype=torch.float32)
        weights = 1 / (ranks + 2.7)
        self.costs = -(weights / weights.sum()).log()

    def nll(
        self, ids: Int[Tensor, "sentences tokens"], lengths: Int[Tensor, "sentences"]
    ) -> Float[Tensor, "sentences"]:
        """Zipf's law over the list; every other word shares the last rank's place. Order does
        not matter."""
        costs = self.costs.to(ids.device)[ids]
        counted = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        return (costs * counted).sum(1) / lengths

    def likely(self, length: int, streams: Streams) -> list[int]:
        return self.vocabulary.fill(length, self.ids)

    def draw(self, lengths: Sequence[int], streams: Sequence[Streams]) -> list[list[int]]:
        """Words of the list, the frequent ones more often; the others only share what is left."""
        return [self._draw_one(*one) for one in zip(lengths, streams, strict=True)]

    def _draw_one(self, length: int, streams: Streams) -> list[int]:
        frame, fixed = self.vocabulary.frame(length)
        shares = torch.rand(length, generator=streams.generator())
        weights = (-self.costs[self.ids]).exp().expand(length, -1)
        for place, rank in enumerate(pick(weights, shares).tolist()):
            frame[place] = frame[place] if fixed[place] else self.ids[rank]
        return frame

    def likely_length(self) -> int:
        return self.length + self.vocabulary.frame_length


def _count_words(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GradleakError(f"The corpus {path} cannot be read as UTF-8 text: {error}") from error
    return [word for word, _ in Counter(re.findall(r"\w+", text.lower())).most_common(1000)]
