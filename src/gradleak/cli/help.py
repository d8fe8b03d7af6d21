"""Help as a person should read it, where typer's own goes wrong; and what is said when a command
is interrupted: that finished parts are kept, where there are any."""

import time
from pathlib import Path
from typing import Any, get_type_hints

import click
from typer.core import TyperArgument, TyperCommand
from typer.models import ArgumentInfo

from gradleak.core.errors import GradleakError

# By the end of a path: records and trainings (named by hashes), parts of a call, fits and
# checkpoints of what learns.
KEPT = ("[0-9a-f]" * 16 + ".json", "parts/*/[0-9]*-*-*.*", "fits/*", "checkpoint.pt")
KEPT_SENTENCE = (
    "Interrupted. Finished parts are kept; run the same command again to go on from them."
)
LOST_SENTENCE = (
    "Interrupted before a part was finished: the same command begins where this one began."
)


class PlainHelp(TyperCommand):
    """A command whose help has `[required]` and `[x>=1]` without a backslash, and says what each
    argument is.

    Where rich is installed typer 0.20 escapes brackets for it, even in plain help.
    """

    def invoke(self, ctx: click.Context) -> Any:
        began = time.time()
        try:
            return TyperCommand.invoke(self, ctx)
        except KeyboardInterrupt as stop:
            raise describe_interruption(ctx.params.get("out"), began) from stop

    def get_help(self, ctx: click.Context) -> str:
        return TyperCommand.get_help(self, ctx).replace("\\[", "[")

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes nothing, since typer lists arguments with the options; gives them back the texts
        it is to list.

        click 8.5, which calls this first, has overwritten what typer 0.20 had set; an earlier one
        does neither.
        """
        declared = get_type_hints(self.callback, include_extras=True)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.name is not None:
                notes = getattr(declared[parameter.name], "__metadata__", ())
                parameter.help = next(
                    (note.help for note in notes if isinstance(note, ArgumentInfo)), None
                )


class Interrupted(GradleakError):
    """An interruption by hand, and what is left of the work."""

    exit_code = 130


def describe_interruption(out: str | Path | None, began: float) -> Interrupted:
    """Makes the error of a command that writes into `out`, if anywhere, and began at that time
    (time.time)."""
    if out is None:
        return Interrupted("Interrupted.")
    return Interrupted(KEPT_SENTENCE if has_kept(Path(out), began) else LOST_SENTENCE)


def has_kept(folder: Path, since: float) -> bool:
    """Whether anything that the same command would go on from was written there since then."""
    paths = (path for path in folder.rglob("*") if any(path.match(pattern) for pattern in KEPT))
    return any(
        path.is_file() and path.suffix != ".tmp" and path.stat().st_mtime >= since for path in paths
    )
