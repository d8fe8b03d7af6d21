"""Adding a defense, a metric or an attack on texts touches three files: its own, its package's list
of imports, and the index."""

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gradleak"
NEW = {"defenses": "scaling", "metrics": "first_word", "attacks": "words_by_id"}
PROGRAM = """
import runpy, sys
from gradleak.cli import main
runpy.run_module("gradleak.cli.write_index", run_name="__main__")
sys.exit(main(sys.argv[1:]))
"""
AUDIT = (
    "audit --target tiny --limit 2 --json --attack words_by_id --defense scaling:factor=0.25"
    " --metric first_word"
)


def read_components() -> dict[str, str]:
    """The defense and the metric of the page that teaches it, and the attack of the example."""
    page = (ROOT / "docs" / "write_your_own.md").read_text(encoding="utf-8")
    program = (ROOT / "examples" / "own_attack.py").read_text(encoding="utf-8")
    defense, metric = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    attack = program[: program.index("\n\nrecord =")].replace("import gradleak\n", "")
    return dict(zip(NEW, (defense, metric, attack), strict=True))


def run(source: Path, folder: Path) -> dict[str, Any]:
    """Writes the index of a copy of the package, audits with it and returns the record."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *AUDIT.split(), "--out", str(folder)],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def list_touched(package: Path) -> set[str]:
    """The files in which a copy of the package differs from ours."""
    return {
        path.relative_to(package).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if not (ours := SOURCE / path.relative_to(package)).exists()
        or not filecmp.cmp(path, ours, shallow=False)
    }


def test_a_component_is_a_file_an_import_and_the_index(tmp_path: Path) -> None:
    package = tmp_path / "gradleak"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder, text in read_components().items():
        (package / folder / f"{NEW[folder]}.py").write_text(text, encoding="utf-8")
        with (package / folder / "__init__.py").open("a", encoding="utf-8") as file:
            file.write(f"from gradleak.{folder} import {NEW[folder]}\n")
    record = run(tmp_path, tmp_path / "runs")
    assert record["spec"]["defenses"] == [{"name": "scaling", "factor": 0.25}]
    assert record["attacks"]["words_by_id"]["scores"]["first_word"]["n"] == 2
    own = {f"{folder}/{name}.py" for folder, name in NEW.items()}
    imports = {f"{folder}/__init__.py" for folder in NEW}
    assert list_touched(package) == own | imports | {"cli/components.json"}
