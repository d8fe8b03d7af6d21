"""What benchmarks/house.py counts, on a package made for it; and that what it wrote into
ARCHITECTURE.md still holds."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
HOUSE: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "house.py"))
FILES = {
    "__init__.py": "",
    "cli/__init__.py": "from gradleak.cli.main import main\n",
    "cli/main.py": "def main():\n    from gradleak.cli import run\n    return run\n",
    "cli/run.py": "from gradleak import study\n",
    "study/__init__.py": '"""Many."""\n',
    "study/ray_engine.py": "from gradleak.study.grid import Row  # the row\n",
    # A cycle that only a type checker sees, and one through a function
    "study/grid.py": (
        """from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .state import State


class Row:
    @property
    def kept(self):
        return 1


def told(state):
    return state


def paired_difference():
    return 0
"""
    ),
    "study/state.py": (
        """class Row:
    pass


def read():
    from gradleak.study import grid
    return grid
"""
    ),
    "audit/grid.py": f"wide = '{'x' * 100}'\n",
}


@pytest.fixture
def counts(tmp_path: Path) -> dict[str, Any]:
    for name, text in FILES.items():
        path = tmp_path / "gradleak" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return dict(HOUSE["count"](HOUSE["House"].read(tmp_path)))


def test_a_cycle_counts_whether_a_function_or_a_type_checker_imports(
    counts: dict[str, Any],
) -> None:
    assert counts["import cycles"] == ["gradleak.study.grid ↔ gradleak.study.state"]


def test_a_module_that_one_neighbour_imports_is_told_from_one_that_a_package_offers(
    counts: dict[str, Any],
) -> None:
    # grid has two importers, main and run are offered, nobody imports ray_engine
    assert counts["modules with one importer"] == ["gradleak.study.state"]


def test_names_lines_and_statements_are_counted(counts: dict[str, Any]) -> None:
    assert counts["files"] == len(FILES)
    assert counts["class names used twice"] == ["Row ×2"]
    assert counts["module names used twice"] == ["grid ×2"]
    assert counts["lines over 100 characters"] == ["gradleak.audit.grid:1"]
    # `kept` is a property
    assert counts["functions named by a participle"] == ["gradleak.study.grid.told"]
    assert counts["functions"] == 5
    # cli: 1 + 3 + 1; ray_engine 1; grid 3 + 3 + 2 + 2; state 2 + 3; wide 1; the docstring is none
    assert counts["statements, by the syntax tree"] == 22
    assert counts["comment lines per hundred"] == pytest.approx(100 / counts["lines"], abs=0.05)


@pytest.mark.parametrize(
    ("name", "participle"),
    [
        ("told", True),
        ("_limited_to", True),
        ("paired_difference", False),
        ("cut", False),
        ("embed", False),
        ("read", False),
    ],
)
def test_a_participle_is_told_from_a_verb_and_a_noun(name: str, participle: bool) -> None:
    assert HOUSE["is_participle"](name) is participle


def test_a_walk_by_imports_stays_in_its_folders(tmp_path: Path, counts: dict[str, Any]) -> None:
    house = HOUSE["House"].read(tmp_path)
    assert HOUSE["reach"](
        house, ["gradleak.cli.run", "gradleak.study.ray_engine"], ("cli", "study")
    ) == [
        "cli/run.py",
        "study/__init__.py",
        "study/grid.py",
        "study/ray_engine.py",
        "study/state.py",
    ]


def test_the_walks_of_architecture_name_files_that_are_there() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    between = page.partition("<!-- walks:begin -->")[2].partition("<!-- walks:end -->")[0]
    rows = re.findall(r"^\| (?:audit|run) .+? \| (\d+) \| (.+) \|$", between, re.MULTILINE)
    assert len(rows) == 3
    for number, which in rows:
        folders = [group.split("/: ") for group in which.split("; ")]
        files = [
            ROOT / "src" / "gradleak" / folder / f"{name}.py"
            for folder, names in folders
            for name in names.split(", ")
        ]
        gone = [path.name for path in files if not path.exists()]
        assert not gone, f"{gone} moved: python benchmarks/house.py --write"
        assert len(files) == int(number)
