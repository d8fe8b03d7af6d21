"""How every command declares its flags, reads its words, shows its help and ends when it is
interrupted.

What components there are is read off a file made beforehand, so that `list`, a typo and shell
completion need not wait for torch. `python -m gradleak.cli.write_index` writes the file; a test
holds it to the registry.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import click
import typer
from click.shell_completion import CompletionItem
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from gradleak.core.errors import GradleakError, RunFailed

if TYPE_CHECKING:
    from rich.console import Console

    from gradleak.report.terminal.live import TerminalDisplay

FILE = Path(__file__).with_name("components.json")
KINDS = {
    "attacks": "attack",
    "defenses": "defense",
    "targets": "target",
    "datasets": "dataset",
    "metrics": "metric",
    "protocols": "protocol",
    "views": "view",
    "priors": "prior",
}
# The kind of component that an option or argument names, in whichever command it stands
OPTIONS = {
    **{
        kind: kind
        for kind in ("attack", "defense", "target", "metric", "protocol", "view", "prior")
    },
    **dict.fromkeys(("data", "public", "train_data", "eval_data"), "dataset"),
}
# Kinds that may be written as a file, a folder or a hub id instead
PATHS = ("target", "dataset", "prior")
# By the end of a path: records and trainings (named by hashes), parts of a call, fits and
# checkpoints of what learns.
KEPT = ("[0-9a-f]" * 16 + ".json", "parts/*/[0-9]*-*-*.*", "fits/*", "checkpoint.pt")
KEPT_SENTENCE = (
    "Interrupted. Finished parts are kept; run the same command again to go on from them."
)
LOST_SENTENCE = (
    "Interrupted before a part was finished: the same command begins where this one began."
)


@dataclass(frozen=True)
class ComponentEntry:
    """A component as `list` shows it; a field has no default where it is required."""

    summary: str
    fields: dict[str, str | None]
    cites: str
    requires: str  # the facts an attack needs as it comes; of other kinds nothing


@cache
def read_index() -> dict[str, dict[str, ComponentEntry]]:
    """All components by kind and name."""
    return {
        kind: {name: ComponentEntry(**entry) for name, entry in entries.items()}
        for kind, entries in json.loads(FILE.read_text(encoding="utf-8")).items()
    }


def check_line(kind: str, line: str) -> None:
    """Refuses a name or a field that no component has. What is in doubt is left to whoever reads
    the line in full."""
    from gradleak.core.registry import unknown_component, unknown_field
    from gradleak.core.specs import split_fields

    known = read_index()[kind]
    name, _, rest = line.partition(":")
    name = name.strip()
    if name not in known:
        known = known | read_plugins(kind)
    if name not in known:
        if not name or _may_be_right(kind, name, line):
            return
        raise unknown_component(kind, name, known)
    for part in split_fields(rest):
        field, equals, _ = part.partition("=")
        if equals and field.strip() not in known[name].fields:
            raise unknown_field(kind, name, field.strip(), list(known[name].fields))


def _may_be_right(kind: str, name: str, line: str) -> bool:
    """Whether a line may be what the index does not know: a path, a chain, a component that the
    user's program registered."""
    from gradleak.core.registry import list_registered

    is_path = kind in PATHS and (
        any(sign in name for sign in "/\\.-~") or _is_here(line) or _is_here(name)
    )
    is_chain = kind == "defense" and (name == "none" or "+" in line)
    return is_path or is_chain or name in list_registered(kind)


def read_plugins(kind: str) -> dict[str, ComponentEntry]:
    """The components of one kind that files and packages of others have registered: they have
    to be loaded, which ours need not."""
    from gradleak.core.plugins import has_plugins

    if not has_plugins():
        return {}
    from gradleak.cli.write_index import describe
    from gradleak.core.registry import list_registered

    ours = read_index()[kind]
    return {
        name: ComponentEntry(**describe(cls))
        for name, cls in list_registered(kind).items()
        if name not in ours
    }


def _is_here(path: str) -> bool:
    return Path(path).expanduser().exists()


class ComponentLine(click.ParamType):  # type: ignore[type-arg]
    """A name with fields, checked before anything heavy is loaded; a shell can complete the
    name."""

    name = "text"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        check_line(self.kind, str(value))
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [
            CompletionItem(name) for name in read_index()[self.kind] if name.startswith(incomplete)
        ]


class Interrupted(GradleakError):
    """An interruption by hand, and what is left of the work."""

    exit_code = 130


def explain_interruption(out: str | Path | None, began: float) -> Interrupted:
    """The error of a command that writes into `out`, if anywhere, and began at that time
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


class PlainGroup(TyperGroup):
    """Commands listed with their whole first sentence, which click cuts at the line's end."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(limit=1000))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


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
            raise explain_interruption(ctx.params.get("out"), began) from stop

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


class Command(PlainHelp):
    """A command whose options know which of them name components, and which looks for a target
    of the hub before it begins."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        PlainHelp.__init__(self, *arguments, **settings)
        for parameter in self.params:
            if parameter.name in OPTIONS:
                parameter.type = ComponentLine(OPTIONS[parameter.name])

    def invoke(self, ctx: click.Context) -> Any:
        target = ctx.params.get("target")
        if isinstance(target, str):
            find_target(target)
        return PlainHelp.invoke(self, ctx)


def find_target(line: str) -> None:
    """Refuses a hub id that neither network nor cache holds, before a library is loaded for it."""
    from gradleak.core.not_ours import find_model, is_beside_folders

    path = line.partition(":")[0].strip()
    if (
        path not in read_index()["target"]
        and not is_beside_folders(path)
        and not _is_here(line)
        and not _is_here(path)
    ):
        find_model(path)


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


def open_terminal(to_stderr: bool = False) -> "Console":
    """Opens the terminal. Its library is loaded only here, so that --help answers at once."""
    from gradleak.report.terminal.console import open_console

    return open_console(to_stderr)


def open_display(quiet: bool = False, show_guesses: bool = True) -> "TerminalDisplay":
    """Opens a display of progress, on standard error."""
    from gradleak.report.terminal.live import TerminalDisplay

    return TerminalDisplay(open_terminal(to_stderr=True), quiet=quiet, show_guesses=show_guesses)


def refuse_failures(what: str, failures: Sequence[object]) -> None:
    """Names what failed, at the very end, and gives the command the exit code of a failure."""
    if failures:
        named = ", ".join(map(str, failures))
        raise RunFailed(f"{len(failures)} {what} failed; their tracebacks are in {named}.")


def print_json(plain: object) -> None:
    """Prints what programs read."""
    typer.echo(json.dumps(plain, indent=1, ensure_ascii=False))


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
    if int(word.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise GradleakError(
            f"--device {word} is not there: this machine has {torch.cuda.device_count()} GPUs,"
            " counted from 0."
        )
    return word
