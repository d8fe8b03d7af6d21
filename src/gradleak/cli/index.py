"""`gradleak list`: what components there are, read off a file made beforehand. `list`, a typo and
shell completion need not wait for torch.

`python -m gradleak.cli.write_index` writes the file; a test holds it to the registry.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from click.shell_completion import CompletionItem

from gradleak.cli.help import PlainHelp
from gradleak.core.errors import GradleakError
from gradleak.core.registry import (
    did_you_mean,
    registered,
    unknown_component,
    unknown_field,
)

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
    kinds = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        kind: {name: ComponentEntry(**entry) for name, entry in entries.items()}
        for kind, entries in kinds.items()
    }


def check_line(kind: str, line: str) -> None:
    """Refuses a name or a field that no component has. What is in doubt is left to whoever reads
    the line in full."""
    from gradleak.core.specs import split_fields

    known = read_index()[kind]
    name, _, rest = line.partition(":")
    name = name.strip()
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

    is_path = kind in PATHS and (
        any(sign in name for sign in "/\\.-~") or _is_here(line) or _is_here(name)
    )
    is_chain = kind == "defense" and (name == "none" or "+" in line)
    return is_path or is_chain or name in registered(kind)


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
    from gradleak.core.hub import find_model, is_beside_folders

    path = line.partition(":")[0].strip()
    if (
        path not in read_index()["target"]
        and not is_beside_folders(path)
        and not _is_here(line)
        and not _is_here(path)
    ):
        find_model(path)


def complete_kind(incomplete: str) -> list[str]:
    """The kinds that a shell may complete a word to."""
    return [kind for kind in KINDS if kind.startswith(incomplete)]


Kind = Annotated[
    str | None,
    typer.Argument(
        help=", ".join(KINDS) + ". [the kinds themselves]", autocompletion=complete_kind
    ),
]


def list_components(kind: Kind = None) -> None:
    """Lists components of a kind with their fields and papers; without a kind, the kinds with
    the names of each."""

    if kind is None:
        print_kinds()
        return
    chosen = KINDS.get(kind, kind)
    if chosen not in KINDS.values():
        raise GradleakError(
            f"Unknown kind {kind!r}{did_you_mean(kind, list(KINDS))} Kinds: {', '.join(KINDS)}."
        )
    print_components(chosen)


def print_kinds() -> None:
    """Every kind with the names of its components."""
    from gradleak.report.terminal.console import build_table, open_console

    table = build_table()
    table.add_column("kind", no_wrap=True)
    table.add_column("names")
    for kinds, kind in KINDS.items():
        table.add_row(kinds, ", ".join(read_index()[kind]), end_section=True)
    console = open_console()
    console.print(table)
    console.print("\nFields, defaults and papers: gradleak list attacks, and so on.")


def print_components(kind: str) -> None:
    """The components of one kind, one below the other: a table of so many fields would be cut at
    80 columns."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from gradleak.report.terminal.console import open_console

    console = open_console()
    for name, entry in read_index()[kind].items():
        lines = {"fields": _write_fields(entry), "requires": entry.requires, "paper": entry.cites}
        grid = Table.grid(padding=(0, 2))
        for title, text in lines.items():
            if text:
                grid.add_row(Text(title, style="dim"), text)
        console.print(Text.assemble((name, "bold"), "  ", entry.summary))
        if grid.row_count:
            console.print(Padding(grid, (0, 0, 0, 2)))
        console.print()


def _write_fields(entry: ComponentEntry) -> str:
    """`steps=2500, seed (required)`."""
    return ", ".join(
        f"{name} (required)" if value is None else f"{name}={value}"
        for name, value in entry.fields.items()
    )
