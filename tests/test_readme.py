"""What the documents show is true: code and tutorials run, commands parse, names and files
exist."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import gradleak
from gradleak.audit import AuditSpec
from gradleak.cli.command import KINDS, read_index
from gradleak.cli.main import app, main
from gradleak.core.registry import list_registered
from gradleak.records.flags import FLAGS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
LOG = sorted((DOCS / "log").glob("2*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in DOCS.rglob("*.md") if not page.is_relative_to(DOCS / "results")),
]
WITH_PYTHON = (
    "README.md",
    "docs/write_your_own.md",
    "docs/studies.md",
    "docs/tutorials/a_study_of_your_own.md",
    "docs/captures.md",
    "docs/own_update.md",
)
WITH_RUNS = [page for page in PAGES if "<!-- run -->" in page.read_text(encoding="utf-8")]
# Of a framework in an environment of its own: tests/test_frameworks.py runs these
OF_FRAMEWORKS = [page for page in WITH_RUNS if "<!-- needs: " in page.read_text(encoding="utf-8")]
TABLE_KINDS = {**KINDS, "data sets": "dataset"}
# flag: field of the audit
OPTIONS = {"attack": "attacks", "defense": "defenses", "metric": "metrics"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of a language; "" for those without one."""
    return [
        code
        for found, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if found == language
    ]


def commands() -> dict[str, list[str]]:
    """The commands that each page shows, in console blocks and within sentences."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for block in blocks(text, "console") for line in block.splitlines()]
        shown = [
            match[1]
            for line in lines
            if (match := re.match(r"\$ (?:\w+=\S+ )*gradleak (.+)", line))
        ]
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        shown += re.findall(r"`gradleak ([^`]+)`", prose)
        if shown:
            found[name_of(page)] = shown
    return found


COMMANDS = commands()


def parse(words: list[str]) -> tuple[str, dict[str, object]]:
    """The command and its parameters, without running it; what does not exist is a click error."""
    group = typer.main.get_command(app)
    if words[0].startswith("-"):
        group.make_context("gradleak", words, resilient_parsing=True)
        return "", {}
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    if len(words) == 1 and words[0] != "audit":
        return "", {}  # named in a sentence, without what it needs
    if hasattr(command, "commands"):  # prior train, capture show
        below = command.commands[words[1]]
        if len(words) == 2:
            return "", {}
        return " ".join(words[:2]), below.make_context(words[1], words[2:]).params
    return words[0], command.make_context(words[0], words[1:]).params


def check_command(line: str) -> None:
    """Raises where an option, a component or a study that a command names does not exist."""
    name, given = parse(shlex.split(line.replace("...", ""), comments=True))
    if name == "audit":
        settings = {
            OPTIONS.get(flag, flag): value
            for flag, value in given.items()
            if value not in (None, [], ())
        }
        AuditSpec.from_plain(
            {
                field: value
                for field, value in settings.items()
                if field in AuditSpec.__dataclass_fields__
            }
        )
    elif name == "run":
        named = given["spec"]
        assert isinstance(named, (list, tuple)) and named
        # a pattern stands for the files that it matches; a page may write a study itself
        assert all(any(ROOT.glob(str(path))) or Path(str(path)).exists() for path in named)
    elif name == "list":
        assert given["kind"] in (None, *KINDS)


def write_files(page: Path, folder: Path) -> None:
    """Writes the files that a page tells its reader to write: the block after `<!-- file: NAME
    -->`."""
    text = page.read_text(encoding="utf-8")
    for name, content in re.findall(
        r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    ):
        (folder / name).write_text(content, encoding="utf-8")


def runs(page: Path) -> Iterator[tuple[list[str], int]]:
    """The words of each command under `<!-- run -->`, in order, and the exit code that it is
    said to have."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(
        r"^<!-- run -->\n```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    ):
        for line in block.splitlines():
            said = re.search(r"# exits with (\d+)$", line)
            yield (
                shlex.split(line.removeprefix("$ gradleak "), comments=True),
                int(said[1]) if said else 0,
            )


# What a reader has before the programs that capture an update: a model, its tokenizer and a loss.
OWN_LOOP = """
import torch
from gradleak.targets.tiny import Tiny

def make_names():
    target = Tiny(hidden=64, heads=4).open(torch.device("cpu"))
    model, tokenizer = target.module.requires_grad_(), target.tokenizer
    ids = tokenizer(["she gave her friend a red book"], return_tensors="pt")
    loss = model(**ids, labels=torch.tensor([1])).loss
    return {"__name__": "shown", "model": model, "tokenizer": tokenizer, "loss": loss}
"""


