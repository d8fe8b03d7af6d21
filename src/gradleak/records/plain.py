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

from gradleak.records.errors import RecordError

Reader = Callable[[Any], Any]


def to_plain(value: Any, keep_nan: bool = False) -> Any:
    """Returns JSON values only; what is not finite becomes null, since JSON has no NaN.

    With `keep_nan` it stays, for files that Python alone reads again.
    """
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        return {name: to_plain(getattr(value, name), keep_nan) for name in _names(kind)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, keep_nan) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item, keep_nan) for item in value]
    if isinstance(value, float):
        return float(value) if keep_nan or math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if kind is bytes:
        return base64.b64encode(value).decode()
    raise RecordError(
        f"A record holds plain values only, not {kind.__name__}; turn it into text or a"
        " number first."
    )


def from_plain(wanted: Any, value: Any, where: str) -> Any:
    """Returns the value as `wanted` describes it; `where` names the place in error messages."""
    try:
        return _reader(wanted)(value)
    except _Misfit as misfit:
        raise RecordError(misfit.says.format(where + misfit.place)) from None


class _Misfit(Exception):
    """A value that does not fit: what to say of it, and its place as far as it is known."""

    def __init__(self, says: str, place: str = "") -> None:
        self.says, self.place = says, place

    def within(self, outer: str) -> "_Misfit":
        self.place = outer + self.place
        return self


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _exact_types(wanted: Any) -> frozenset[type]:
    """Returns the types whose values are taken as they are, without asking their reader: most are
    of these, and thousands of records are read at once."""
    kinds = frozenset(typing.get_args(wanted) if _is_union(wanted) else (wanted,))
    return kinds if kinds <= {bool, int, float, str, types.NoneType} else frozenset()


def _is_union(wanted: Any) -> bool:
    return typing.get_origin(wanted) in (typing.Union, types.UnionType)  # only `X | None` occurs


@cache
def _reader(wanted: Any) -> Reader:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if dataclasses.is_dataclass(wanted):
        return _read_fields(wanted)
    if _is_union(wanted):
        inner = _reader(arguments[0])
        return lambda value: None if value is None else inner(value)
    if origin in (dict, Mapping):
        return _read_items(arguments[1])
    if origin is typing.Literal:
        return lambda value: _expect(type(arguments[0]), value)
    if origin is tuple:
        return _read_many(tuple, arguments) if arguments[-1] is ... else _read_few(arguments)
    if origin is list:
        return _read_many(list, arguments)
    if wanted is float:
        return _read_number
    if wanted is bytes:
        return lambda value: base64.b64decode(_expect(str, value))
    return (lambda value: value) if wanted is Any else (lambda value: _expect(wanted, value))


def _read_fields(wanted: Any) -> Reader:
    """Fields this version does not know are left out, so that a later one may add some."""
    hints, absent = typing.get_type_hints(wanted), dataclasses.MISSING
    readers = [
        (
            field.name,
            _exact_types(hints[field.name]),
            _reader(hints[field.name]),
            field.default is field.default_factory is absent,
        )
        for field in dataclasses.fields(wanted)
    ]

    def read(value: Any) -> Any:
        given, values, name = _expect(dict, value), {}, ""
        try:
            for name, exact, read_one, is_required in readers:
                if name in given:
                    item = given[name]
                    values[name] = item if type(item) in exact else read_one(item)
                elif is_required:
                    raise _Misfit("The record lacks {}; run the audit again to write a whole one.")
        except _Misfit as misfit:
            raise misfit.within(f".{name}") from None
        return wanted(**values)

    return read


def _read_items(wanted: Any) -> Reader:
    read_one, exact = _reader(wanted), _exact_types(wanted)

    def read(value: Any) -> dict[str, Any]:
        items, found = _expect(dict, value), dict[str, Any]()
        if exact.issuperset(map(type, items.values())):
            return dict(items)
        for key, item in items.items():
            try:
                found[key] = read_one(item)
            except _Misfit as misfit:
                raise misfit.within(f".{key}") from None
        return found

    return read


def _read_many(kind: type, arguments: tuple[Any, ...]) -> Reader:
    read_one, exact = _reader(arguments[0]), _exact_types(arguments[0])

    def read(value: Any) -> Any:
        items, found = _expect(list, value), list[Any]()
        if exact.issuperset(map(type, items)):
            return kind(items)
        try:
            for item in items:
                found.append(read_one(item))
        except _Misfit as misfit:
            raise misfit.within(f"[{len(found)}]") from None
        return kind(found)

    return read


def _read_few(arguments: tuple[Any, ...]) -> Reader:
    readers = [_reader(argument) for argument in arguments]

    def read(value: Any) -> tuple[Any, ...]:
        items = _expect(list, value)
        if len(items) != len(readers):
            raise _Misfit(
                f"{{}} must hold {len(readers)} values, not {len(items)}; run the audit again."
            )
        return tuple(read_one(item) for read_one, item in zip(readers, items, strict=True))

    return read


def _read_number(value: Any) -> float:
    if type(value) is float:
        return value
    return math.nan if value is None else float(_expect((int, float), value))


def _expect(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _Misfit(
            f"{{}} cannot be of type {type(value).__name__}; the record was changed or broken, run"
            " the audit again."
        )
    return value
