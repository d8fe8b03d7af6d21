"""Tutorials and examples of frameworks, run as a reader runs them. Skipped where the framework is
not installed: make frameworks."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gradleak
from gradleak.cli import main

ROOT = Path(__file__).parents[1]
TUTORIALS = {"audit_a_flower_app": "flwr", "audit_an_nvflare_job": "nvflare"}
EXAMPLES = {
    "audit_a_flower_app": ["flower_app"],
    "audit_an_nvflare_job": ["nvflare_client", "nvflare_job"],
}


def read(tutorial: str) -> str:
    return (ROOT / "docs" / "tutorials" / f"{tutorial}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tutorial", TUTORIALS)
def test_a_tutorial_shows_its_examples_as_they_are(tutorial: str) -> None:
    shown = dict(
        re.findall(
            r"^<!-- file: (\S+) -->\n```python\n(.*?)^```$",
            read(tutorial),
            re.MULTILINE | re.DOTALL,
        )
    )
    assert shown == {
        f"{name}.py": (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        for name in EXAMPLES[tutorial]
    }


@pytest.mark.parametrize("tutorial", TUTORIALS)
def test_a_tutorial_of_a_framework_runs_from_its_first_command_to_its_last(
    tutorial: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(TUTORIALS[tutorial])
    monkeypatch.chdir(tmp_path)
    for name in EXAMPLES[tutorial]:
        source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    blocks = re.findall(
        r"^<!-- run -->\n```console\n(.*?)^```$", read(tutorial), re.MULTILINE | re.DOTALL
    )
    ran = []
    for line in (line for block in blocks for line in block.splitlines()):
        said = re.search(r"# exits with (\d+)$", line)
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[0] == "python":
            run_python(words[1:], tmp_path)
        else:
            assert words[0] == "gradleak"
            expected = int(said[1]) if said else 0
            assert main(words[1:]) == expected, f"{line}\n{''.join(capsys.readouterr())}"
        ran.append(words[:3])
    assert ["gradleak", "federated", "audit"] in ran and ran[0][0] == "python"


def run_python(words: list[str], folder: Path) -> None:
    """Runs an example; what counts is what was captured, never an exit code of Flower."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(gradleak.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(list((folder / "captures").rglob("client-*/*.safetensors"))) == 4


def test_every_page_that_needs_a_framework_is_run_here() -> None:
    pages = [
        page for page in (ROOT / "docs").rglob("*.md") if "<!-- needs: " in page.read_text("utf-8")
    ]
    assert {page.stem for page in pages} == set(TUTORIALS)
    for name, framework in TUTORIALS.items():
        assert f"<!-- needs: {framework} -->" in read(name)


@pytest.mark.parametrize("name", ["flower_app", "nvflare_job"])
def test_an_example_differs_from_an_app_without_gradleak_by_one_line(name: str) -> None:
    """Beside the import of what that line calls; the small model and the grid in this process only
    make the example short."""
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    hooks = {"CaptureMod", "CaptureGrid", "CaptureObserver", "attach"}
    used = [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name) and node.id in hooks
    ]
    assert len(used) == 1
