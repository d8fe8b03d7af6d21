"""No field of any component takes a number that means nothing."""

import dataclasses
import math
import types
import typing
from typing import Any

import pytest

import gradleak.audit  # noqa: F401  (registers every component)
from gradleak.core.errors import GradleakError
from gradleak.core.registry import KINDS, AnyNumber, Bounds, Component, Rate, find, list_registered
from gradleak.core.specs import _coerce, from_dict, from_string, to_dict


def number_of(hint: Any) -> type | None:
    """int or float, for a field that holds such numbers, or none of them, or several."""
    if hint in (int, float):
        return hint  # type: ignore[no-any-return]
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple):
        return next(filter(None, map(number_of, typing.get_args(hint))), None)
    return None


def numeric_fields() -> list[tuple[str, str, str, type]]:
    found = []
    for kind in KINDS:
        for name, cls in list_registered(kind).items():
            hints = typing.get_type_hints(cls)
            numbers = {
                field.name: number_of(hints[field.name]) for field in dataclasses.fields(cls)
            }  # type: ignore[arg-type]
            found += [
                (kind, name, field, number)
                for field, number in numbers.items()
                if number is not None
            ]
    return found


EVERY = numeric_fields()


def described(kind: str, name: str, field: str, value: float) -> dict[str, Any]:
    required = [
        one.name
        for one in dataclasses.fields(find(kind, name))
        if one.default is dataclasses.MISSING
    ]  # type: ignore[arg-type]
    return {"name": name, **dict.fromkeys(required, "somewhere"), field: value}


def test_there_are_fields_to_look_at() -> None:
    assert len(EVERY) > 100
    assert ("attack", "tag", "steps", int) in EVERY and (
        "attack",
        "lti",
        "learning_rate",
        float,
    ) in EVERY


@pytest.mark.parametrize(("kind", "name", "field", "number"), EVERY, ids=lambda word: str(word))
def test_no_number_is_nan_or_negative(kind: str, name: str, field: str, number: type) -> None:
    for value in (-5,) if number is int else (math.nan, -5.0, -math.inf):
        with pytest.raises(GradleakError, match=f"{field} must"):
            from_dict(kind, described(kind, name, field, value))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tag:steps=-5", "tag:steps must be 1 or more, not -5"),
        ("tag:steps=0", "tag:steps must be 1 or more, not 0"),
        ("tag:learning_rate=nan", "tag:learning_rate must be above 0, not nan"),
        ("tag:learning_rate=.nan", "tag:learning_rate must be above 0, not nan"),
        ("tag:learning_rate=inf", "tag:learning_rate must be finite, not inf"),
        ("tag:l1_weight=-1", "tag:l1_weight must be 0 or more, not -1.0"),
    ],
)
def test_the_range_is_said(line: str, message: str) -> None:
    with pytest.raises(GradleakError, match=message):
        from_string("attack", line)


def test_a_component_made_in_python_is_refused_when_it_is_written() -> None:
    made: Component = find("attack", "tag")(steps=-5)
    with pytest.raises(GradleakError, match="tag:steps must be 1 or more"):
        to_dict(made)


def test_a_field_says_its_own_range() -> None:
    assert 0.5 in Bounds(0, 1) and 1.5 not in Bounds(0, 1) and math.nan not in Bounds(-math.inf)
    assert (
        math.inf in Bounds(infinite=True)
        and math.inf not in Bounds()
        and -math.inf not in Bounds(infinite=True)
    )
    ranges = (Bounds(), Bounds(1), Bounds(above=True), Bounds(0, 1), Bounds(0, 1, above=True))
    words = ["0 or more", "1 or more", "above 0", "from 0 to 1", "above 0 and at most 1"]
    assert [str(one) for one in ranges] == words
    assert _coerce("own:shift", -3, AnyNumber) == -3.0
    assert _coerce("own:rate", None, Rate | None) is None
