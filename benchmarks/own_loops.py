"""What is rebuilt from training loops of one's own: python benchmarks/own_loops.py [--seconds 15].

Made-up messages are trained on in one loop after another, each update is captured as a user would,
and attacked by an attacker who knows the size of the batch, its lengths and labels. A line says how
many words came back, how many sentences word for word, and how many were proven. The limit of
--seconds is of the clock, so that a shared machine gives fewer seconds of its processor.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import gradleak
from gradleak.audit.own_guesses import Reconstructions
from gradleak.core.batch import Example
from gradleak.datasets import Canaries
from gradleak.targets.minilm import MiniLM
from gradleak.targets.tiny import Tiny

FACTS = ("batch_size", "lengths", "labels")
AS_AUDITED = ("batch size 1", "batch size 4")  # loops that an audit plays too
TARGETS = {"minilm": MiniLM, "tiny": Tiny}


@dataclass(frozen=True)
class Loop:
    """A way to train, as people do."""

    batch_size: int = 1  # examples in an update
    accumulated: bool = False  # one by one, their losses added up
    clip: float | None = None
    bf16: bool = False
    dropout: bool = False
    wrap: Callable[[Any], Any] = lambda model: model
    defense: tuple[str, ...] = ()  # what the attacker is told of it


LOOPS = {
    "batch size 1": Loop(),
    "batch size 4": Loop(4),
    "accumulation 4 x 1": Loop(4, accumulated=True),
    "clipping at norm 1": Loop(clip=1.0, defense=("clipping:clip=1.0",)),
    "clipping, not told": Loop(clip=1.0),
    "bf16 autocast": Loop(bf16=True),
    "bf16 autocast, told": Loop(bf16=True, defense=("rounding:dtype=bf16",)),
    "dropout on": Loop(dropout=True),
    "DistributedDataParallel": Loop(wrap=DistributedDataParallel),
    "torch.compile": Loop(wrap=lambda model: torch.compile(model, backend="eager")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=list(TARGETS), default="minilm")
    parser.add_argument("--limit", type=int, default=4, help="messages; 4 in a batch of 4")
    parser.add_argument("--seconds", type=float, default=15, help="for each attack on a loop")
    parser.add_argument("--only", nargs="+", default=list(LOOPS), help="loops by name")
    parser.add_argument(
        "--attacks", nargs="+", default=["span", "energy:restarts=0", "portfolio:steps=0"]
    )
    chosen = parser.parse_args()
    opened = TARGETS[chosen.target]().open(torch.device("cpu"))
    messages = Canaries().load(chosen.limit)
    columns = f"{'words':>6}{'exact':>8}{'proven':>8}{'seconds':>9}{'of processor':>14}"
    print(f"{'loop':<24}{'attack':<20}{columns}")
    with tempfile.TemporaryDirectory() as folder, one_process(Path(folder) / "store"):
        for name in chosen.only:
            updates = train(LOOPS[name], opened, messages, Path(folder))
            for line in chosen.attacks:
                began, worked = time.monotonic(), time.process_time()
                found = gradleak.reconstruct(
                    updates,
                    model=opened.module,
                    tokenizer=opened.tokenizer,
                    attacks=line,
                    time_limit=chosen.seconds,
                )
                seconds = (time.monotonic() - began, time.process_time() - worked)
                print_line(name, line, found, messages, seconds)
            if name in AS_AUDITED:
                same = "yes" if guesses_as_audited(chosen, opened, updates) else "no"
                print(f"{'':<24}the same guesses by measure, without a limit: {same}", flush=True)


def train(loop: Loop, opened: Any, messages: Sequence[Example], folder: Path) -> list[Path]:
    """Runs a loop over the messages; returns the files of its updates."""
    inner = copy.deepcopy(opened.module).requires_grad_(True).train(loop.dropout)
    model, paths = loop.wrap(inner), []
    for start in range(0, len(messages), loop.batch_size):
        batch = messages[start : start + loop.batch_size]
        path = folder / f"update-{start}.safetensors"
        with gradleak.capture(model, path, know=FACTS, defense=loop.defense):
            for part in [[one] for one in batch] if loop.accumulated else [batch]:
                read = opened.tokenizer(
                    [one.text for one in part], padding=True, return_tensors="pt"
                )
                labels = torch.tensor([opened.class_of(one.label) for one in part])
                with torch.autocast("cpu", torch.bfloat16) if loop.bf16 else nullcontext():
                    loss = model(**read, labels=labels).loss
                loss.backward()
            if loop.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        inner.zero_grad()
        paths.append(path)
    return paths


def print_line(
    name: str,
    line: str,
    found: Reconstructions,
    messages: Sequence[Example],
    seconds: tuple[float, float],
) -> None:
    """Prints how much of the messages one attack rebuilt."""
    size = len(messages) // len(found.observations)
    truth = [[one.text for one in messages[at : at + size]] for at in range(0, len(messages), size)]
    ((_, outcome),) = gradleak.score(found, truth).attacks.items()
    proven = sum(guess.certified for guess in found)
    print(
        f"{name:<24}{line:<20}{outcome.scores['bag_f1'].mean:>6.2f}"
        f"{outcome.scores['exact_match'].mean * len(messages):>4.0f} / {len(messages)}"
        f"{proven:>4} / {len(messages)}{seconds[0]:>9.1f}{seconds[1]:>14.1f}",
        flush=True,
    )


def guesses_as_audited(chosen: argparse.Namespace, opened: Any, updates: Sequence[Path]) -> bool:
    """Whether an audit of the same messages, which plays the client, guesses the same."""
    given = {"model": opened.module, "tokenizer": opened.tokenizer}
    found = gradleak.reconstruct(updates, attacks="span", **given)
    size = chosen.limit // len(updates)
    audited = gradleak.measure(
        chosen.target, attacks=["span"], limit=len(updates), batch_size=size
    ).record
    # A batch has no order: an audit puts each guess beside its secret
    guesses = [(one.batch, one.guess) for one in audited.attacks["span"].examples if one.guess]
    return sorted(guesses) == sorted((guess.update, guess.text) for guess in found)


@contextmanager
def one_process(store: Path) -> Iterator[None]:
    """Lets DistributedDataParallel run, in a group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
