"""The import rule of ARCHITECTURE.md, on the syntax tree of the source: who may know of
whom."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from house import House

import gradleak

SOURCE = Path(gradleak.__file__).parent
LEVELS = (
    ("core", "records"),
    ("captures", "matching"),
    ("targets", "datasets", "protocols", "defenses", "views", "priors", "metrics"),
    ("training", "attacks"),
    ("bounds",),
    ("audit",),
    ("study",),
    ("integrations", "cli"),
    ("__main__",),
)
LEVEL = {package: number for number, packages in enumerate(LEVELS) for package in packages}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def package_of(path: Path) -> str:
    """The first folder (or file) under gradleak."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of everything a file imports, however deep in a function; relative
    imports spelled out."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = (
                ["gradleak", *path.relative_to(SOURCE).parts][: -node.level] if node.level else []
            )
            module = ".".join([*above, *filter(None, [node.module])])
            # `from gradleak import core` imports a package; `from gradleak.core import batch` is of
            # core either way
            found += [
                (node.lineno, f"{module}.{alias.name}" if module == "gradleak" else module)
                for alias in node.names
            ]
    return found


def ours(path: Path) -> list[tuple[int, str]]:
    """Packages of gradleak a file imports, other than its own."""
    names = [
        (line, name.split(".")) for line, name in imported(path) if name.split(".")[0] == "gradleak"
    ]
    packages = [(line, parts[1] if len(parts) > 1 else "") for line, parts in names]
    return [
        (line, package)
        for line, package in packages
        if package not in (package_of(path), "__version__")
    ]


def allowed(importer: str, wanted: str) -> bool:
    if importer == "report":
        return wanted == "records"
    if wanted == "report":  # drawing is for those who face people
        return LEVEL[importer] >= LEVEL["study"]
    return wanted in LEVEL and LEVEL[wanted] < LEVEL[importer]


def test_every_package_has_a_level() -> None:
    assert {package_of(path) for path in MODULES} <= {*LEVEL, "report"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_from_levels_below(path: Path) -> None:
    wrong = [
        f"line {line} imports gradleak.{name}"
        for line, name in ours(path)
        if not allowed(package_of(path), name)
    ]
    assert not wrong, f"{path.relative_to(SOURCE)}: {'; '.join(wrong)}"


@pytest.mark.parametrize("package", ["records", "report"])
def test_records_and_report_import_only_what_a_small_machine_has(package: str) -> None:
    light = {*sys.stdlib_module_names, "gradleak", "numpy", "rich", "jinja2", "markupsafe"}
    files = sorted((SOURCE / package).rglob("*.py"))
    heavy = {name.split(".")[0] for path in files for _, name in imported(path)} - light
    assert not heavy - ({"scipy"} if package == "records" else set())


@pytest.mark.parametrize("package", ["records", "report"])
def test_records_and_report_load_no_torch(package: str) -> None:
    folder = SOURCE / package
    names = [
        ".".join(["gradleak", *path.relative_to(SOURCE).with_suffix("").parts])
        for path in folder.rglob("*.py")
    ]
    every = ", ".join(name.removesuffix(".__init__") for name in names)
    program = f"import sys, {every}\nassert not {{'torch', 'transformers'}} & set(sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_gradleak_itself_loads_nothing_heavy() -> None:
    program = (
        "import sys, gradleak\nassert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
    )


def test_the_rule_catches_what_it_should() -> None:
    assert not allowed("core", "matching")
    assert not allowed("targets", "priors")
    assert not allowed("report", "core")
    assert allowed("attacks", "matching")
    assert allowed("audit", "records")
    assert not allowed("matching", "attacks")


def test_no_modules_import_one_another_in_a_ring() -> None:
    assert House.read(SOURCE.parent).cycles() == []


@pytest.mark.parametrize(
    "second",
    [
        "from gradleak.first import one\n",
        "def late():\n    from .first import one\n",
        "if TYPE_CHECKING:\n    import gradleak.first\n",
        "from gradleak import first\n",
    ],
    ids=["at the top", "in a function", "under TYPE_CHECKING", "by its package"],
)
def test_a_ring_is_found_wherever_its_imports_stand(tmp_path: Path, second: str) -> None:
    source = tmp_path / "gradleak"
    source.mkdir()
    (source / "__init__.py").write_text("")
    (source / "first.py").write_text("from gradleak.second import two\n")
    (source / "second.py").write_text("two = 2\n")
    assert House.read(tmp_path).cycles() == []
    (source / "second.py").write_text(second)
    assert House.read(tmp_path).cycles() == [("gradleak.first", "gradleak.second")]


def test_the_search_kit_imports_no_attack() -> None:
    files = sorted((SOURCE / "attacks" / "search").glob("*.py"))
    names = {
        name for path in files for _, name in imported(path) if name.startswith("gradleak.attacks.")
    }
    assert len(files) > 5
    assert {name.split(".")[2] for name in names} <= {"search", "evidence"}


def test_study_offers_what_it_says() -> None:
    import gradleak.study as study

    tree = ast.parse((SOURCE / "study" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    checked = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(checked) == sorted(study.__all__)
    for name, module in checked.items():
        assert getattr(study, name) is getattr(importlib.import_module(str(module)), name)
    with pytest.raises(AttributeError, match="has no attribute 'leak'"):
        _ = study.leak
