"""Component ↔ dict ↔ one-line string such as `tag:steps=500,learning_rate=0.1`, without loss."""

import dataclasses
import json
import math
import re
import types
import typing
from typing import Any

import yaml

from gradleak.core.errors import GradleakError
from gradleak.core.registry import Bounds, Component, find, unknown_field

ANY_SIZE = Bounds()  # of numbers that say no more: not negative, not infinite, not "not a number"
_FOUND_HINTS: dict[type[Component], dict[str, Any]] = {}
IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_BARE = re.compile(r"[\w./~-]+")  # text that needs no quotes in a line


def _hints(cls: type[Component]) -> dict[str, Any]:
    """The types of its fields: slow to find, and asked for by every cell of a study."""
    if cls not in _FOUND_HINTS:
        _FOUND_HINTS[cls] = typing.get_type_hints(cls, include_extras=True)
    return _FOUND_HINTS[cls]


def list_fields(cls: type[Component]) -> "list[dataclasses.Field[Any]]":
    """Returns a component's fields in the order of its constructor.

    Those it shares with others of its kind are keyword-only, and come last however early its base
    class declares them.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    return sorted(fields, key=lambda field: bool(field.kw_only))


def to_dict(component: Component) -> dict[str, Any]:
    """`{"name": …}` and every field, as plain JSON values; fields that were added later only
    where they are set."""
    hints = _hints(type(component))
    values = {
        field.name: getattr(component, field.name)
        for field in list_fields(type(component))
        if field.name not in component.added_later
        or getattr(component, field.name) != field.default
    }
    # In the field's type: Tag(learning_rate=1) and Tag(learning_rate=1.0) are equal and must have
    # one id.
    fields = {
        name: _plain(_coerce(f"{component.name}:{name}", value, hints[name]))
        for name, value in values.items()
    }
    return {"name": component.name, **fields}


def defaults(component: Component) -> dict[str, Any]:
    """The fields that can be left out, as plain JSON values."""
    return {
        field.name: _plain(field.default)
        for field in list_fields(type(component))
        if field.default is not dataclasses.MISSING
    }


def from_dict(kind: str, described: dict[str, Any]) -> Component:
    """The component a dict describes; unknown or ill-typed fields are refused by name."""
    rest = dict(described)
    if not isinstance(name := rest.pop("name", None), str):
        raise GradleakError(
            f"Every {kind} needs a name: {described!r} has none. Write for example {{name: …,"
            " field: value}."
        )
    cls = find(kind, name)
    hints, fields = _hints(cls), [field.name for field in list_fields(cls)]
    for key in rest:
        if key not in fields:
            raise unknown_field(kind, name, key, fields)
    values = {key: _coerce(f"{name}:{key}", value, hints[key]) for key, value in rest.items()}
    return _build(cls, name, values)


def to_string(component: Component) -> str:
    """The shortest one-line form: fields at their defaults are left out."""
    parts, plain = [], to_dict(component)
    for field in list_fields(type(component)):
        value = getattr(component, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            parts.append(f"{field.name}={_write(plain[field.name])}")
    return component.name + (":" + ",".join(parts) if parts else "")


def from_string(kind: str, line: str) -> Component:
    """The component a one-line string describes."""
    name, _, rest = line.partition(":")
    described: dict[str, Any] = {"name": name.strip()}
    for part in split_fields(rest):
        key, equals, value = part.partition("=")
        if not equals:
            raise GradleakError(
                f"Cannot read {part!r} in {line!r}: write {name}:field=value,field=value."
            )
        if key.strip() in described:
            raise GradleakError(f"{key.strip()!r} is given twice in {line!r}: keep one.")
        try:
            described[key.strip()] = yaml.safe_load(value)
        # ValueError: what looks like a date or a number and is none
        except (yaml.YAMLError, ValueError) as error:
            raise GradleakError(
                f"Cannot read the value of {key.strip()!r} in {line!r}: {error}."
            ) from error
    return from_dict(kind, described)


def resolve(kind: str, described: Any) -> Component:
    """Whatever form a component is written in."""
    if isinstance(described, Component):
        return described
    if isinstance(described, str):
        return from_string(kind, described)
    if isinstance(described, dict):
        return from_dict(kind, described)
    raise GradleakError(
        f"Every {kind} is written as a name, a line such as name:field=value, or a mapping, not"
        f" {described!r}."
    )


def _build(cls: type[Component], name: str, values: dict[str, Any]) -> Component:
    missing = [
        field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise GradleakError(
            f"{cls.kind} {name!r} needs {', '.join(missing)}: write {name}:{missing[0]}=…."
        )
    try:
        return cls(**values)
    except ValueError as error:
        raise GradleakError(f"{cls.kind} {name!r}: {error}") from error


def split_fields(text: str) -> list[str]:
    """Cuts at commas that stand outside brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            escaped = quote == '"' and (place - len(text[:place].rstrip("\\"))) % 2 == 1
            quote = "" if letter == quote and not escaped else quote
        elif letter in "\"'" and text[:place].rstrip()[-1:] in ("=", "[", ",", "{", ":"):
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    parts.append(text[start:])
    return [part for part in parts if part.strip()]


