"""Components of one's own are loaded from files and packages, and named in records."""

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradleak.audit.spec  # noqa: F401  registers our own, which are to stay
from gradleak.cli import main
from gradleak.core import plugins, registry
from gradleak.core.errors import GradleakError
from gradleak.core.plugins import PREFIX, VARIABLE, has_plugins, list_sources, name_plugins
from gradleak.core.registry import KINDS

SOURCE = '''
"""A defense and an attack of one's own."""
from dataclasses import dataclass

from gradleak.attacks.span import Span
from gradleak.core.attack import Attack
from gradleak.core.defense import Channel, Defense
from gradleak.core.registry import register


@register("defense", "my_halving")
@dataclass(frozen=True)
class Halving(Defense):
    """Sends half of every entry."""

    share: float = 0.5

    def protect(self, update, rngs):
        return update.map(lambda tensor: tensor * self.share)

    def channel(self):
        return Channel()


@register("attack", "my_span")
@dataclass(frozen=True)
class MySpan(Attack):
    """Does what span does."""

    uses = Span().uses

    def reconstruct(self, observations, bench):
        return Span().reconstruct(observations, bench)
'''
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of components; what it registers is forgotten afterwards."""
    monkeypatch.setenv(VARIABLE, "")
    before = {kind: dict(registry._registry[kind]) for kind in KINDS}
    monkeypatch.setattr(plugins, "_sources", {})
    path = tmp_path / "my_parts.py"
    path.write_text(SOURCE)
    yield path
    for name in [name for name in sys.modules if name.startswith(PREFIX)]:
        del sys.modules[name]
    for kind, known in before.items():
        registry._registry[kind].clear()
        registry._registry[kind].update(known)


def test_an_audit_by_ones_own_components_keeps_the_hash_of_their_source(
    source: Path, tmp_path: Path, capsys: Captured
) -> None:
    words = "audit --target tiny:hidden=64,heads=4 --limit 1 --attack my_span --json".split()
    own = ["--defense", "my_halving:share=0.25", "--plugin", str(source)]
    assert main([*words, *own, "--out", str(tmp_path / "runs")]) == 0
    record = json.loads(capsys.readouterr().out)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    assert record["versions"]["plugin my_parts.py"] == f"sha256:{digest}"
    assert record["worst_case"]["exact_match"]["mean"] == 1
    assert record["spec"]["defenses"] == [{"name": "my_halving", "share": 0.25}]


def test_they_are_listed_and_their_typos_are_told(source: Path, capsys: Captured) -> None:
    assert main([f"--plugin={source}", "list", "attacks"]) == 0
    assert "Does what span does." in capsys.readouterr().out
    assert main(["audit", "--attack", "my_spam"]) == 2
    assert "did you mean 'my_span'?" in capsys.readouterr().err
    assert main(["audit", "--attack", "span", "--defense", "my_halving:part=1"]) == 2
    assert "has no field 'part'" in capsys.readouterr().err


def test_a_study_names_them_beside_itself_and_its_workers_load_them(
    source: Path, tmp_path: Path, capsys: Captured
) -> None:
    study = tmp_path / "mine.yaml"
    study.write_text(
        "plugins: [my_parts.py]\ntarget: tiny\nattacks: [[my_span]]\nlimit: 1\nseed: [0, 1]\n"
        "defenses: [my_halving]\nmetrics: [rouge1, exact_match]\n"
    )
    words = ["run", str(study), "--out", str(tmp_path / "runs"), "--workers", "2"]
    assert main([*words, "--device", "cpu"]) == 0, capsys.readouterr().err
    kept = [json.loads(path.read_text()) for path in (tmp_path / "runs" / "mine").glob("*.json")]
    found = [one["versions"] for one in kept if "versions" in one]
    assert len(found) == 2 and all("plugin my_parts.py" in versions for versions in found)


@pytest.mark.long
def test_a_study_on_ray_loads_them_on_its_cluster(
    source: Path, tmp_path: Path, capsys: Captured
) -> None:
    pytest.importorskip("ray", reason="ray is not installed; pip install 'gradleak[ray]'")
    study = tmp_path / "mine.yaml"
    study.write_text(
        "plugins: [my_parts.py]\ntarget: tiny\nattacks: [[my_span]]\nlimit: 1\nseed: [0, 1]\n"
        "defenses: [my_halving]\nmetrics: [rouge1, exact_match]\n"
    )
    words = ["run", str(study), "--out", str(tmp_path / "runs"), "--engine", "ray"]
    assert main([*words, "--device", "cpu"]) == 0, capsys.readouterr().err
    kept = [json.loads(path.read_text()) for path in (tmp_path / "runs" / "mine").glob("*.json")]
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    found = [one["versions"]["plugin my_parts.py"] for one in kept if "versions" in one]
    assert found == [f"sha256:{digest}"] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def broken(:\n", r"line 1, SyntaxError"),
        ("x = 1\nimport no_such_module\n", r"line 2, ModuleNotFoundError"),
        (SOURCE.replace("my_span", "span"), r"attack 'span' is registered twice"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_with_its_line(
    source: Path, text: str, message: str
) -> None:
    source.write_text(text)
    with pytest.raises(GradleakError, match=message):
        name_plugins([source])
    assert not list_sources()


def test_two_files_of_one_name_are_not_taken_for_one(source: Path, tmp_path: Path) -> None:
    name_plugins([source])
    name_plugins([source])  # the same again is nothing new
    other = tmp_path / "other" / "my_parts.py"
    other.parent.mkdir()
    other.write_text(SOURCE.replace("my_span", "other_span"))
    with pytest.raises(GradleakError, match=r"my_parts.py has the name of another plugin"):
        name_plugins([other])


def test_what_is_no_file_is_refused(source: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main(["list", "--plugin", str(tmp_path / "my_part.py")]) == 2
    assert "There is no plugin file" in capsys.readouterr().err
    (tmp_path / "notes.txt").touch()
    assert main(["list", "--plugin", str(tmp_path / "notes.txt")]) == 2
    assert "does not end in .py" in capsys.readouterr().err
    study = tmp_path / "mine.yaml"
    study.write_text("plugins: [missing.py]\ntarget: tiny\n")
    assert main(["check", str(study)]) == 2
    assert "line 1: plugins: There is no plugin file" in capsys.readouterr().err


def test_packages_offer_components_by_entry_points(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site"
    info = package / "offers-1.2.dist-info"
    info.mkdir(parents=True)
    (package / "offers_parts.py").write_text(SOURCE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offers\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[gradleak.attacks]\nmine = offers_parts:MySpan\n")
    monkeypatch.syspath_prepend(str(package))
    importlib.invalidate_caches()
    plugins._list_points.cache_clear()
    try:
        assert has_plugins()
        plugins.load_plugins()
        assert "my_span" in registry.list_registered("attack")
        assert list_sources() == {"offers offers_parts:MySpan": "1.2"}
    finally:
        plugins._list_points.cache_clear()
        sys.modules.pop("offers_parts", None)
    assert os.environ[VARIABLE] == ""
