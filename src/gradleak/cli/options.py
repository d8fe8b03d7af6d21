"""How flags are declared, and those that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer


def option(text: str, *names: str, minimum: int | None = None) -> Any:
    """A flag whose help says its default itself, in brackets: in words, where these say more
    than the value."""
    return typer.Option(*names, help=text, show_default=False, min=minimum)


Out = Annotated[Path, option("Folder for records. [runs]")]
Memory = Annotated[
    str | None,
    option(
        "Most that the process may hold on its device: 6GB, 512MB. [what it holds and most of what"
        " is free]"
    ),
]
Device = Annotated[str, option("cpu, cuda, cuda:N, or auto: a GPU where there is one. [auto]")]
