"""`gradleak list`: what there is to put together."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gradleak.core.registry import Component

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


def list_components(kind: Annotated[str, typer.Argument(help=", ".join(KINDS) + ".")]) -> None:
    """Lists components of a kind with their fields and papers."""
    from gradleak.core.errors import GradleakError
    from gradleak.core.registry import did_you_mean

    chosen = KINDS.get(kind, kind)
    if chosen not in KINDS.values():
        raise GradleakError(f"Unknown kind {kind!r}{did_you_mean(kind, list(KINDS))} Kinds: {', '.join(KINDS)}.")
    print_components(chosen)


def print_components(kind: str) -> None:
    """The table of one kind."""
    import gradleak.audit.spec  # noqa: F401  registers every component
    from gradleak.core.registry import registered
    from gradleak.report.layout import open_console, plain_table

    table = plain_table()
    columns = ["name", "what it is", "fields", *(["requires"] if kind == "attack" else []), "paper"]
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for name, cls in registered(kind).items():
        required = [requirement(cls)] if kind == "attack" else []
        table.add_row(name, first_line(cls), fields(cls), *required, cls.cites or "-", end_section=True)
    open_console().print(table)


def first_line(cls: type) -> str:
    """The first line of the class's docstring."""
    return (cls.__doc__ or "-").strip().split("\n")[0]


def fields(cls: "type[Component]") -> str:
    """`steps=2500`, one a line; a field without a default is marked as required."""
    return "\n".join(f"{field.name}{_default(field)}" for field in dataclasses.fields(cls)) or "-"  # type: ignore[arg-type]


def requirement(cls: "type[Component]") -> str:
    """The facts an attack needs as it comes."""
    from gradleak.core.attack import Attack
    from gradleak.core.errors import GradleakError
    from gradleak.core.specs import from_dict

    try:
        attack = from_dict("attack", {"name": cls.name})
    except GradleakError:
        return "depends on its fields"
    return ", ".join(sorted(attack.requires)) or "nothing" if isinstance(attack, Attack) else "-"


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return f"={_written(field.default)}"
    return " (required)" if field.default_factory is dataclasses.MISSING else f"={_written(field.default_factory())}"


def _written(value: object) -> str:
    """As it would be written in a line."""
    from gradleak.core.registry import Component
    from gradleak.core.specs import to_string

    if isinstance(value, Component):
        return to_string(value)
    if isinstance(value, tuple):
        return "[" + ",".join(_written(item) for item in value) + "]"
    return value if isinstance(value, str) else json.dumps(value)