def _plain(value: Any) -> Any:
    if isinstance(value, Component):
        return to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _write(value: Any) -> str:
    """JSON is YAML; bare words stay bare so that a line reads well."""
    if isinstance(value, str) and _BARE.fullmatch(value) and _reads_as_itself(value):
        return value
    # YAML refuses or folds control characters and odd spaces that JSON leaves as they are.
    return "".join(
        letter if letter.isprintable() else f"\\U{ord(letter):08x}"
        for letter in json.dumps(value, ensure_ascii=False)
    )


def _reads_as_itself(text: str) -> bool:
    try:
        return bool(yaml.safe_load(text) == text)
    except (yaml.YAMLError, ValueError):  # 2024-13-45 looks like a date
        return False


def _coerce(where: str, value: Any, wanted: Any, allowed: Bounds = ANY_SIZE) -> Any:
    """The value as the field's type wants it, if it is in its range: YAML reads 1e-3 as text and
    lists as lists."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is typing.Annotated:
        given = next((extra for extra in arguments[1:] if isinstance(extra, Bounds)), allowed)
        return _coerce(where, value, arguments[0], given)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _coerce_first(
            where,
            value,
            [argument for argument in arguments if argument is not type(None)],
            allowed,
        )
    if origin is typing.Literal:
        if value not in arguments:
            options = "|".join(map(str, arguments))
            raise GradleakError(f"{where} must be one of {options}, not {value!r}.")
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_coerce(where, item, arguments[0], allowed) for item in items)
    if isinstance(wanted, type) and issubclass(wanted, Component):
        return resolve(wanted.kind, value)
    read = _coerce_scalar(where, value, wanted)
    if wanted in (int, float) and read not in allowed:
        raise GradleakError(
            f"{where} must be {'finite' if math.isinf(read) else allowed}, not {read!r}."
        )
    return read


def _coerce_first(where: str, value: Any, choices: list[Any], allowed: Bounds) -> Any:
    problem: GradleakError | None = None
    for choice in choices:
        try:
            return _coerce(where, value, choice, allowed)
        except GradleakError as error:
            problem = problem or error
    raise problem or GradleakError(f"{where} cannot be {value!r}.")


def _coerce_scalar(where: str, value: Any, wanted: Any) -> Any:
    if wanted is bool and isinstance(value, bool):
        return value
    if (
        wanted is int
        and not isinstance(value, bool)
        and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ):
        return int(value)
    if wanted is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    if wanted is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise GradleakError(f"{where} must be {IN_WORDS.get(wanted, wanted)}, not {value!r}.")
