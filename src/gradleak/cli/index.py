"""What components there are, read off a file made beforehand: `list`, a typo and shell completion
need not wait for torch.

`python -m gradleak.cli.write_index` writes the file; a test holds it to the registry.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from gradleak.cli.help import PlainHelp

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
class Entry:
    """A component as `list` shows it; a field has no default where it is required."""

    summary: str
    fields: dict[str, str | None]
    cites: str
    requires: str  # the facts an attack needs as it comes; of other kinds nothing


@cache
def read_index() -> dict[str, dict[str, Entry]]:
    """All components by kind and name."""
    kinds = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        kind: {name: Entry(**entry) for name, entry in entries.items()}
        for kind, entries in kinds.items()
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
    from gradleak.core.hub_access import find_model, is_beside_folders

    path = line.partition(":")[0].strip()
    if (
        path not in read_index()["target"]
        and not is_beside_folders(path)
        and not _is_here(line)
        and not _is_here(path)
    ):
        find_model(path)
