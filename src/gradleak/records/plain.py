"""The one codec: dataclasses to plain JSON values and back, guided by their annotations.

For each annotation a reader is put together once and then used for every value. A value that does
not fit is refused by its place; it is never quoted, since it may be somebody's text.
"""

import base64
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from gradleak.records.files import RecordError

# Where a value stands: a name, or what it stands in and its own name or number
Place = str | tuple[Any, str | int]
Reader = Callable[[Any, Place], Any]
UNIONS = (typing.Union, types.UnionType)


def to_plain(value: Any, keep_nan: bool = False) -> Any:
    """Returns JSON values only; what is not finite becomes null, since JSON has no NaN.

    With `keep_nan` it stays, for files that Python alone reads again.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_plain(getattr(value, field.name), keep_nan)
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, keep_nan) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item, keep_nan) for item in value]
    if isinstance(value, float):
        return float(value) if keep_nan or math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if value is None or isinstance(value, (str, int)):
        return value
    raise RecordError(
        f"A record holds plain values only, not {type(value).__name__}; turn it into text or a"
        " number first."
    )


def from_plain(wanted: Any, value: Any, where: str) -> Any:
    """Returns the value as `wanted` describes it; `where` names the place in error messages."""
    return _reader(wanted)(value, where)


@cache
def _reader(wanted: Any) -> Reader:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if dataclasses.is_dataclass(wanted):
        return _read_fields(wanted)
    if origin in UNIONS:  # only `X | None` occurs
        inner = _reader(arguments[0])
        return lambda value, where: None if value is None else inner(value, where)
    if origin in (dict, Mapping):
        return _read_items(arguments[1])
    if origin is list or (origin is tuple and arguments[-1] is ...):
        return _read_many(origin, arguments[0])
    if origin is tuple:
        return _read_few(arguments)
    if origin is typing.Literal:  # of texts
        return _reader(str)
    if wanted is bytes:
        return lambda value, where: base64.b64decode(_expect(str, value, where))
    if wanted is float:
        return lambda value, where: (
            math.nan if value is None else float(_expect((int, float), value, where))
        )
    return lambda value, where: value if wanted is Any else _expect(wanted, value, where)


def _exact_types(wanted: Any) -> frozenset[type]:
    """Returns the types whose values are taken as they are, without asking their reader: most are
    of these, and thousands of records are read at once."""
    kinds = frozenset(typing.get_args(wanted) if typing.get_origin(wanted) in UNIONS else (wanted,))
    return kinds if kinds <= {bool, int, float, str, types.NoneType} else frozenset()


def _read_fields(wanted: Any) -> Reader:
    """Fields this version does not know are left out, so that a later one may add some."""
    hints, fields = typing.get_type_hints(wanted), dataclasses.fields(wanted)
    readers = [
        (one.name, _exact_types(hints[one.name]), _reader(hints[one.name])) for one in fields
    ]
    required = [
        one.name for one in fields if one.default is one.default_factory is dataclasses.MISSING
    ]

    def read(value: Any, where: Place) -> Any:
        given = _expect(dict, value, where)
        for name in required:
            if name not in given:
                raise RecordError(
                    f"The record lacks {_spell((where, name))}; run the audit again to write a"
                    " whole one."
                )
        return wanted(
            **{
                name: item if type(item := given[name]) in exact else read_one(item, (where, name))
                for name, exact, read_one in readers
                if name in given
            }
        )

    return read


def _read_items(wanted: Any) -> Reader:
    read_one, exact = _reader(wanted), _exact_types(wanted)

    def read(value: Any, where: Place) -> dict[str, Any]:
        items = _expect(dict, value, where)
        if exact.issuperset(map(type, items.values())):
            return dict(items)
        return {key: read_one(item, (where, key)) for key, item in items.items()}

    return read


def _read_many(kind: type, wanted: Any) -> Reader:
    read_one, exact = _reader(wanted), _exact_types(wanted)

    def read(value: Any, where: Place) -> Any:
        items = _expect(list, value, where)
        if exact.issuperset(map(type, items)):
            return kind(items)
        return kind([read_one(item, (where, place)) for place, item in enumerate(items)])

    return read


def _read_few(wanted: tuple[Any, ...]) -> Reader:
    readers = [_reader(one) for one in wanted]

    def read(value: Any, where: Place) -> tuple[Any, ...]:
        items = _expect(list, value, where)
        if len(items) != len(readers):
            raise RecordError(
                f"{_spell(where)} must hold {len(readers)} values, not {len(items)}; run the audit"
                " again."
            )
        return tuple([read_one(item, where) for read_one, item in zip(readers, items, strict=True)])

    return read


def _expect(kind: Any, value: Any, where: Place) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        # names the type and not the value, which may be somebody's text
        raise RecordError(
            f"{_spell(where)} cannot be of type {type(value).__name__}; the record was changed or"
            " broken, run the audit again."
        )
    return value


def _spell(where: Place) -> str:
    if isinstance(where, str):
        return where
    outer, inner = where
    return f"{_spell(outer)}[{inner}]" if isinstance(inner, int) else f"{_spell(outer)}.{inner}"
