"""Component ↔ dict ↔ line, without loss, and what is said of a line that cannot be read."""

import contextlib
import dataclasses
import json
import types
import typing
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gradleak.audit  # noqa: F401  (registers every component)
from gradleak.core.errors import GradleakError
from gradleak.core.registry import KINDS, Component, find, list_registered
from gradleak.core.specs import from_dict, from_string, resolve, to_dict, to_string

EVERY = [(kind, name) for kind in KINDS for name in list_registered(kind)]
NASTY = [
    "a,b",
    "a:b",
    "a=b",
    "a b",
    " a",
    "a ",
    "it's",
    'say "hi", twice',
    "back\\slash",
    '\\",',
    "[a",
    "{a: b}",
    "a]",
    "# no",
    "a #b",
    "null",
    "~",
    "true",
    "no",
    "12",
    "1.5",
    "1e-3",
    "0x_",
    "2024-01-01",
    "2024-13-45",
    "1:30",
    "-",
    "---",
    "=",
    "&a",
    "*a",
    "!a",
    "%a",
    "@a",
    "`a",
    "",
    "\n",
    "a\nb",
    "\t",
    "\x00",
    "\x7f",
    "\x85",
    "\xa0",
    "\u2028",
    "\ufeff",
    "naïve Ω 🙂",
    "\U000e0001",
    "C:\\x\\y.csv",
    "~/notes.csv",
]


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Anything a field of that type may hold."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(argument) for argument in arguments])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    plain = {
        bool: st.booleans(),
        int: st.integers(1, 10**6),
        float: st.floats(0, 1e9) | st.sampled_from([1e-3, 1e-05, 1e300, 0.1]),
        str: (
            st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(NASTY)
        ),
        type(None): st.none(),
    }
    return plain[hint]


def made(cls: type[Component], data: st.DataObject) -> Component | None:
    """The component with a drawn value in every field, or none where it refuses them or they are
    out of range."""
    hints = typing.get_type_hints(cls)
    values = {
        field.name: data.draw(values_of(hints[field.name]), field.name)
        for field in dataclasses.fields(cls)
    }
    try:
        component = cls(**values)
        to_dict(component)
    except (ValueError, GradleakError):
        return None
    return component


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=lambda word: word)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_component_survives_the_dict_and_the_line(
    kind: str, name: str, data: st.DataObject
) -> None:
    component = made(find(kind, name), data)
    if component is not None:
        assert from_dict(kind, json.loads(json.dumps(to_dict(component)))) == component
        assert from_string(kind, to_string(component)) == component


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=lambda word: word)
def test_every_component_survives_at_its_defaults(kind: str, name: str) -> None:
    cls = find(kind, name)
    required = {
        field.name: ("somewhere",) if "tuple" in str(field.type) else "somewhere"
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING
    }
    component = cls(**required)
    assert (
        resolve(kind, to_dict(component))
        == resolve(kind, to_string(component))
        == resolve(kind, component)
        == component
    )
    fields = ",".join(
        f"{field}=somewhere" if isinstance(value, str) else f'{field}=["somewhere"]'
        for field, value in required.items()
    )
    assert to_string(component) == (f"{name}:{fields}" if required else name)


@pytest.mark.parametrize("text", NASTY, ids=ascii)
def test_any_text_survives_alone_and_among_others(text: str) -> None:
    for line in (
        to_string(
            from_dict("dataset", {"name": "file", "path": text, "label": None, "text": text})
        ),
        to_string(
            from_dict(
                "target",
                {"name": "huggingface", "path": "x", "frozen": [text, "b", text], "head_seed": 3},
            )
        ),
    ):
        kind = "dataset" if line.startswith("file") else "target"
        assert to_string(from_string(kind, line)) == line
        assert text in (
            to_dict(from_string(kind, line)).get("text"),
            *to_dict(from_string(kind, line)).get("frozen", []),
        )


