"""benchmarks/arithmetics.py and check_python.py: which arithmetics are run, and what is said
before an install."""

import argparse
import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gradleak.audit import AuditSpec  # noqa: F401  (registers every component)
from gradleak.core.specs import from_string

ROOT = Path(__file__).parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


arithmetics, check_python = load("arithmetics"), load("check_python")
Arithmetic = arithmetics.Arithmetic
PARTS = ("product", "sum", "eigh")
FOUND = {
    Arithmetic(None, None, 1): "a-a-a",
    Arithmetic(None, "default", 2): "b-b-b",
    Arithmetic("COMPATIBLE", None, 1): "c-a-c",
    Arithmetic("AVX2", None, 1): "a-a-d",
    Arithmetic("COMPATIBLE", "default", 1): "d-b-e",
}


def test_a_fingerprint_is_the_same_for_the_same_arithmetic() -> None:
    plain = arithmetics.PLAIN
    one, other = arithmetics.fingerprint_of(plain), arithmetics.fingerprint_of(plain)
    assert one == other and set(one) == {"product", "sum", "eigh", "kernels"}


def test_a_fingerprint_that_was_seen_is_skipped_and_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    same = {"product": "a", "sum": "a", "eigh": "a", "kernels": "AVX2"}
    monkeypatch.setattr(
        arithmetics, "fingerprint_of", lambda one: same if one.threads == 1 else same | {"sum": "b"}
    )
    found = arithmetics.different(
        [Arithmetic(None, None, 1), Arithmetic("AVX2", None, 1), Arithmetic(None, None, 2)]
    )
    assert list(found.values()) == ["a-a-a", "a-b-a"]
    assert "MKL_CBWR=AVX2 threads=1: as threads=1, skipped" in capsys.readouterr().out


def test_only_kernels_that_the_processor_has_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetics, "fingerprint_of", lambda one: {"kernels": "AVX2"})
    assert {one.aten for one in arithmetics.every_combination()} == {None, "default", "avx2"}
    monkeypatch.setattr(arithmetics, "fingerprint_of", lambda one: {"kernels": "SVE256"})
    assert {one.aten for one in arithmetics.every_combination()} == {None, "default"}


def test_few_are_chosen_to_be_most_unlike() -> None:
    chosen = list(arithmetics.spread(FOUND, 3).values())
    assert chosen[:2] == ["a-a-a", "b-b-b"] and chosen[2] in ("c-a-c", "d-b-e")
    assert len(arithmetics.spread(FOUND, 9)) == 5


def test_the_other_arithmetic_differs_in_all_or_most_and_has_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        arithmetics,
        "fingerprint_of",
        lambda one: dict(zip(PARTS, FOUND[one].split("-"), strict=True)),
    )
    assert arithmetics.other_than_plain(list(FOUND)) == {
        Arithmetic("COMPATIBLE", "default", 1): "d-b-e"
    }
    assert arithmetics.other_than_plain(list(FOUND)[:4]) == {
        Arithmetic("COMPATIBLE", None, 1): "c-a-c"
    }


def test_failed_and_missing_tests_are_named_and_make_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "test_made_up.py"
    tests.write_text("def test_right(): pass\ndef test_wrong(): assert False\n", encoding="utf-8")
    chosen = argparse.Namespace(out=tmp_path / "all.jsonl", processes=0, matching="", time_limit=60)
    assert (
        arithmetics.run_tests(
            {arithmetics.PLAIN: "a-a-a"}, [str(tests), "--rootdir", str(tmp_path)], chosen
        )
        == 1
    )
    assert "test_made_up::test_wrong" in capsys.readouterr().out
    chosen.matching = "right"
    assert (
        arithmetics.run_tests(
            {arithmetics.PLAIN: "a-a-a"}, [str(tests), "--rootdir", str(tmp_path)], chosen
        )
        == 0
    )
    assert len(chosen.out.read_text(encoding="utf-8").splitlines()) == 2


def result(certified: dict[str, str], score: float = 1.0, error: str = "") -> dict[str, Any]:
    return {"certified": certified, "scores": {"rouge1": score}, "error": error}


def test_audits_agree_where_they_certify_the_same_whatever_the_scores(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert arithmetics.agree([result({"0.0": "a"}, 1.0), result({"0.0": "a"}, 0.5)])
    assert "rouge1 differs by 0.5000" in capsys.readouterr().out
    assert not arithmetics.agree([result({"0.0": "a"}), result({})])
    assert not arithmetics.agree([result({"0.0": "a"}), result({"0.0": "b"})])
    assert not arithmetics.agree([result({}), result({}, error="exit code 3")])


def test_every_test_file_that_make_test_names_is_there_or_comes_with_certificates() -> None:
    missing = [path for path in arithmetics.OTHER if not arithmetics.exists(path)]
    assert set(missing) <= {"tests/attacks/test_certificates.py"}


def test_twenty_audits_are_listed() -> None:
    assert len(arithmetics.AUDITS) == len(set(arithmetics.AUDITS)) == 20


@pytest.mark.parametrize("audit", arithmetics.AUDITS)
def test_every_audit_names_components_that_there_are(audit: str) -> None:
    said = audit.split()
    options = dict(zip(said[::2], said[1::2], strict=True))
    for kind in ("target", "attack", "defense", "protocol"):
        if f"--{kind}" in options:
            from_string(kind, options[f"--{kind}"])
    assert {"--target", "--attack", "--limit"} <= set(options)


@pytest.mark.parametrize(
    ("version", "fits"),
    [((3, 10, 4), False), ((3, 11, 0), True), ((3, 12, 9), True), ((3, 13, 0), False)],
)
def test_a_python_that_is_not_supported_is_refused_with_a_sentence(
    version: tuple[int, ...], fits: bool
) -> None:
    said = check_python.complain(version)
    assert (said == "") is fits
    assert fits or "gradleak needs Python 3.11 or 3.12" in said
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "requires-python"
    ]
    assert wanted == f">=3.{check_python.OLDEST[1]},<3.{check_python.NEWEST[1] + 1}"


def test_a_cuda_build_without_a_gpu_is_pointed_out() -> None:
    assert "no GPU is seen here" in check_python.warn_of_cuda("13.0", False)
    assert check_python.warn_of_cuda("13.0", True) == check_python.warn_of_cuda(None, False) == ""
