"""The JSON schema of report.json, read off the dataclasses, so that it cannot fall behind them."""

import dataclasses
import types
import typing
from typing import Any

from gradleak.report.page.section import SCHEMA, Report

PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    float: {"type": ["number", "null"]},  # what is not finite is null
}


def report_schema() -> dict[str, Any]:
    """JSON Schema 2020-12; the file in docs/ is this."""
    definitions: dict[str, Any] = {}
    whole = _described(Report, definitions)
    root = definitions.pop(whole["$ref"].rpartition("/")[2])
    root["properties"] = {"schema": {"const": SCHEMA}, **root["properties"]}
    root["required"] = ["schema", *root["required"]]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A gradleak report"}
    return {**head, **root, "$defs": dict(sorted(definitions.items()))}


def _described(wanted: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted in PLAIN:
        return PLAIN[wanted]
    if dataclasses.is_dataclass(wanted):
        return _of_class(wanted, definitions)
    if origin in (typing.Union, types.UnionType):  # only `X | None` occurs
        return {"anyOf": [_described(arguments[0], definitions), {"type": "null"}]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _described(arguments[1], definitions)}
    return {"type": "array", "items": _described(arguments[0], definitions)}


def _of_class(wanted: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if wanted.__name__ not in definitions:
        definitions[wanted.__name__] = {}  # a place, before its fields
        hints = typing.get_type_hints(wanted)
        fields = {field.name: _described(hints[field.name], definitions) for field in dataclasses.fields(wanted)}
        about = " ".join((wanted.__doc__ or "").split())
        definitions[wanted.__name__] = {
            "type": "object",
            "description": about,
            "properties": fields,
            "required": list(fields),
        }
    return {"$ref": f"#/$defs/{wanted.__name__}"}
