"""Trains a small causal language model over a target's vocabulary, to be used as a prior."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.records.files import write_whole, written_aside
from gradleak.training.corpus import Corpus, batches


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
    epoch, step = _resume(out, settings, model, optimiser)
    steps_an_epoch = len(batches(corpus.training, settings.tokens_a_batch, None))
    total = steps_an_epoch * settings.epochs
    began, done_before = time.monotonic(), step
    while epoch < settings.epochs:
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
                mean = float(running) / (place % 100 or 100)
                yield {
                    "epoch": epoch + 1,
                    "step": step,
                    "total": total,
                    "loss": mean,
                    "seconds_left": seconds,
                }
                running.zero_()
        epoch += 1
        _save(out, settings, model, optimiser, epoch, step)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    counts = sum(
        torch.bincount(table.flatten().long(), minlength=len(tokenizer))
        for table in corpus.training.values()
    )
    torch.save(counts, out / "token_counts.pt")
    yield {
        "epoch": epoch,
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
    """The negative log-likelihood of every token after the first, [sentences, tokens − 1]."""
    autocast = torch.autocast("cuda", torch.bfloat16) if ids.is_cuda else nullcontext()
    with autocast:
        logits = model(input_ids=ids[:, :-1]).logits
    return F.cross_entropy(
        logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
    ).view(ids.shape[0], -1)


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
