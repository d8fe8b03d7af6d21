"""`gradleak check-component`: components of one's own are held to what ours promise."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradleak.audit.spec  # noqa: F401  registers our own, which are to stay
from gradleak.cli import main
from gradleak.core import plugins, registry
from gradleak.core.plugins import PREFIX, VARIABLE
from gradleak.core.registry import KINDS

SOURCE = '''
"""Components of one's own, of which one keeps its promises."""
import random
from dataclasses import dataclass

from gradleak.core.attack import Attack, Reconstruction
from gradleak.core.defense import Channel, Defense
from gradleak.core.metric import Metric
from gradleak.core.registry import register
from gradleak.core.update import Update


class Plain:
    """What the defenses share."""

    def protect(self, update, rngs):
        return self.change(update)

    def channel(self):
        return Channel()


@register("defense", "halving")
@dataclass(frozen=True)
class Halving(Plain, Defense):
    """Sends a share of every entry."""

    share: float

    def change(self, update):
        return update.map(lambda tensor: tensor * self.share)


@register("defense", "mixing")
@dataclass(frozen=True)
class Mixing(Plain, Defense):
    """Subtracts what clients have in common."""

    def change(self, update):
        return Update({name: one - one.mean(0) for name, one in update.tensors.items()})


@register("defense", "in_place")
@dataclass(frozen=True)
class InPlace(Plain, Defense):
    """Halves what it was given."""

    def change(self, update):
        for tensor in update.tensors.values():
            tensor.mul_(0.5)
        return update


@register("defense", "dropping")
@dataclass(frozen=True)
class Dropping(Plain, Defense):
    """Leaves a tensor out."""

    def change(self, update):
        return update.select(list(update.tensors)[1:])


@register("defense", "unwritten")
@dataclass(frozen=True)
class Unwritten(Plain, Defense):
    share: float = 0.5


@register("attack", "by_chance")
@dataclass(frozen=True)
class ByChance(Attack):
    """Says another word each time."""

    def reconstruct(self, observations, bench):
        return [Reconstruction(sentences=((random.randrange(5, 90),),)) for _ in observations]


@register("attack", "too_few")
@dataclass(frozen=True)
class TooFew(Attack):
    """Says nothing."""

    def reconstruct(self, observations, bench):
        return []


@register("metric", "length")
@dataclass(frozen=True)
class Length(Metric):
    """How long the guess is."""

    unit = "fraction"
    chance = "none"

    def values(self, pairs):
        return [1.0 - 1.0 / (1 + len(pair.guess.text)) for pair in pairs]


class Forgotten(Defense):
    """Was not registered."""
'''
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of components; what it registers is forgotten afterwards."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(plugins, "_sources", {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {kind: dict(registry._registry[kind]) for kind in KINDS}
    (tmp_path / "my_package.py").write_text(SOURCE)
    yield
    for name in [name for name in sys.modules if name.startswith((PREFIX, "my_package"))]:
        del sys.modules[name]
    for kind, known in before.items():
        registry._registry[kind].clear()
        registry._registry[kind].update(known)


def test_a_component_that_keeps_its_promises(capsys: Captured) -> None:
    assert main(["check-component", "my_package.Halving:share=0.25"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("defense halving, my_package.Halving\n")
    assert out.count("  holds ") == 4 and "broken" not in out


def test_one_of_a_file_is_named_as_on_the_command_line(capsys: Captured) -> None:
    words = ["--plugin", "my_package.py", "check-component", "halving:share=0.5"]
    assert main(words) == 0
    assert "halving, gradleak_plugin_my_package.Halving" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "promise", "otherwise"),
    [
        ("Mixing", "depends neither on the others", "alone, client 0 sends another"),
        ("InPlace", "leaves its input alone", "it changed "),
        ("Dropping", "keeps names and shapes", "is missing in what it sends"),
        ("Unwritten", "a docstring that is a sentence", "it has no docstring"),
        ("Unwritten", "keeps names and shapes", "AttributeError"),
        ("ByChance", "depends on the observation", "in another order it guesses otherwise"),
        ("TooFew", "one guess for each observation", "it gives 0 guesses for 2"),
        ("Length", "The right guess scores best", "the right guess scores 0.97"),
    ],
)
def test_a_promise_that_is_broken_is_named_with_how(
    name: str, promise: str, otherwise: str, capsys: Captured
) -> None:
    assert main(["check-component", f"my_package.{name}"]) == 3
    said = capsys.readouterr()
    lines = said.out.splitlines()
    (place,) = [at for at, line in enumerate(lines) if "  broken " in line and promise in line]
    assert otherwise in lines[place + 1]
    assert "broken." in said.err


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ("my_package.Halving", "'halving' needs share"),
        ("my_package.Forgotten", "my_package.Forgotten is not registered"),
        ("my_package.Absent", "my_package.Absent is no component"),
        ("no_package.Halving", "no_package cannot be imported"),
        ("spam", "did you mean 'span'?"),
    ],
)
def test_what_cannot_be_checked_is_refused(component: str, message: str, capsys: Captured) -> None:
    assert main(["check-component", component]) == 2
    assert message in capsys.readouterr().err
