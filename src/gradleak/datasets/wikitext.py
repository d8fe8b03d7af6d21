"""WikiText-2 in blocks of so many tokens, read from the folder that the environment variable
GRADLEAK_DATA names."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from gradleak.core.batch import Example
from gradleak.core.byte_pairs import byte_pairs
from gradleak.core.dataset import Dataset, Rows
from gradleak.core.local_data import local_file
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.datasets.lamp_selection import take
from gradleak.datasets.rows import decoded, text_lines

Split = Literal["train", "valid", "test"]


@register("dataset", "wikitext2")
@dataclass(frozen=True)
class Wikitext2(Dataset):
    """Blocks of Wikipedia articles, cut every so many of GPT-2's tokens; rare words stand as <unk>.
    In shuffled order, no labels.

    wikitext2/{train,valid,test}.txt.xz and gpt2_bpe/ in the data folder. Attackers get the train
    split.
    """

    cites: ClassVar[str] = "Merity et al. 2017, Pointer Sentinel Mixture Models"
    is_public: ClassVar[bool] = True

    split: Split = "test"
    tokens: int = 16  # of a block (Learning to Invert, section 4.2)
    rows: Rows = ()

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"a block needs at least 2 tokens, not {self.tokens}.")

    def load(self, count: int | None = None) -> list[Example]:
        blocks = _blocks(local_file(f"wikitext2/{self.split}.txt.xz"), self.tokens)
        return take(blocks, count, f"wikitext2, {self.split} split", self.rows)

    def public(self) -> Dataset | None:
        return (
            Wikitext2("train", self.tokens)
            if self.split != "train"
            else Wikitext2("valid", self.tokens)
        )


@functools.lru_cache(maxsize=4)
def _blocks(path: Path, tokens: int) -> tuple[Example, ...]:
    """The blocks in a fixed random order, without those that would be tokenised otherwise when
    they stand alone."""
    tokenizer = byte_pairs()
    lines = [f"{line}\n" for line in text_lines(decoded(path)) if line.strip()]
    ids = [number for encoded in tokenizer.encode_batch(lines) for number in encoded.ids]
    blocks = [ids[start : start + tokens] for start in range(0, len(ids) - tokens + 1, tokens)]
    texts = tokenizer.decode_batch(blocks)
    again = tokenizer.encode_batch(texts)
    # 99.8 %
    kept = [
        number
        for number, (block, encoded) in enumerate(zip(blocks, again, strict=True))
        if encoded.ids == block
    ]
    order = torch.randperm(len(kept), generator=Streams.root("wikitext2", 0).generator())
    return tuple(Example(texts[kept[place]], row=kept[place]) for place in order.tolist())
