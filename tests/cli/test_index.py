"""The index of components that `list`, typos and shell completion are answered from, and what
they do not load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradleak
from gradleak.audit import AuditSpec
from gradleak.cli import main
from gradleak.cli.check import check_names
from gradleak.cli.command import FILE, KINDS, check_line, read_index
from gradleak.cli.write_index import index_text
from gradleak.core import registry
from gradleak.core.errors import GradleakError
from gradleak.core.registry import list_registered
from gradleak.core.specs import resolve
from gradleak.study import axes

HEAVY = ("torch", "transformers", "scipy", "numpy")


def run_light(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process that cannot import anything heavy."""
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({HEAVY!r}))\n"  # None: an import of it is an ImportError
        "from gradleak.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    settings = {
        **os.environ,
        "PYTHONPATH": str(Path(gradleak.__file__).parents[1]),
        "COLUMNS": "80",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_index_is_what_the_registry_holds() -> None:
    assert FILE.read_text(encoding="utf-8") == index_text(), (
        "run python -m gradleak.cli.write_index"
    )


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["list"], ["list", "attacks"], ["audit", "--help"]]
)
def test_what_needs_no_torch_loads_none(words: list[str]) -> None:
    result = run_light(*words)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_list_alone_lists_the_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in KINDS)
    assert "lamp_cos" in shown


def test_a_list_at_80_columns_breaks_no_field(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list", "attacks"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "learning_rate=0.1," in shown
    # What a component is stands behind its name, and lines below are indented
    starts = [line.split()[0] for line in shown.splitlines() if line.strip() and line[0] != " "]
    assert starts == list(read_index()["attack"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["audit", "--attack", "dgl"], "Unknown attack 'dgl' (did you mean 'dlg'?)."),
        (
            ["audit", "--attack", "dlg:stpes=5"],
            "attack 'dlg' has no field 'stpes' (did you mean 'steps'?).",
        ),
        (["audit", "--target", "tniy"], "Unknown target 'tniy' (did you mean 'tiny'?)."),
        (["audit", "--data", "canarys"], "Unknown dataset 'canarys' (did you mean 'canaries'?)."),
        (["map", "--metric", "rogue1"], "Unknown metric 'rogue1' (did you mean 'rouge1'?)."),
        (
            ["tradeoff", "--defense", "prunning"],
            "Unknown defense 'prunning' (did you mean 'pruning'?).",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_typo_is_answered_before_torch_is_loaded(words: list[str], said: str) -> None:
    result = run_light(*words)
    assert result.returncode == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("kind", "line"),
    [("attack", "dgl"), ("attack", "tag:stepz=3"), ("view", "lam"), ("prior", "englisch")],
)
def test_early_and_late_errors_are_the_same_sentence(kind: str, line: str) -> None:
    with pytest.raises(GradleakError) as late:
        resolve(kind, line)
    with pytest.raises(GradleakError) as early:
        check_line(kind, line)
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("target", "bert-base-uncased"),
        ("target", "./my-classifier"),
        ("target", "org/model:classes=3"),
        ("target", "mymodel:classes=2"),
        ("dataset", "notes.csv:text=note,label=class"),
        ("defense", "none"),
        ("defense", "clipping:clip=1 + gaussian_noise:std=0.01"),
        ("attack", "portfolio"),
    ],
)
def test_what_may_be_right_is_let_through(
    kind: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mymodel").mkdir()
    monkeypatch.chdir(tmp_path)
    check_line(kind, line)


def test_a_component_that_a_program_has_registered_is_let_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry._registry["view"], "mine", list_registered("view")["everything"])
    check_line("view", "mine")


def test_every_default_of_an_audit_is_let_through() -> None:
    spec = AuditSpec.from_plain({}).to_dict()
    for field, kind in {
        "target": "target",
        "data": "dataset",
        "protocol": "protocol",
        "view": "view",
    }.items():
        check_line(kind, spec[field]["name"])


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("gradleak audit --attack lamp_c", "lamp_cos"),
        ("gradleak audit --target tiny_c", "tiny_causal"),
        ("gradleak list prot", "protocols"),
        ("gradleak doc", "doctor"),
        ("gradleak audit --batch", "--batch-size"),
    ],
)
def test_a_shell_completes_commands_options_and_names(typed: str, offered: str) -> None:
    place = str(len(typed.split()) - 1)
    result = run_light(_GRADLEAK_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=place)
    assert result.stdout.split() == [offered], result.stderr


def test_every_entry_says_what_it_is() -> None:
    entries = [entry for kind in read_index().values() for entry in kind.values()]
    assert all(entry.summary.strip("-") for entry in entries)


MISSPELT = """\
target: tniy
attacks:
  - tag:steps=5
  - {name: dlg, stesp: 3}
defenses: [[gaussian_noise:std=1], [sing]]
limt: 4
"""


@pytest.mark.parametrize("command", ["check", "run"])
def test_misspelt_names_in_a_study_are_told_with_their_lines_before_torch_is_loaded(
    command: str, tmp_path: Path
) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(MISSPELT)
    result = run_light(command, str(study), "--set", "metrics=ruoge1")
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert lines[0] == f"Error: {study} has 5 problems; nothing was run."
    for told, wanted in zip(
        lines[1:], ["ruoge1", "line 1", "line 4", "line 5", "line 6"], strict=False
    ):
        assert wanted in told and "did you mean" in told
    assert not (tmp_path / "runs").exists()


def test_several_studies_are_all_looked_at_and_a_list_of_cells_is_none(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("target: tniy\n")
    (tmp_path / "first.yaml").write_text("- a\n- b\n")
    result = run_light("run", *(str(tmp_path / f"{name}.yaml") for name in ("a", "b", "first")))
    assert result.returncode == 2
    assert result.stderr.count("did you mean 'tiny'?") == 2


@pytest.mark.parametrize(
    "line",
    [
        "target: ./own",
        "target: {name: my_own}",
        "attacks: {steps: 3}",
        "data: notes.csv:text=note",
        "defenses: []",
        "public: null",
        "attacks: [tag:steps=-5]",
    ],
)
def test_what_is_no_typo_is_left_to_who_reads_it_in_full(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "study.yaml").write_text(line + "\n")
    monkeypatch.setattr("gradleak.cli.check.list_registered", lambda kind: {"my_own": object})
    check_names([tmp_path / "study.yaml"], ())


def test_every_study_of_the_repository_has_names_that_the_index_knows() -> None:
    studies = sorted((Path(__file__).parents[2] / "studies").glob("*.yaml"))
    assert len(studies) > 10
    check_names(studies, ())


def test_the_fields_of_a_study_are_those_of_an_audit() -> None:
    assert tuple(AuditSpec.__dataclass_fields__) == axes.FIELDS