def test_lines_read_as_people_write_them() -> None:
    assert (
        to_dict(from_string("attack", " tag : steps = 500 , learning_rate = 1e-3 "))[
            "learning_rate"
        ]
        == 0.001
    )
    assert to_dict(from_string("dataset", "file:path=/a b/c d.csv,label=null")) == {
        **to_dict(from_string("dataset", "file:path=x")),
        "path": "/a b/c d.csv",
        "label": None,
    }
    assert to_dict(from_string("dataset", "file:path='a, b',text=don't"))["text"] == "don't"
    assert to_dict(from_string("target", "tiny:frozen=head"))["frozen"] == ["head"]
    assert to_dict(from_string("target", "tiny:frozen=[head, word_embedding],seed=2"))[
        "frozen"
    ] == ["head", "word_embedding"]
    assert to_dict(from_string("dataset", "file:path=7,text=4"))["path"] == "7"


def test_equal_components_have_one_dict_and_one_line() -> None:
    """Records are named by the hash of the dict: 1 and 1.0 must not name two."""
    whole, real = (find("attack", "tag")(learning_rate=rate) for rate in (1, 1.0))
    assert whole == real
    assert json.dumps(to_dict(whole)) == json.dumps(to_dict(real))
    assert to_string(whole) == to_string(real) == "tag:learning_rate=1.0"


def test_fields_at_their_defaults_are_left_out_of_the_line() -> None:
    assert to_string(from_string("attack", "tag:steps=2500,l1_weight=0.5")) == "tag:l1_weight=0.5"


@pytest.mark.parametrize(
    ("kind", "described", "message"),
    [
        (
            "attack",
            "tga",
            r"Unknown attack 'tga' \(did you mean 'tag'\?\)\. Available: .*dlg, .*tag",
        ),
        ("attack", "qqqqqq", r"Unknown attack 'qqqqqq'\. Available: "),
        (
            "attack",
            "tag:step=3",
            r"attack 'tag' has no field 'step' \(did you mean 'steps'\?\)\. Fields: steps, ",
        ),
        (
            "protocol",
            "fedsgd:rounds=3",
            r"protocol 'fedsgd' has no field 'rounds'\. Fields: dropout\.",
        ),
        (
            "view",
            "everything:layers=3",
            r"view 'everything' has no field 'layers'\. Fields: none\.",
        ),
        ("attack", "tag:steps=many", "tag:steps must be a whole number, not 'many'"),
        ("attack", "tag:steps=1.5", "tag:steps must be a whole number, not 1.5"),
        ("attack", "tag:steps=true", "tag:steps must be a whole number, not True"),
        ("attack", "tag:steps=", "tag:steps must be a whole number, not None"),
        ("attack", "tag:learning_rate=fast", "tag:learning_rate must be a number, not 'fast'"),
        ("attack", "tag:learning_rate=[1]", r"tag:learning_rate must be a number, not \[1\]"),
        ("target", "tiny:attend_padding=1", "tiny:attend_padding must be true or false, not 1"),
        ("target", "huggingface:path=[a]", r"huggingface:path must be text, not \['a'\]"),
        (
            "target",
            "minilm:weights=quarter",
            r"minilm:weights must be one of full\|half, not 'quarter'",
        ),
        ("target", "huggingface", "target 'huggingface' needs path: write huggingface:path="),
        ("attack", "tag:steps", "Cannot read 'steps' in 'tag:steps': write tag:field=value"),
        (
            "attack",
            "tag:steps=1,steps=2",
            "'steps' is given twice in 'tag:steps=1,steps=2': keep one",
        ),
        ("attack", "tag:name=dlg", "'name' is given twice"),
        ("attack", "tag:steps={", "Cannot read the value of 'steps' in 'tag:steps={'"),
        ("attack", "tag:steps=2024-13-45", "Cannot read the value of 'steps'"),
        ("attack", {"steps": 3}, "Every attack needs a name: .* has none"),
        (
            "attack",
            3,
            "Every attack is written as a name, a line such as name:field=value, or a mapping, "
            "not 3",
        ),
        ("defense", "gaussian_noise:std=-1", "gaussian_noise:std must be 0 or more, not -1.0"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(kind: str, described: Any, message: str) -> None:
    with pytest.raises(GradleakError, match=message):
        resolve(kind, described)


@given(st.text(max_size=30))
@example("tag:steps=!!python/object:os.system")
@settings(max_examples=200, deadline=None)
def test_no_line_ends_in_anything_but_a_component_or_a_sentence(rest: str) -> None:
    with contextlib.suppress(GradleakError):
        resolve("attack", f"tag:{rest}")
