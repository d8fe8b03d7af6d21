"""The papers' data sets, read from the folder that the environment variable GRADLEAK_DATA names.

cola/{train,dev}.tsv and sst2/{train,dev}.tsv as GLUE lays them out (each packed by gzip or not),
rotten_tomatoes/rt-polarity.{pos,neg} as Pang & Lee do, wikitext2/{train,valid,test}.txt.xz. With a
network, the `hub` data set gives the same examples of the first three.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset, Rows, as_dataset
from gradleak.core.not_ours import byte_pairs, local_file
from gradleak.core.registry import register
from gradleak.core.specs import to_dict
from gradleak.core.streams import Streams
from gradleak.datasets.rows import Row, TextColumns, decode_text, read_rows, text_lines
from gradleak.datasets.selection import Selection, select, take

OTHERWISE = ", or use the dataset hub"  # where the data folder is not known


class Sentences(Dataset):
    """Abstract: labelled sentences of one split, of which a selection is attacked."""

    is_public: ClassVar[bool] = True

    def public(self) -> Dataset | None:
        """All of the split; an audit takes its own secrets out."""
        return as_dataset({**to_dict(self), "selection": "all", "rows": []})


@register("dataset", "cola")
@dataclass(frozen=True)
class Cola(Sentences):
    """Sentences from linguistics books; label 1: grammatical."""

    cites: ClassVar[str] = "Warstadt, Singh & Bowman 2019, Neural Network Acceptability Judgments"
    split: Literal["train", "dev"] = "train"
    selection: Selection = "lamp_test"
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        path = local_file(f"cola/{self.split}.tsv", OTHERWISE)
        # source, label, the author's mark, sentence: the only GLUE files without a header
        examples = TextColumns(str(path), text="4", label="2").examples(
            read_rows(path, "tsv", header=False)
        )
        return select(examples, self.selection, count, f"cola, {self.split} split", self.rows)


@register("dataset", "sst2")
@dataclass(frozen=True)
class Sst2(Sentences):
    """Phrases of film reviews; label 1: positive. Texts keep the trailing space they have on the
    hub."""

    cites: ClassVar[str] = (
        "Socher et al. 2013, Recursive Deep Models for Semantic Compositionality Over a Sentiment"
        " Treebank"
    )
    split: Literal["train", "dev"] = "train"
    selection: Selection = "lamp_test"
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        path = local_file(f"sst2/{self.split}.tsv", OTHERWISE)
        examples = TextColumns(str(path), text="sentence", label="label").examples(
            read_rows(path, "tsv")
        )
        return select(examples, self.selection, count, f"sst2, {self.split} split", self.rows)


@register("dataset", "rotten_tomatoes")
@dataclass(frozen=True)
class RottenTomatoes(Sentences):
    """Sentences of film reviews; label 1: positive. The train split of the Hugging Face hub, in
    its order."""

    cites: ClassVar[str] = "Pang & Lee 2005, Seeing Stars"
    selection: Selection = "lamp_test"
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        examples = [
            *_reviews("rotten_tomatoes/rt-polarity.pos", 1),
            *_reviews("rotten_tomatoes/rt-polarity.neg", 0),
        ]
        numbered = [replace(example, row=number) for number, example in enumerate(examples)]
        return select(numbered, self.selection, count, "rotten_tomatoes, train split", self.rows)


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

    split: Literal["train", "valid", "test"] = "test"
    tokens: int = 16  # of a block (Learning to Invert, section 4.2)
    rows: Rows = ()

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"a block needs at least 2 tokens, not {self.tokens}.")

    def load(self, count: int | None = None) -> list[Example]:
        blocks = _blocks(local_file(f"wikitext2/{self.split}.txt.xz"), self.tokens)
        return take(blocks, count, f"wikitext2, {self.split} split", self.rows)

    def public(self) -> Dataset | None:
        return Wikitext2("valid" if self.split == "train" else "train", self.tokens)


def _reviews(name: str, label: int) -> list[Example]:
    """The training part of one class."""
    path = local_file(name, OTHERWISE)
    # Pang & Lee's own files are latin-1, which is how the hub reads them; copies converted to UTF-8
    # are about
    lines = [line.strip() for line in text_lines(decode_text(path, fallback="latin-1"))]
    # The hub's train split is the first 80 % of the positive sentences (4265 of 5331), then as many
    # negative ones; the next 10 % of each are its validation split, the last its test split.
    kept = lines[: int(len(lines) * 0.8 + 0.5)]
    rows = [Row(f"line {number}", {"text": line}) for number, line in enumerate(kept, start=1)]
    return [
        Example(example.text, label)
        for example in TextColumns(str(path), text="text", label=None).examples(rows)
    ]


@functools.lru_cache(maxsize=4)
def _blocks(path: Path, tokens: int) -> tuple[Example, ...]:
    """The blocks in a fixed random order, without those that would be tokenised otherwise when
    they stand alone."""
    tokenizer = byte_pairs()
    lines = [f"{line}\n" for line in text_lines(decode_text(path)) if line.strip()]
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
