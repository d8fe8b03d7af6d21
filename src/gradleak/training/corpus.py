"""Text files as sentences of token ids, grouped by length so that no batch carries padding."""

import bz2
import gzip
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from gradleak.core.errors import GradleakError

LINES_AT_ONCE = 50_000
HELD_OUT_EVERY = 200  # every so many sentences one is kept for validation
Tables = dict[int, Tensor]  # by length: [sentences, tokens]
Lists = dict[int, list[np.ndarray[Any, Any]]]
OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


@dataclass(frozen=True, eq=False)
class Corpus:
    """Sentences of one length are one table; training and held-out sentences never mix."""

    training: Tables
    held_out: Tables

    @property
    def tokens(self) -> int:
        return sum(table.numel() for table in self.training.values())


def read_corpus(paths: Sequence[Path], tokenizer: Any, longest: int) -> Corpus:
    """Reads one sentence a line, brackets each with the tokenizer's special tokens and cuts
    those over `longest` tokens."""
    parts: tuple[Lists, Lists] = ({}, {})
    for number, line_ids in enumerate(_encoded(paths, tokenizer)):
        ids = line_ids if len(line_ids) <= longest else line_ids[: longest - 1] + line_ids[-1:]
        held_out = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        if len(ids) > 2:
            parts[held_out].setdefault(len(ids), []).append(np.asarray(ids, dtype=np.int32))
    if not parts[0] or not parts[1]:
        raise GradleakError(
            f"There are too few sentences in {', '.join(map(str, paths))}: "
            f"one sentence a line is read and every {HELD_OUT_EVERY}th is held out for validation."
        )
    training, held = (
        {length: torch.from_numpy(np.stack(rows)) for length, rows in sorted(part.items())}
        for part in parts
    )
    return Corpus(training, held)


def batches(tables: Tables, tokens: int, generator: torch.Generator | None) -> list[Tensor]:
    """Batches of about `tokens` tokens, each of one length; shuffled if a generator is given."""
    made = []
    for length, table in tables.items():
        order = (
            torch.arange(len(table))
            if generator is None
            else torch.randperm(len(table), generator=generator)
        )
        made += list(torch.split(table[order], max(1, tokens // length)))
    if generator is None:
        return made
    return [made[place] for place in torch.randperm(len(made), generator=generator).tolist()]


def _encoded(paths: Sequence[Path], tokenizer: Any) -> Iterator[list[int]]:
    for path in paths:
        if not path.is_file():
            raise GradleakError(f"There is no corpus file {path}.")
        opener = OPENERS.get(path.suffix, open)
        with opener(path, "rt", encoding="utf-8") as file:
            while lines := _some_lines(file):
                yield from tokenizer(lines, add_special_tokens=True, verbose=False)["input_ids"]


def _some_lines(file: IO[str]) -> list[str]:
    lines = [line.strip() for line, _ in zip(file, range(LINES_AT_ONCE), strict=False)]
    return [line for line in lines if line] or ([""] if lines else [])
