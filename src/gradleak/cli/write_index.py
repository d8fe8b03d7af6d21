"""Writes components.json, the index of all components: `python -m gradleak.cli.write_index`,
whenever one has changed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import gradleak.audit.spec  # noqa: F401  registers every component
from gradleak.core.attack import Attack
from gradleak.core.errors import GradleakError
from gradleak.core.registry import KINDS, Component, list_registered
from gradleak.core.specs import from_dict, list_fields, to_string
from gradleak.records.files import write_to_publish

FILE = Path(__file__).with_name("components.json")


def index_text() -> str:
    """The file as it should be."""
    kinds = {
        kind: {name: describe(cls) for name, cls in list_registered(kind).items()} for kind in KINDS
    }
    return json.dumps(kinds, indent=1, ensure_ascii=False) + "\n"


def describe(cls: type[Component]) -> dict[str, Any]:
    """What `list` shows of a component."""
    return {
        "summary": " ".join((cls.__doc__ or "-").strip().split("\n\n")[0].split()),
        "fields": {field.name: default(field) for field in list_fields(cls)},
        "cites": cls.cites,
        "requires": requirement(cls) if cls.kind == "attack" else "",
    }


def requirement(cls: type[Component]) -> str:
    """The facts an attack needs as it comes."""
    try:
        attack = from_dict("attack", {"name": cls.name})
    except GradleakError:
        return "depends on its fields"
    return ", ".join(sorted(attack.requires)) or "nothing" if isinstance(attack, Attack) else "-"


def default(field: "dataclasses.Field[Any]") -> str | None:
    """A field's default as it would be written in a line; none where the field is required."""
    if field.default is not dataclasses.MISSING:
        return write_value(field.default)
    return (
        None
        if field.default_factory is dataclasses.MISSING
        else write_value(field.default_factory())
    )


def write_value(value: object) -> str:
    """A value as it would be written in a line."""
    if isinstance(value, Component):
        return to_string(value)
    if isinstance(value, tuple):
        return "[" + ",".join(write_value(item) for item in value) + "]"
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    write_to_publish(FILE, index_text().encode())
