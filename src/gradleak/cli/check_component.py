"""`gradleak check-component`: whether your own component does what all of its kind promise."""

import importlib
import inspect
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradleak.core.errors import GradleakError, RunFailed, did_you_mean

if TYPE_CHECKING:
    from gradleak.audit.contracts import Contract
    from gradleak.core.registry import Component


def check_component(
    component: Annotated[
        str,
        typer.Argument(
            help="A class, my_pkg.MyDefense, or the name of a component that --plugin loads; with"
            " fields where it needs them, my_pkg.MyDefense:share=0.5."
        ),
    ],
) -> None:
    """Holds a component of your own to the contracts that ours are tested by.

    It is tried on a small random model, an attack with a short search. A contract that holds says
    nothing of what the component is for: write tests of that yourself.
    """
    import gradleak.audit.spec  # noqa: F401  registers our own, beside which it has a name
    from gradleak.audit.contracts import list_contracts, prepare_ground
    from gradleak.report.numbers import write_count

    found = find_component(component)
    contracts, ground = list_contracts(found), prepare_ground()
    typer.echo(f"{found.kind} {found.name}, {type(found).__module__}.{type(found).__qualname__}")
    broken = sum([check(contract, found, ground) for contract in contracts])
    if found.medium == "image":
        typer.echo("Of pictures these are all: what is particular to them is not checked here.")
    elif len(contracts) < 3:
        typer.echo(f"Of a {found.kind} these are all: write tests of what it opens or loads.")
    if broken:
        raise RunFailed(f"{write_count(broken, 'contract is', 'contracts are')} broken.")


def find_component(line: str) -> "Component":
    """Returns the component that a line names, by its class or its registered name."""
    from gradleak.core.plugins import load_plugins
    from gradleak.core.registry import KINDS, list_registered
    from gradleak.core.specs import from_string

    load_plugins()
    path, colon, fields = (part.strip() for part in line.partition(":"))
    if "." in path:
        cls = import_class(path)
        return from_string(cls.kind, f"{cls.name}{colon}{fields}")
    kinds = [kind for kind in KINDS if path in list_registered(kind)]
    if not kinds:
        known = sorted(name for kind in KINDS for name in list_registered(kind))
        raise GradleakError(
            f"No component is called {path!r}{did_you_mean(path, known)} Name a class, as"
            " my_pkg.MyDefense, or load its file: --plugin FILE.py."
        )
    if len(kinds) > 1:
        raise GradleakError(f"{path!r} is a {' and a '.join(kinds)}: name its class.")
    return from_string(kinds[0], line)


def import_class(path: str) -> "type[Component]":
    """Returns a registered class by its dotted path, of what is installed or lies here."""
    from gradleak.core.registry import Component, find

    module, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        cls = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise GradleakError(
            f"{module} cannot be imported ({error}). Run this where it lies or is installed, or"
            " load its file: --plugin FILE.py."
        ) from error
    if not inspect.isclass(cls) or not issubclass(cls, Component):
        raise GradleakError(
            f"{path} is no component: name a class that derives from Attack, Defense, Metric or"
            " another one of gradleak.core."
        )
    if "name" not in vars(cls) or find(cls.kind, cls.name) is not cls:
        raise GradleakError(f'{path} is not registered: write @register("KIND", "NAME") above it.')
    return cls


def check(contract: "Contract", component: "Component", ground: Any) -> bool:
    """Says whether one contract holds, and why not; returns whether it is broken."""
    from gradleak.audit.contracts import BrokenContract

    found, said = "holds", ""
    try:
        contract(component, ground)
    except BrokenContract as error:
        found, said = "broken", str(error)
    except GradleakError as error:  # what it needs is not here: a model, another vocabulary
        found, said = "not tried", str(error)
    except Exception as error:  # whatever it is, it is the component's
        found = "broken"
        said = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
    typer.echo(f"  {found:<11}{' '.join((contract.__doc__ or '').split())}")
    if said:
        typer.echo(f"             {said}")
    return found == "broken"
