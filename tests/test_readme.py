"""What the documents show is true: code runs, commands parse, names and files exist, flags are quoted word for word."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import gradleak
from gradleak.audit import AuditSpec
from gradleak.cli.index import KINDS
from gradleak.cli.main import app
from gradleak.core.registry import registered
from gradleak.records.flags import FLAGS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE_KINDS = {**KINDS, "data sets": "dataset"}
OPTIONS = {"attack": "attacks", "defense": "defenses", "metric": "metrics"}  # flags named otherwise than the audit's fields


def blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of a language; "" for those without one."""
    return [code for found, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if found == language]


def commands() -> list[tuple[str, str]]:
    """Page and command for each line of console blocks that calls gradleak, and for each such command within a sentence."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for block in blocks(text, "console") for line in block.splitlines()]
        shown = [match[1] for line in lines if (match := re.match(r"\$ (?:\w+=\S+ )*gradleak (.+)", line))]
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        shown += re.findall(r"`gradleak ([^`]+)`", prose)
        found += [(page.name, words) for words in shown]
    return found


def parse(words: list[str]) -> tuple[str, dict[str, object]]:
    """The command and its parameters, without running it; what does not exist is a click error."""
    group = typer.main.get_command(app)
    if words[0].startswith("-"):
        group.make_context("gradleak", words, resilient_parsing=True)
        return "", {}
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    if len(words) == 1 and words[0] != "audit":
        return "", {}  # named in a sentence, without what it needs
    return words[0], command.make_context(words[0], words[1:]).params


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_python_shown_runs(page: str, tmp_path: Path) -> None:
    programs = blocks((ROOT / page).read_text(encoding="utf-8"), "python")
    environment = {**os.environ, "PYTHONPATH": str(Path(gradleak.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    assert programs
    for program in programs:
        result = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        if "rouge1" in result.stdout:  # the first thing that a newcomer runs shows a leak
            assert float(result.stdout.split()[1]) > 0.5


def test_the_first_program_has_eight_lines() -> None:
    assert len([line for line in blocks(README, "python")[0].splitlines() if line.strip()]) <= 8


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_shown_parses_and_its_components_exist(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my-classifier").mkdir()
    monkeypatch.chdir(tmp_path)
    name, given = parse(shlex.split(line.replace("...", ""), comments=True))
    if name == "audit":
        settings = {OPTIONS.get(flag, flag): value for flag, value in given.items() if value not in (None, [], ())}
        AuditSpec.from_plain({field: value for field, value in settings.items() if field in AuditSpec.__dataclass_fields__})
    elif name == "run":
        named = given["spec"]
        assert isinstance(named, (list, tuple))
        assert named
        assert all(any(ROOT.glob(str(path))) for path in named)  # a pattern stands for the files that it matches
    elif name == "list":
        assert given["kind"] in (None, *KINDS)


def test_what_make_audit_prints_says_how_to_go_on() -> None:
    printed = re.search(r"^audit:.*?\n\n", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert printed is not None
    assert "source $(BIN)/activate" in printed[0] and "How to go on" in printed[0]
    shown = re.findall(r"'  gradleak (.+?)'", printed[0])
    assert len(shown) >= 4
    for line in shown:
        parse(shlex.split(line, comments=True))
    assert "source .venv/bin/activate" in README


def test_the_checks_would_notice() -> None:
    assert len(commands()) > 10
    with pytest.raises(Exception, match="limt"):
        parse(["audit", "--limt", "3"])
    with pytest.raises(KeyError):
        parse(["adit"])


@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_components_named_in_the_table_exist(kind: str) -> None:
    row = re.search(rf"^\| {kind} \| (.+) \|$", README, re.MULTILINE)
    if row is None:
        assert kind == "datasets"  # written as two words
        return
    named = set(re.findall(r"`(\w+)`", row[1]))
    assert named
    assert named <= set(registered(TABLE_KINDS[kind]))


def in_tree(text: str) -> list[Path]:
    """Paths of an annotated tree: folders end in a slash and are indented under their parent; files have a suffix."""
    (tree,) = [block for block in blocks(text, "") if block.startswith("src/gradleak/")]
    found: list[Path] = []
    above: dict[int, Path] = {}
    for line in tree.splitlines():
        indent = len(line) - len(line.lstrip())
        first, _, note = line.strip().partition(" ")
        parent = above[max(level for level in above if level < indent)] if indent else ROOT
        found.append(parent / first)
        if first.endswith("/"):
            above = {level: path for level, path in above.items() if level < indent} | {indent: parent / first}
            found += [parent / first / name for name in re.findall(r"\b[\w/]+(?:\.py|\.md|/)(?=\W|$)", note)]
    return found


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md"])
def test_everything_in_the_tree_exists(page: str) -> None:
    paths = in_tree((ROOT / page).read_text(encoding="utf-8"))
    assert len(paths) > 20
    assert not [str(path.relative_to(ROOT)) for path in paths if not path.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda flag: flag.name)
def test_the_page_of_flags_holds_every_text_word_for_word(flag: object) -> None:
    page = " ".join((ROOT / "docs" / "flags.md").read_text(encoding="utf-8").split())
    for text in (f"`{flag.name}`", flag.rule, flag.meaning, flag.what_to_do):  # type: ignore[attr-defined]
        assert text in page
    assert f"`{flag.name}`" in README  # type: ignore[attr-defined]


def test_the_measured_numbers_have_their_place() -> None:
    assert README.index("<!-- numbers:begin -->") < README.index("<!-- numbers:end -->")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_folder_of_one_machine(page: Path) -> None:
    assert not re.search(r"(?<![\w.~$])/(?:home|work|root|tmp|Users)/", page.read_text(encoding="utf-8"))
