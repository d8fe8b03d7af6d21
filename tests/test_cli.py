"""The command line as a user meets it: what it prints where, what it returns, and how fast it
answers."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradleak
from gradleak import __version__
from gradleak.attacks.blind import Blind
from gradleak.attacks.recipes.baselines import Dlg
from gradleak.audit.group import AuditGroup
from gradleak.cli import main
from gradleak.cli.command import KINDS
from gradleak.core.parts import MODULES
from gradleak.core.registry import list_registered
from gradleak.records.store import RECORD
from gradleak.targets.tiny import Tiny

AUDIT = ["audit", "--target", "tiny", "--attack", "tag:steps=3", "--limit", "2", "--device", "cpu"]
GRID = "target: tiny\nattacks: ['tag:steps=2', blind]\nlimit: 1\nmetrics: [rouge1, exact_match]\n"
Captured = pytest.CaptureFixture[str]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "gradleak", *words)


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """Another process that finds the same gradleak, installed or not."""
    environment = {**os.environ, "PYTHONPATH": str(Path(gradleak.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def error(capsys: Captured, *words: str, code: int = 2) -> str:
    """The sentence a bad command ends with; nothing else is printed."""
    assert main(words) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert "Traceback" not in err
    return err


def processor_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_answers_at_once_and_documents_the_exit_codes() -> None:
    took = []
    for _ in range(3):
        began = processor_seconds_of_children()
        result = command("--help")
        took.append(processor_seconds_of_children() - began)
    assert all(f"\n    {code} " in result.stdout for code in (0, 2, 3, 130))
    assert min(took) < 1.0  # 0.1 s on an idle machine


def test_the_command_line_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'rich', 'yaml'} & set(sys.modules)"
    code = (
        "import sys; from gradleak.cli import main; main(['--help']); main(['audit', '--help']);"
        f" sys.exit(str({heavy} or ''))"
    )
    result = python("-c", code)
    assert result.stderr.strip() == ""


def test_json_is_all_there_is_on_standard_output(tmp_path: Path) -> None:
    result = command(*AUDIT, "--json", "--out", str(tmp_path))
    assert result.returncode == 0
    plain = json.loads(result.stdout)
    score = plain["attacks"]["tag"]["scores"]["rouge1"]
    assert {"mean", "low", "high", "blind", "unit", "direction"} <= set(score)
    assert "mean" in plain["worst_case"]["rouge1"]
    assert (tmp_path / f"{plain['id']}.json").is_file()
    assert all("text" not in secret for secret in plain["secrets"])


def test_an_audit_shows_canaries_scores_flags_and_where_the_record_is(
    tmp_path: Path, capsys: Captured
) -> None:
    assert main([*AUDIT, "--attack", "blind", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    (path,) = tmp_path.glob("*.json")
    flat = " ".join(out.split())
    for part in (
        "My PIN is 4471",
        "rouge1",
        "worst case",
        "few_examples",
        "seed 0",
        "n = 2",
        "device cpu",
        f"Record: {path}",
    ):
        assert part in flat
    assert "Opening tiny on cpu" in err


def test_private_text_is_shown_and_kept_only_on_request(tmp_path: Path, capsys: Captured) -> None:
    data = tmp_path / "notes.csv"
    data.write_text("text,label\nthe doctor saw my heart,1\n")
    words = [
        "audit",
        "--target",
        "tiny",
        "--attack",
        "tag:steps=3",
        "--limit",
        "1",
        "--data",
        str(data),
        "--out",
        str(tmp_path),
    ]
    assert main(words) == 0
    hidden, _ = capsys.readouterr()
    assert main([*words, "--show"]) == 0
    shown, _ = capsys.readouterr()
    (path,) = tmp_path.glob("*.json")
    assert "doctor saw" not in hidden
    assert "doctor saw" in shown
    (details,) = (tmp_path / "details").iterdir()
    assert "doctor saw" not in path.read_text() + details.read_text()
    assert main([*words, "--keep-secrets"]) == 0
    (details,) = (tmp_path / "details").iterdir()
    assert "doctor saw" not in path.read_text()
    assert "doctor saw" in details.read_text()


def test_show_draws_a_record_or_lists_a_folder(tmp_path: Path, capsys: Captured) -> None:
    assert main([*AUDIT, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    capsys.readouterr()
    assert main(["show", str(path), "--trace"]) == 0
    drawn, _ = capsys.readouterr()
    assert "hash " in drawn
    assert "step 3" in drawn
    assert main(["show", str(tmp_path)]) == 0
    assert path.name in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_listed_with_all_its_components(kind: str, capsys: Captured) -> None:
    assert main(["list", kind]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in list_registered(KINDS[kind]))


def test_attacks_are_listed_with_fields_requirements_and_papers(capsys: Captured) -> None:
    main(["list", "attacks"])
    out = capsys.readouterr().out
    for part in ("steps=2500", "batch_size", "labels", "Deng et al."):
        assert part in out


def test_layers_and_modules_are_short_for_a_view(tmp_path: Path, capsys: Captured) -> None:
    assert (
        main(
            [
                *AUDIT,
                "--layers",
                "1-2",
                "--modules",
                "query, head",
                "--json",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    view = json.loads(capsys.readouterr().out)["spec"]["view"]
    assert view == {"name": "parts", "layers": "1-2", "modules": ["query", "head"]}
    assert "describe a view of their own: leave --view out" in error(
        capsys, *AUDIT, "--layers", "1", "--view", "lamp"
    )
    assert "name nothing" in error(capsys, *AUDIT, "--modules", ",")
    assert "Unknown module 'qury' (did you mean 'query'?)" in error(
        capsys, *AUDIT, "--modules", "key,qury"
    )


def test_the_help_names_every_module(capsys: Captured) -> None:
    assert main(["audit", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(module in out for module in MODULES)


def test_knowing_nothing_is_said_as_none(tmp_path: Path, capsys: Captured) -> None:
    words = [
        "audit",
        "--target",
        "tiny",
        "--attack",
        "blind",
        "--limit",
        "1",
        "--know",
        "none",
        "--json",
        "--out",
        str(tmp_path),
    ]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["know"] == []
    assert "portfolio requires" in error(capsys, "audit", "--target", "tiny", "--know", "none")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["audit", "--target", "tiny", "--attack", "tagg"],
            "Unknown attack 'tagg' (did you mean 'tag'?)",
        ),
        (
            ["audit", "--target", "tiny", "--attack", "tag:stps=3"],
            "has no field 'stps' (did you mean 'steps'?)",
        ),
        (["audit", "--target", "tiny", "--data", "nowhere.csv"], "nowhere.csv"),
        (
            ["audit", "--target", "tiny", "--know", "labels,lenghts"],
            "Unknown fact 'lenghts' (did you mean 'lengths'?)",
        ),
        (["audit", "--target", "tiny", "--device", "gpu"], "Unknown device 'gpu'"),
        (
            ["audit", "--target", "tiny", "--memory", "much"],
            "is no amount of memory: write for example 6GB",
        ),
        (["audit", "--target", "tiny", "--limit", "0"], "count from 1"),
        (["audit", "--target", "tiny", "--limit", "x"], "See gradleak audit --help."),
        (["audit", "--limt", "3"], "No such option"),
        (["adit"], "No such command 'adit'"),
        (["list", "attcks"], "Unknown kind 'attcks' (did you mean 'attacks'?)"),
        (["show", "nowhere.json"], "Cannot read nowhere.json"),
        (["run", "nowhere.yaml"], "Cannot read nowhere.yaml"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert err.splitlines()[-1].startswith("Error: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_a_gpu_that_is_not_there_is_an_error(capsys: Captured) -> None:
    assert "needs a CUDA GPU" in error(capsys, "audit", "--target", "tiny", "--device", "cuda")


def test_an_out_folder_that_is_a_file_is_refused_before_the_model_is_opened(
    tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "file").touch()
    assert "Cannot write records into" in error(capsys, *AUDIT, "--out", str(tmp_path / "file"))


def test_a_label_outside_the_models_classes_is_refused(tmp_path: Path, capsys: Captured) -> None:
    data = tmp_path / "notes.csv"
    data.write_text("text,label\nthe doctor,7\n")
    assert main([*AUDIT, "--data", str(data), "--limit", "1", "--out", str(tmp_path)]) == 2
    assert "notes.csv, line 2: label 7 is outside the 2 classes" in capsys.readouterr().err


def test_a_grid_is_run_shown_and_resumed(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "small.yaml").write_text(GRID)
    words = ["run", str(tmp_path / "small.yaml"), "--out", str(tmp_path), "--device", "cpu"]
    assert main([*words, "--limit-cells", "1"]) == 0
    assert len(list((tmp_path / "small").glob(RECORD))) == 1
    assert main([*words, "--full"]) == 0
    out, err = capsys.readouterr()
    assert "1 of 2 cells are finished already" in err
    assert "tag:steps=2" in out
    assert "exact_match" in out
    assert len(list((tmp_path / "small").glob(RECORD))) == 2


def test_a_grid_with_a_failed_cell_returns_3(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "long.csv").write_text("text,label\n" + "the " * 200 + ",1\n")
    (tmp_path / "fails.yaml").write_text(
        GRID.replace("target", f"data: {tmp_path / 'long.csv'}\ntruncate: off\ntarget")
    )
    assert (
        main(["run", str(tmp_path / "fails.yaml"), "--out", str(tmp_path), "--device", "cpu"]) == 3
    )
    out, err = capsys.readouterr()
    assert "0 of 2 cells have a record; 2 failed." in out
    assert "Could not be judged" in out
    assert "2 of 2 cells failed" in err
    assert len(list((tmp_path / "fails").glob("*.failed.txt"))) == 2


def test_unexpected_failures_are_a_sentence_and_code_3_with_a_traceback_on_request(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("gradleak.audit.run_audit", fail)
    assert "RuntimeError: out of luck. Add --debug" in error(
        capsys, *AUDIT, "--out", str(tmp_path), code=3
    )
    assert main([*AUDIT, "--out", str(tmp_path), "--debug"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_an_interruption_returns_130_and_says_that_parts_are_kept_only_where_some_are(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    words = [
        "audit",
        "--target",
        "tiny",
        "--limit",
        "1",
        "--attack",
        "blind",
        "--attack",
        "dlg:steps=2",
        "--json",
    ]
    with monkeypatch.context() as cut:
        cut.setattr(Blind, "reconstruct", interrupt)
        said = error(capsys, *words, "--out", str(tmp_path), code=130)
        assert "Interrupted before a part was finished" in said and "kept" not in said
    monkeypatch.setattr(Dlg, "reconstruct", interrupt)
    assert "Finished parts are kept; run the same command again" in error(
        capsys, *words, "--out", str(tmp_path), code=130
    )
    # Nothing new: the blind guess is from the part of before
    said = error(capsys, *words, "--out", str(tmp_path), code=130)
    assert "the same command begins where this one began" in said


def test_the_same_audit_again_is_answered_from_its_record_of_the_same_data(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notes = tmp_path / "notes.csv"
    notes.write_text("text,label\nit rains,0\nit snows,1\n")
    words = [
        "audit",
        "--target",
        "tiny",
        "--data",
        str(notes),
        "--limit",
        "2",
        "--attack",
        "blind",
        "--out",
        str(tmp_path / "runs"),
    ]
    calls = count_attacks(monkeypatch)
    assert main([*words, "--show"]) == 0 and len(calls) == 1
    first, _ = capsys.readouterr()
    assert main([*words, "--show"]) == 0 and len(calls) == 1
    again, news = capsys.readouterr()
    assert again == first and "it rains" in again
    assert "nothing was attacked. Add --again" in " ".join(news.split())
    assert main([*words, "--json"]) == 0 and json.loads(capsys.readouterr().out)["attacks"]
    assert main([*words, "--again"]) == 0 and len(calls) == 2
    assert main([*words, "--keep-secrets"]) == 0 and len(calls) == 3  # the record had none
    assert main([*words, "--keep-secrets"]) == 0 and len(calls) == 3
    notes.write_text("text,label\nit hails,0\nit snows,1\n")
    assert main(words) == 0 and len(calls) == 4


def test_a_record_of_another_model_in_the_same_place_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words, calls = (
        [*AUDIT[:3], "--attack", "blind", "--limit", "1", "--out", str(tmp_path), "--json"],
        count_attacks(monkeypatch),
    )
    assert main(words) == 0 and main(words) == 0 and len(calls) == 1
    monkeypatch.setattr(Tiny, "fingerprint", lambda self: "sha256:other")
    assert main(words) == 0 and len(calls) == 2


def count_attacks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one whenever an audit attacks."""
    calls: list[str] = []
    really = AuditGroup.attack_all

    def attack_all(self: AuditGroup) -> None:
        calls.append(self.shared.id)
        really(self)

    monkeypatch.setattr(AuditGroup, "attack_all", attack_all)
    return calls


