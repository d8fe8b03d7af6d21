"""How flags are declared, those that several commands share, and what their words stand for."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from gradleak.core.errors import GradleakError

DEVICE = re.compile(r"cpu|auto|cuda(:\d+)?")


def option(text: str, *names: str, minimum: int | None = None) -> Any:
    """A flag whose help says its default itself, in brackets: in words, where these say more
    than the value."""
    return typer.Option(*names, help=text, show_default=False, min=minimum)


RecordPath = Annotated[Path, typer.Argument(help="A record, or a folder of records.")]
TargetName = Annotated[str, option("Model under audit: a name, a hub id or a folder. [minilm]")]
PrivateData = Annotated[str, option("Private examples: a name or a file. [canaries]")]
BatchSize = Annotated[int, option("Examples in a client batch. [1]")]
Know = Annotated[
    list[str] | None,
    option(
        "What the attacker is told: labels, lengths, batch_size, defense, with commas or repeated;"
        " or none. [all]"
    ),
]
PriorName = Annotated[
    str, option("What the attacker believes of text beforehand. [auto: english where it fits]")
]
Seed = Annotated[int, option("Of the random streams of both sides. [0]")]
Change = Annotated[
    list[str] | None, option("Replace a field of the file: --set limit=10.", "--set")
]
AllowPickle = Annotated[bool, option("Load pickled weights, which can run code.", "--allow-pickle")]
Out = Annotated[Path, option("Folder for records. [runs]")]
Memory = Annotated[
    str | None,
    option(
        "Most that the process may hold on its device: 6GB, 512MB. [what it holds and most of what"
        " is free]"
    ),
]
Device = Annotated[str, option("cpu, cuda, cuda:N, or auto: a GPU where there is one. [auto]")]


def resolve_memory(words: str | None) -> int | None:
    """The bytes that `6GB` or the like stands for; none where nothing is said."""
    if words is None:
        return None
    from gradleak.core.memory import parse_memory

    return parse_memory(words)


def resolve_device(word: str) -> str:
    """`cpu`, `cuda` or `cuda:N`, checked; `auto` is a GPU where there is one."""
    if not DEVICE.fullmatch(word):
        raise GradleakError(f"Unknown device {word!r}. Use --device cpu, cuda, cuda:N or auto.")
    if word == "cpu":
        return word
    import torch

    if word == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.cuda.is_available():
        raise GradleakError(
            f"--device {word} needs a CUDA GPU and PyTorch finds none here; use --device cpu or"
            " auto."
        )
    number = int(word.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        raise GradleakError(
            f"--device {word} is not there: this machine has {torch.cuda.device_count()} GPUs,"
            " counted from 0."
        )
    return word
