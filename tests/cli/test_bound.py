"""What no attack could do, on the command line: into records, and refused where there is none."""

from pathlib import Path

import pytest

from gradleak.audit import AuditSpec, bound_setting
from gradleak.cli import main
from gradleak.core.errors import GradleakError
from gradleak.records.judgement import find_bound, list_brackets
from gradleak.records.store import read_record, record_paths

TARGET = "tiny:layers=1,hidden=8,heads=1"
AUDIT = f"audit --target {TARGET} --attack blind --limit 2 --device cpu".split()
TEXTS = "text,label\nthe red cat,1\nmy dog is good,0\nthe car,1\na house was red,0\n"
NOISE = ["--defense", "dp_sgd:clip=0.5,noise_multiplier=0.5,steps=10"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "notes.csv"
    path.write_text(TEXTS)
    return str(path)


def make_spec(data: str, defense: str, batch_size: int = 1) -> AuditSpec:
    return AuditSpec.from_plain(
        {
            "target": TARGET,
            "data": data,
            "limit": 2,
            "batch_size": batch_size,
            "attacks": "blind",
            "defenses": defense,
        }
    )


def test_bounds_go_into_records_that_are_there(tmp_path: Path, data: str, capsys: Captured) -> None:
    assert main([*AUDIT, *NOISE, "--data", data, "--out", str(tmp_path)]) == 0
    (path,) = record_paths(tmp_path)
    before = read_record(path)
    assert before.bounds is None
    assert main(["bound", str(tmp_path), "--words", "all", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "at most" in printed
    assert "guaranteed" in printed
    after = read_record(path)
    assert after.id == before.id
    assert after.attacks == before.attacks
    assert after.bounds is not None
    assert after.bounds.words is None
    brackets = {one.of: one for one in list_brackets(after)}
    assert set(brackets) == {"token_accuracy", "exact_match"}
    found = brackets["token_accuracy"]
    assert found.attack is None  # the blind guess is no attack that could be named
    assert found.guaranteed is not None
    assert found.at_most.high is not None
    assert found.at_most.mean <= found.at_most.high <= 1
    # 1/2σ² nats, whatever the texts
    bits = find_bound(after, "information", "bits")
    assert bits is not None
    assert bits.mean == pytest.approx(2 / 0.6931471805599453)
    assert bits.kind == "theorem"
    measured = find_bound(after, "information measured", "bits")
    assert measured is not None
    assert measured.mean <= bits.mean * (1 + 1e-6)
    assert find_bound(after, "oracle", "bits_of_a_word") is not None
    # With the audit, and not after it
    assert main([*AUDIT, *NOISE, "--data", data, "--bounds", "--out", str(tmp_path / "other")]) == 0
    again = read_record(record_paths(tmp_path / "other")[0])
    assert again.bounds is not None
    assert again.bounds.words == 150
    assert find_bound(again, "information", "bits") == bits


def test_rounds_are_less_noise(data: str) -> None:
    # Of nine rounds with three times the noise the oracle sees the very same mean
    often = bound_setting(make_spec(data, "gaussian_noise:std=0.03"), rounds=9)
    once = bound_setting(make_spec(data, "gaussian_noise:std=0.01"))
    for one, other in zip(often.bounds, once.bounds, strict=True):
        assert one.bound == other.bound
        assert one.mean == pytest.approx(other.mean, rel=1e-3)
    assert not any(one.bound == "guarantee" for one in often.bounds)
    assert any("no guarantee" in remark for remark in often.remarks)


def test_more_noise_leaves_less(data: str) -> None:
    shares = []
    for noise_multiplier in (1e-6, 0.1, 10):
        spec = make_spec(data, f"dp_sgd:clip=0.5,noise_multiplier={noise_multiplier}", 2)
        shares.append(bound_setting(spec, words=20).bounds[0].mean)
    assert shares[0] == 1
    assert shares[0] > shares[1] >= shares[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Nothing is noised"),
        (["--defense", "quantisation"], "last digit"),
        ([*NOISE, "--protocol", "fedsgd:dropout=true"], "No exact likelihood"),
    ],
)
def test_settings_without_a_bound_are_refused_before_anything_is_attacked(
    tmp_path: Path, capsys: Captured, words: list[str], said: str
) -> None:
    assert main([*AUDIT, *words, "--bounds", "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("words", ["1", "many", "-3"])
def test_a_strange_number_of_words_is_refused(tmp_path: Path, capsys: Captured, words: str) -> None:
    assert main(["bound", str(tmp_path), f"--words={words}"]) == 2
    assert "--words is a number from 2 on" in capsys.readouterr().err


def test_pictures_and_no_rounds_are_refused() -> None:
    noisy = {"defenses": "gaussian_noise", "attacks": "blind"}
    with pytest.raises(GradleakError, match="rounds from 1"):
        bound_setting(AuditSpec.from_plain({"target": "tiny", **noisy}), rounds=0)
    with pytest.raises(GradleakError, match="for texts"):
        bound_setting(AuditSpec.from_plain({**noisy, "target": "tiny_image", "attacks": "ig"}))


def test_forms_and_chains_are_bounded_on_request(tmp_path: Path, capsys: Captured) -> None:
    data = tmp_path / "pins.jsonl"
    data.write_text('{"text": "my pin is 47 .", "label": 1, "secrets": [[10, 12]]}\n')
    words = ["--limit", "1", "--defense", "gaussian_noise:std=0.001", "--out", str(tmp_path)]
    assert main([*AUDIT, "--data", str(data), *words]) == 0
    run = ["bound", str(tmp_path), "--device", "cpu"]
    assert main([*run, "--words", "all", "--secrets", "--sweeps", "1"]) == 0
    assert "Marked secrets of 2 digits, n = 1" in " ".join(capsys.readouterr().out.split())
    found = read_record(record_paths(tmp_path)[0])
    bits = find_bound(found, "exposure", "bits of 2 digits")
    ceiling = find_bound(found, "ceiling", "token_accuracy")
    oracle = find_bound(found, "oracle", "token_accuracy")
    assert bits is not None
    assert ceiling is not None
    assert oracle is not None
    assert 0 <= bits.mean <= 6.65  # log2 100
    assert 0 <= ceiling.mean <= 1
    assert main([*run, "--sweeps", "1"]) == 2
    assert "whole vocabulary" in capsys.readouterr().err


def test_records_that_have_no_bound_are_named_and_left(
    tmp_path: Path, data: str, capsys: Captured
) -> None:
    out = ["--data", data, "--out", str(tmp_path / "run")]
    assert main([*AUDIT, *out]) == 0
    assert main(["bound", str(tmp_path / "run"), "--device", "cpu"]) == 2
    assert "No record got a bound. Nothing is noised" in capsys.readouterr().err
    assert main([*AUDIT, *out, "--defense", "gaussian_noise:std=0.01"]) == 0
    assert main(["bound", str(tmp_path / "run"), "--device", "cpu", "--words", "20"]) == 0
    printed = capsys.readouterr().out
    assert "Nothing is noised" in printed
    bounds = [read_record(path).bounds for path in record_paths(tmp_path / "run")]
    assert sorted(one is None for one in bounds) == [False, True]
