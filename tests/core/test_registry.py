"""Laws of the registry."""

from dataclasses import dataclass

import pytest

import gradleak.audit  # noqa: F401  (registers every component)
from gradleak.core.errors import GradleakError
from gradleak.core.registry import KINDS, Component, find, list_registered, register


def test_what_is_not_a_frozen_dataclass_is_refused() -> None:
    class Plain(Component):
        pass

    @dataclass
    class Thawed(Component):
        size: int = 1

    for cls in (Plain, Thawed):
        with pytest.raises(TypeError, match=f"{cls.__name__} must be a frozen dataclass"):
            register("attack", "new")(cls)
    assert "new" not in list_registered("attack")


def test_a_subclass_that_forgot_to_be_a_frozen_dataclass_is_refused() -> None:
    @dataclass(frozen=True)
    class Parent(Component):
        size: int = 1

    class Child(Parent):
        other: int = 2  # not a field: it would be lost from every record

    with pytest.raises(TypeError, match="Child must be a frozen dataclass"):
        register("attack", "child")(Child)
    assert "child" not in list_registered("attack")


def test_a_name_taken_and_an_unknown_kind_are_refused() -> None:
    @dataclass(frozen=True)
    class Other(Component):
        size: int = 1

    with pytest.raises(TypeError, match="attack 'tag' is registered twice"):
        register("attack", "tag")(Other)
    with pytest.raises(
        TypeError, match="unknown kind of component 'atack'; kinds are target, dataset"
    ):
        register("atack", "other")(Other)


def test_names_are_found_and_listed_in_order() -> None:
    for kind in KINDS:
        assert list(list_registered(kind)) == sorted(list_registered(kind))
        assert all(
            find(kind, name) is cls and (cls.kind, cls.name) == (kind, name)
            for name, cls in list_registered(kind).items()
        )


def test_a_list_of_components_is_a_copy() -> None:
    list_registered("attack").clear()
    assert list_registered("attack")


def test_a_near_miss_is_answered_with_a_suggestion() -> None:
    with pytest.raises(
        GradleakError,
        match=(
            r"Unknown target 'minlm' \(did you mean 'minilm'\?\)\. Available: .*huggingface,"
            r" .*minilm, .*tiny"
        ),
    ):
        find("target", "minlm")


def test_none_among_defenses_is_answered_with_how_to_write_it() -> None:
    with pytest.raises(GradleakError, match=r"For no defense leave it out;.* \[\[\], \[sign\]\]\."):
        find("defense", "none")
    with pytest.raises(GradleakError, match=r"lamp, lamp_strict, parts, tensors\.$"):
        find("view", "none")
