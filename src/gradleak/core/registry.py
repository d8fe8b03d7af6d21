"""Components by name: a decorator beside the class makes it known to the command line, YAML and
the contract tests. And which numbers their fields may hold."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from gradleak.core.errors import GradleakError, did_you_mean

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


def list_registered(kind: str) -> dict[str, type[Component]]:
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
    return GradleakError(
        f"{kind} {name!r} has no field {field!r}{did_you_mean(field, list(fields))} Fields:"
        f" {', '.join(fields) or 'none'}."
    )


@dataclass(frozen=True)
class Bounds:
    """Numbers from `least` to `most`. A field that names none takes whatever is finite and not
    negative."""

    least: float = 0.0
    most: float = math.inf
    above: bool = False  # above `least`, not at it
    infinite: bool = False  # infinity may stand for "as much as there is"

    def __contains__(self, number: Any) -> bool:
        if math.isinf(number):
            return self.infinite and self.most == number
        # False for nan
        return self.least <= number <= self.most and not (self.above and number == self.least)

    def __str__(self) -> str:
        if self.most < math.inf:
            return (
                f"above {self.least:g} and at most {self.most:g}"
                if self.above
                else f"from {self.least:g} to {self.most:g}"
            )
        return f"above {self.least:g}" if self.above else f"{self.least:g} or more"


Count = Annotated[int, Bounds(1)]
Rate = Annotated[float, Bounds(above=True)]  # what nothing moves at zero of
Share = Annotated[float, Bounds(most=1)]
AnyNumber = Annotated[float, Bounds(-math.inf)]
