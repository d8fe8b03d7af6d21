"""Components by name: a decorator beside the class makes it known to the command line, YAML and
the contract tests."""

import difflib
from collections.abc import Callable, Iterable
from typing import ClassVar, Literal, TypeVar

from gradleak.core.errors import GradleakError

KINDS = ("target", "dataset", "protocol", "defense", "view", "attack", "prior", "metric")
Medium = Literal["text", "image", "any"]


class Component:
    """A frozen dataclass with a registered name; its fields are its whole configuration."""

    kind: ClassVar[str] = ""
    name: ClassVar[str] = ""
    cites: ClassVar[str] = ""  # the paper it comes from, where there is one
    medium: ClassVar[Medium] = "any"  # what private data it is about
    # Fields that, at their default, leave ids what they were before them
    added_later: ClassVar[frozenset[str]] = frozenset()


Registered = TypeVar("Registered", bound=type[Component])
_registry: dict[str, dict[str, type[Component]]] = {kind: {} for kind in KINDS}


def register(kind: str, name: str) -> Callable[[Registered], Registered]:
    """Makes a frozen dataclass available as `name` among the components of `kind`."""

    def add(cls: Registered) -> Registered:
        if kind not in _registry:
            raise TypeError(f"unknown kind of component {kind!r}; kinds are {', '.join(KINDS)}")
        # Its own: a plain subclass inherits its parent's and loses its fields
        params = vars(cls).get("__dataclass_params__")
        if params is None or not params.frozen:
            raise TypeError(f"{cls.__name__} must be a frozen dataclass to be registered")
        if name in _registry[kind]:
            raise TypeError(f"{kind} {name!r} is registered twice")
        cls.kind, cls.name = kind, name
        _registry[kind][name] = cls
        return cls

    return add


def registered(kind: str) -> dict[str, type[Component]]:
    """All components of one kind, by name, in alphabetical order."""
    return dict(sorted(_registry[kind].items()))


def find(kind: str, name: str) -> type[Component]:
    """The component class of that name, or an error that suggests the nearest one."""
    known = _registry[kind]
    if name not in known:
        raise unknown_component(kind, name, known)
    return known[name]


def unknown_component(kind: str, name: str, known: Iterable[str]) -> GradleakError:
    """The error for a name that no component has."""
    none = (
        " For no defense leave it out; among several settings of a study it is an empty list:"
        " [[], [sign]]."
        if (kind, name) == ("defense", "none")
        else ""
    )
    return GradleakError(
        f"Unknown {kind} {name!r}{did_you_mean(name, list(known))} Available:"
        f" {', '.join(sorted(known))}.{none}"
    )


def unknown_field(kind: str, name: str, field: str, fields: Iterable[str]) -> GradleakError:
    """The error for a field that a component does not have."""
    known = ", ".join(fields) or "none"
    return GradleakError(
        f"{kind} {name!r} has no field {field!r}{did_you_mean(field, list(fields))} Fields:"
        f" {known}."
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'tag'?).` for a near miss, `.` otherwise."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)." if near else "."
