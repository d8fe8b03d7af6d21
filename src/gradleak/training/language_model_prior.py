"""Trains a small causal language model over a target's vocabulary, to be used as a prior.

Text files are read as sentences of token ids, grouped by length so that no batch carries padding.
"""

import bz2
import gzip
import json
import lzma
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.priors.language_model import token_nll
from gradleak.records.files import write_whole, written_aside

LINES_AT_ONCE = 50_000
HELD_OUT_EVERY = 200  # every so many sentences one is kept for validation
Tables = dict[int, Tensor]  # by length: [sentences, tokens]
Lists = dict[int, list[np.ndarray[Any, Any]]]
OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


@dataclass(frozen=True)
class PriorTraining:
    """Shape and schedule of a prior."""

    width: int = 320
    layers: int = 6
    heads: int = 5
    feed_forward: int = 864
    longest: int = 64  # tokens of a sentence
    epochs: int = 6
    tokens_a_batch: int = 32_768
    learning_rate: float = 2e-3
    warm_up: int = 300  # steps
    weight_decay: float = 0.1
    seed: int = 0


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
    for number, line_ids in enumerate(_encode_lines(paths, tokenizer)):
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


def _encode_lines(paths: Sequence[Path], tokenizer: Any) -> Iterator[list[int]]:
    for path in paths:
        if not path.is_file():
            raise GradleakError(f"There is no corpus file {path}.")
        opener = OPENERS.get(path.suffix, open)
        with opener(path, "rt", encoding="utf-8") as file:
            while lines := _some_lines(file):
                yield from tokenizer(lines, add_special_tokens=True, verbose=False)["input_ids"]


def _some_lines(file: IO[str]) -> list[str]:
    lines = [line.strip() for line, _ in zip(file, range(LINES_AT_ONCE), strict=False)]
    # No line at all would say that the file is at its end: an empty one stands for empty ones
    return [line for line in lines if line] or ([""] if lines else [])


def train_prior(
    settings: PriorTraining, corpus: Corpus, tokenizer: Any, out: Path, device: torch.device
) -> Iterator[dict[str, float]]:
    """Trains, yielding news (epoch, step, loss, seconds left); a checkpoint an epoch in `out`
    lets a second call go on."""
    model = new_model(settings, len(tokenizer), tokenizer).to(device)
    decayed = [value for value in model.parameters() if value.ndim > 1]
    plain = [value for value in model.parameters() if value.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda"
    )
    epochs_done, step = _resume(out, settings, model, optimiser)
    total = len(batches(corpus.training, settings.tokens_a_batch, None)) * settings.epochs
    began, done_before = time.monotonic(), step
    for epoch in range(epochs_done, settings.epochs):
        order = batches(
            corpus.training,
            settings.tokens_a_batch,
            Streams.root("prior", settings.seed).child(epoch).generator(),
        )
        running = torch.zeros((), device=device)
        for place, batch in enumerate(order, start=1):
            for group in optimiser.param_groups:
                group["lr"] = settings.learning_rate * _schedule(step, settings.warm_up, total)
            loss = token_losses(model, batch.to(device, torch.int64, non_blocking=True)).mean()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            running += loss.detach()
            step += 1
            if place % 100 == 0 or place == len(order):
                seconds = (time.monotonic() - began) / (step - done_before) * (total - step)
                yield {
                    "epoch": epoch + 1,
                    "step": step,
                    "total": total,
                    "loss": float(running) / (place % 100 or 100),
                    "seconds_left": seconds,
                }
                running.zero_()
        _save(out, settings, model, optimiser, epoch + 1, step)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    counts = sum(
        torch.bincount(table.flatten().long(), minlength=len(tokenizer))
        for table in corpus.training.values()
    )
    torch.save(counts, out / "token_counts.pt")
    yield {
        "epoch": settings.epochs,
        "step": step,
        "total": total,
        "validation": validation_nats(model, corpus),
        "seconds_left": 0.0,
    }


def new_model(settings: PriorTraining, vocabulary: int, tokenizer: Any) -> Any:
    """A Llama-shaped model with tied embeddings, drawn from the settings' seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=settings.feed_forward,
        max_position_embeddings=max(128, settings.longest),
        tie_word_embeddings=True,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return LlamaForCausalLM(config)


def token_losses(model: Any, ids: Tensor) -> Tensor:
    """The negative log-likelihood of every token after the first, [sentences, tokens − 1]; in
    half precision on a GPU."""
    with torch.autocast("cuda", torch.bfloat16) if ids.is_cuda else nullcontext():
        return token_nll(model, ids)


@torch.no_grad()
def validation_nats(model: Any, corpus: Corpus) -> float:
    """Mean nats a token on the held-out sentences."""
    model.eval()
    device = next(model.parameters()).device
    sums = [
        (token_losses(model, batch.to(device, torch.int64)).double().sum(), batch[:, 1:].numel())
        for batch in batches(corpus.held_out, 16_384, None)
    ]
    model.train()
    return float(sum(total for total, _ in sums)) / sum(count for _, count in sums)


def _schedule(step: int, warm_up: int, total: int) -> float:
    """Linear up, cosine down to a fiftieth."""
    if step < warm_up:
        return (step + 1) / warm_up
    share = (step - warm_up) / max(1, total - warm_up)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share))


def _save(
    out: Path,
    settings: PriorTraining,
    model: Any,
    optimiser: torch.optim.Optimizer,
    epoch: int,
    step: int,
) -> None:
    write_whole(out / "training.json", json.dumps(asdict(settings), indent=1) + "\n")
    state = {
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "epoch": epoch,
        "step": step,
    }
    with written_aside(out / "checkpoint.pt") as aside:
        torch.save(state, aside)


def _resume(
    out: Path, settings: PriorTraining, model: Any, optimiser: torch.optim.Optimizer
) -> tuple[int, int]:
    if not (out / "checkpoint.pt").is_file():
        return 0, 0
    if json.loads((out / "training.json").read_text()) != asdict(settings):
        raise GradleakError(
            f"{out} holds a checkpoint of other settings: choose another --out, or remove it."
        )
    state = torch.load(out / "checkpoint.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["epoch"]), int(state["step"])
