"""Writes docs/report.schema.json, the JSON Schema of report.json.

    python benchmarks/report_schema.py

A test holds the file to the sections of this version.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

from gradleak.report import page
from gradleak.report.page.section import SCHEMA, Report

PLACE = Path(__file__).parents[1] / "docs" / "report.schema.json"
PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    float: {"type": ["number", "null"]},  # what is not finite is null
}


def write_schema() -> str:
    """Writes docs/report.schema.json."""
    return json.dumps(describe_report(), indent=1, ensure_ascii=False) + "\n"


def describe_report() -> dict[str, Any]:
    """Returns the JSON Schema (2020-12) of report.json; docs/report.schema.json is this."""
    definitions: dict[str, Any] = {}
    members: dict[str, Any] = {"schema": {"const": SCHEMA}}
    for part in (Report, *page.SECTIONS):
        members |= _describe_members(part, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A gradleak report",
        "type": "object",
        "description": Report.__doc__,
        "properties": members,
        "required": list(members),
        "$defs": dict(sorted(definitions.items())),
    }


def _describe_type(wanted: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted in PLAIN:
        return PLAIN[wanted]
    if dataclasses.is_dataclass(wanted):
        return _describe_class(wanted, definitions)
    if origin in (typing.Union, types.UnionType):  # only `X | None` occurs
        return {"anyOf": [_describe_type(arguments[0], definitions), {"type": "null"}]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _describe_type(arguments[1], definitions)}
    return {"type": "array", "items": _describe_type(arguments[0], definitions)}


def _describe_class(wanted: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if wanted.__name__ not in definitions:
        definitions[wanted.__name__] = {}  # a place, before its fields
        fields = _describe_members(wanted, definitions)
        about = " ".join((wanted.__doc__ or "").split())
        definitions[wanted.__name__] = {
            "type": "object",
            "description": about,
            "properties": fields,
            "required": list(fields),
        }
    return {"$ref": f"#/$defs/{wanted.__name__}"}


def _describe_members(wanted: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(wanted)
    names = (one.name for one in dataclasses.fields(wanted) if one.name != "sections")
    return {name: _describe_type(hints[name], definitions) for name in names}


if __name__ == "__main__":
    PLACE.write_text(write_schema(), encoding="utf-8")