def test_python_shown_runs(tmp_path: Path) -> None:
    """All programs in one process, each in a namespace of its own: opening torch is most of the
    time."""
    shown = [
        program
        for page in WITH_PYTHON
        for program in blocks((ROOT / page).read_text(encoding="utf-8"), "python")
    ]
    assert len(shown) >= len(WITH_PYTHON)
    (tmp_path / "all.py").write_text(
        f"{OWN_LOOP}\nfor program in {shown!r}:\n    exec(program, make_names())\n",
        encoding="utf-8",
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(gradleak.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, "all.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (first,) = re.findall(r"^rouge1 (\S+)", result.stdout, re.MULTILINE)
    assert float(first) > 0.5  # the first thing that a newcomer runs shows a leak


OWN_PARTS = '''
from dataclasses import dataclass

from gradleak.attacks.span import Span
from gradleak.core.attack import Attack
from gradleak.core.defense import Channel, Defense
from gradleak.core.registry import register


@register("defense", "my_defense")
@dataclass(frozen=True)
class MyDefense(Defense):
    """Sends a share of every entry."""

    share: float = 0.5

    def protect(self, update, rngs):
        return update.map(lambda tensor: tensor * self.share)

    def channel(self):
        return Channel()


@register("attack", "my_attack")
@dataclass(frozen=True)
class MyAttack(Attack):
    """Does what span does."""

    def reconstruct(self, observations, bench):
        return Span().reconstruct(observations, bench)
'''
# What a reader has before the commands about captures and components of their own: a model, updates
# of it, the texts behind them, and two files of Python.
OWN_FILES = (
    """
import json, pathlib, sys
import gradleak
from gradleak.cli import main

names = make_names()
names["model"].save_pretrained("my-classifier")
names["tokenizer"].save_pretrained("my-classifier")
names["loss"].backward()
for path in ("update", "updates/0", "captures/0", "captures/1"):
    with gradleak.capture(names["model"], path + ".safetensors"):
        pass
pathlib.Path("texts.jsonl").write_text('{"text": "she gave her friend a red book", "label": 1}\\n')
parts = """
    + f"{OWN_PARTS!r}"
    + """
pathlib.Path("my_parts.py").write_text(parts)
pathlib.Path("my_pkg.py").write_text(parts.replace("my_", "package_"))
for words in json.loads(sys.argv[1]):
    code = main([*words, "--yes"] if "purge" in words else words)
    assert code == 0, f"gradleak {' '.join(words)} exits with {code}"
"""
)


def test_commands_on_what_is_ones_own_run(tmp_path: Path) -> None:
    """In one process, as opening torch is most of the time; it has a registry of its own."""
    shown = [
        shlex.split(line, comments=True)
        for page in ("docs/own_update.md", "docs/captures.md", "docs/write_your_own.md")
        for block in blocks((ROOT / page).read_text(encoding="utf-8"), "console")
        for line in re.findall(r"^\$ gradleak (.+)", block, re.MULTILINE)
    ]
    assert {word for words in shown for word in words} >= {"capture", "purge", "--truth"}
    (tmp_path / "all.py").write_text(OWN_LOOP + OWN_FILES, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "all.py", json.dumps(shown)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(gradleak.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 text rebuilt by span" in result.stdout
    assert not list((tmp_path / "captures").glob("*.safetensors"))


@pytest.mark.parametrize(
    "page", [page for page in WITH_RUNS if page not in OF_FRAMEWORKS], ids=name_of
)
def test_a_tutorial_runs_from_its_first_command_to_its_last(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "lora" in page.name:
        pytest.importorskip("peft", reason="adapters need peft, the extra lora")
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    for words, code in runs(page):
        assert main(words) == code, f"gradleak {shlex.join(words)}\n{''.join(capsys.readouterr())}"


def test_every_tutorial_runs() -> None:
    assert {*(DOCS / "tutorials").glob("*.md"), DOCS / "get_started.md"} <= set(WITH_RUNS)


def test_the_first_program_has_ten_lines() -> None:
    assert len([line for line in blocks(README, "python")[0].splitlines() if line.strip()]) <= 10


def test_the_readme_has_at_most_900_words() -> None:
    assert len(README.split()) <= 900


@pytest.mark.parametrize("page", COMMANDS)
def test_commands_shown_parse_and_their_components_exist(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("my-classifier", "adapters"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    write_files(ROOT / page, tmp_path)
    for line in COMMANDS[page]:
        try:
            check_command(line)
        except Exception as error:
            raise AssertionError(f"gradleak {line}: {error}") from error


def test_what_make_audit_prints_says_how_to_go_on() -> None:
    printed = re.search(
        r"^audit:.*?\n\n", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert printed is not None
    assert "source $(BIN)/activate" in printed[0] and "How to go on" in printed[0]
    shown = re.findall(r"'  gradleak (.+?)'", printed[0])
    assert len(shown) >= 4
    for line in shown:
        parse(shlex.split(line, comments=True))
    assert "source .venv/bin/activate" in README


def test_the_checks_would_notice() -> None:
    assert sum(map(len, COMMANDS.values())) > 100
    with pytest.raises(Exception, match="limt"):
        parse(["audit", "--limt", "3"])
    for words in (["adit"], ["capture", "sow", "update.safetensors"]):
        with pytest.raises(KeyError):
            parse(words)
    with pytest.raises(Exception, match="unexpected extra argument"):
        parse(["capture", "show", "one", "another"])


@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_components_named_in_the_readme_exist(kind: str) -> None:
    row = re.search(rf"^\| {kind} \| (.+) \|$", README, re.MULTILINE)
    if row is None:
        assert kind == "datasets"  # written as two words
        return
    named = set(re.findall(r"`(\w+)`", row[1]))
    assert named
    assert named <= set(list_registered(TABLE_KINDS[kind]))


def test_the_page_of_components_names_all_of_them_and_no_others() -> None:
    page = (DOCS / "components.md").read_text(encoding="utf-8")
    named = {
        name
        for row in re.findall(r"^\| [^|]+ \| (.+) \|$", page, re.MULTILINE)
        for name in re.findall(r"`([a-z]\w+)`", row)
    }
    ours = {name for shipped in read_index().values() for name in shipped}
    assert not ours - named
    assert not named - ours


def in_tree(text: str) -> list[Path]:
    """Paths of an annotated tree: folders end in a slash and are indented under their parent."""
    (tree,) = [block for block in blocks(text, "") if block.startswith("src/gradleak/")]
    found: list[Path] = []
    above: dict[int, Path] = {}
    for line in tree.splitlines():
        indent = len(line) - len(line.lstrip())
        first = line.split()[0]
        parent = above[max(level for level in above if level < indent)] if indent else ROOT
        found.append(parent / first)
        above = {level: path for level, path in above.items() if level < indent} | {
            indent: parent / first
        }
    return found


def test_every_module_stands_in_a_folder_of_the_tree_which_has_no_other() -> None:
    shown = in_tree((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    assert not [name_of(path) for path in shown if not path.is_dir()]
    source = ROOT / "src" / "gradleak"
    assert {path.parent for path in source.rglob("*.py")} - {source} <= set(shown)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda flag: flag.name)
def test_the_page_of_flags_holds_every_text_word_for_word(flag: object) -> None:
    page = " ".join((DOCS / "flags.md").read_text(encoding="utf-8").split())
    for text in (f"`{flag.name}`", flag.rule, flag.meaning, flag.what_to_do):  # type: ignore[attr-defined]
        assert text in page
    assert f"`{flag.name}`" in (DOCS / "read_a_report.md").read_text(encoding="utf-8")  # type: ignore[attr-defined]


def rows_of_results() -> list[str]:
    """The rows of the README's table of results."""
    begin, end = README.index("<!-- numbers:begin -->"), README.index("<!-- numbers:end -->")
    return [line for line in README[begin:end].splitlines() if line.startswith("|")][2:]


def figures(text: str) -> set[str]:
    """Numbers as they are written, without those within a name."""
    return set(re.findall(r"(?<![\w-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])", text))


@pytest.mark.parametrize("row", rows_of_results(), ids=lambda row: row.split("|")[1].strip()[:20])
def test_a_figure_of_the_readme_stands_in_the_log(row: str) -> None:
    *cells, linked = row.strip("| ").split(" | ")
    page = re.search(r"\((docs/log/.+?\.md)\)", linked)
    assert page is not None
    named = figures(" ".join(cells).replace("ROUGE-1 / 2 / L", ""))
    assert len(named) >= 3
    assert not named - figures((ROOT / page[1]).read_text(encoding="utf-8"))


def test_the_table_of_results_has_five_rows() -> None:
    assert len(rows_of_results()) == 5


@pytest.mark.parametrize("page", LOG, ids=lambda page: page.stem)
def test_an_entry_of_the_log_is_dated_indexed_and_says_what_was_learnt(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {page.name[:10]}: ")
    _, _, learnt = text.rpartition("\n## What was learnt\n\n")
    assert 1 <= len(re.findall(r"\.(?=\s|$)", learnt)) <= 3
    assert f"({page.name})" in (DOCS / "log" / "README.md").read_text(encoding="utf-8")


def test_the_log_is_indexed_newest_first() -> None:
    dates = re.findall(
        r"^- (\d{4}-\d\d-\d\d) ·",
        (DOCS / "log" / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert dates == sorted(dates, reverse=True)
    assert len(dates) == len(LOG)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_names_a_folder_of_one_machine(page: Path) -> None:
    assert not re.search(
        r"(?<![\w.~$])/(?:home|work|root|tmp|Users)/", page.read_text(encoding="utf-8")
    )