@pytest.mark.parametrize("full", ["parts", "records"])
def test_a_disk_that_is_full_in_mid_run_is_a_failed_run_and_no_bad_input(
    full: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    really, calls = os.replace, count_attacks(monkeypatch)

    def replace(source: Path | str, wanted: Path | str) -> None:
        if Path(wanted).match(RECORD) or (full == "parts" and "parts" in Path(wanted).parts):
            raise OSError(errno.ENOSPC, "No space left on device")
        really(source, wanted)

    (tmp_path / "grid.yaml").write_text(GRID)
    audit = [
        "audit",
        "--target",
        "tiny",
        "--limit",
        "1",
        "--attack",
        "blind",
        "--out",
        str(tmp_path / "one"),
        "--json",
    ]
    run = [
        "run",
        str(tmp_path / "grid.yaml"),
        "--out",
        str(tmp_path),
        "--only",
        "attacks=blind",
        "--device",
        "cpu",
    ]
    for words in (audit, run):
        with monkeypatch.context() as filled:
            if words is run:
                # Before anything runs
                filled.setattr("gradleak.study.cells.write_whole", lambda *_: None)
            before = len(calls)
            filled.setattr(os, "replace", replace)
            capsys.readouterr()
            assert main(words) == 3
        _, said = capsys.readouterr()
        assert "No space left on device. Make room and run the same command again" in said
        assert len(calls) == before + 1  # not tried again where nothing can be written
    assert not list(tmp_path.rglob("*.failed.txt"))
    assert main(audit) == 0


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gradleak {__version__}\n"
