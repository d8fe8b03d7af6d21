"""Report reads records and nothing else of ours, so that a machine without torch can read
results."""

import ast
import sys
from pathlib import Path

import pytest

import gradleak

FILES = sorted((Path(gradleak.__file__).parent / "report").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_report_imports_records_rich_and_the_standard_library_only(path: Path) -> None:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    for name in names:
        top = name.partition(".")[0]
        assert (
            top in sys.stdlib_module_names
            or top in ("rich", "jinja2", "markupsafe")
            or f"{name}.".startswith(("gradleak.records.", "gradleak.report."))
        )
