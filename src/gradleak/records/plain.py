"""Dataclasses to plain JSON values and back, guided by their annotations."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from gradleak.records.errors import RecordError


def to_plain(value: Any) -> Any:
    """JSON values only; what is not finite becomes null, since JSON has no NaN."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    raise RecordError(
        f"A record holds plain values only, not {type(value).__name__}; turn it into text or a"
        " number first."
    )


def from_plain(wanted: Any, value: Any, where: str) -> Any:
    """The value as `wanted` describes it; `where` names the place in error messages."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if dataclasses.is_dataclass(wanted):
        return _read_fields(wanted, value, where)
    if origin in (typing.Union, types.UnionType):  # only `X | None` occurs
        return None if value is None else from_plain(arguments[0], value, where)
    if origin is dict:
        items = _expect(dict, value, where)
        return {
            key: from_plain(arguments[1], item, f"{where}.{key}") for key, item in items.items()
        }
    if origin is tuple:
        return _read_tuple(arguments, _expect(list, value, where), where)
    if wanted is float:
        return math.nan if value is None else float(_expect((int, float), value, where))
    return value if wanted is Any else _expect(wanted, value, where)


def _read_fields(wanted: Any, value: Any, where: str) -> Any:
    """Fields this version does not know are left out, so that a later one may add some."""
    given, hints = _expect(dict, value, where), _hints(wanted)
    values = {}
    for field in dataclasses.fields(wanted):
        if field.name in given:
            values[field.name] = from_plain(
                hints[field.name], given[field.name], f"{where}.{field.name}"
            )
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(
                f"The record lacks {where}.{field.name}; run the audit again to write a whole one."
            )
    return wanted(**values)


@cache
def _hints(wanted: Any) -> dict[str, Any]:
    return typing.get_type_hints(wanted)


def _read_tuple(arguments: tuple[Any, ...], items: Any, where: str) -> tuple[Any, ...]:
    if arguments[-1] is Ellipsis:
        return tuple(
            from_plain(arguments[0], item, f"{where}[{place}]") for place, item in enumerate(items)
        )
    if len(items) != len(arguments):
        raise RecordError(
            f"{where} must hold {len(arguments)} values, not {len(items)}; run the audit again."
        )
    return tuple(
        from_plain(argument, item, where) for argument, item in zip(arguments, items, strict=True)
    )


def _expect(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        # names the type and not the value, which may be somebody's text
        raise RecordError(
            f"{where} cannot be of type {type(value).__name__}; the record was changed or broken,"
            " run the audit again."
        )
    return value
