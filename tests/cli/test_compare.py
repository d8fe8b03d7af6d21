"""`gradleak compare`: pairs by hand, and runs that are not to be compared."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gradleak.cli import main
from gradleak.records.statistics import paired_difference
from gradleak.records.store import read_record, record_paths, write_record

ATTACKS = ["--attack", "span", "--attack", "tag:steps=3"]
WORDS = ["audit", "--target", "tiny", "--limit", "8", "--device", "cpu", *ATTACKS]
NOISE = ["--defense", "gaussian_noise:std=0.5"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same canaries without and with noise, in folders with keys of their own."""
    folder = tmp_path_factory.mktemp("compare")
    assert main([*WORDS, "--out", str(folder / "plain")]) == 0
    assert main([*WORDS, *NOISE, "--out", str(folder / "noise")]) == 0
    return folder / "plain", folder / "noise"


def compared(capsys: Captured, *runs: Path) -> dict[str, object]:
    capsys.readouterr()
    assert main(["compare", *map(str, runs), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_interval_is_the_paired_one_by_hand(runs: tuple[Path, Path], capsys: Captured) -> None:
    (setting,) = compared(capsys, *runs)["settings"]  # type: ignore[misc]
    first, second = (read_record(record_paths(run)[0]) for run in runs)
    assert setting["batches"] == 8 and setting["matched_by"] == "contents"
    assert [change["what"] for change in setting["changes"]] == ["defenses"]
    lines = {(line["attack"], line["metric"]): line for line in setting["differences"]}
    for metric in ("rouge1", "exact_match"):
        columns = [
            [
                [example.values[metric] for example in run.attacks[key].examples]
                for run in (first, second)
            ]
            for key in ("span", "tag")
        ]
        worst = [
            [max(pair) for pair in zip(columns[0][run], columns[1][run], strict=True)]
            for run in (0, 1)
        ]
        for attack, (before, after) in zip(
            ("span", "tag", "worst case"), [*columns, worst], strict=True
        ):
            wanted = paired_difference(after, before, range(8))
            found = lines[attack, metric]
            assert found["change"]["mean"] == pytest.approx(wanted.mean)
            assert (found["change"]["low"], found["change"]["high"]) == pytest.approx(
                (wanted.low, wanted.high)
            )
            assert found["change"]["mean"] == pytest.approx(
                sum(a - b for a, b in zip(after, before, strict=True)) / 8
            )
    assert lines["span", "exact_match"]["reading"] == "less leaks"


def resample_by_hand(differences: Sequence[float]) -> tuple[float, float]:
    """The bootstrap interval of the mean of eight paired differences, stretched by what Student's
    t (2.365 at 7 degrees of freedom) has over the normal law (1.960), and by n over n − 1."""
    draw, count = random.Random(1), len(differences)
    assert count == 8
    means = sorted(sum(draw.choices(differences, k=count)) / count for _ in range(20_000))
    mean, factor = sum(differences) / count, (8 / 7) ** 0.5 * 2.365 / 1.960
    low, high = (mean + (means[place] - mean) * factor for place in (500, 19_500))
    return max(low, -1.0), min(high, 1.0)


def test_the_paired_interval_is_that_of_a_resampling_by_hand() -> None:
    before = [0.9, 0.41, 1.0, 0.72, 0.55, 0.83, 0.3, 0.96]
    after = [0.2, 0.38, 0.51, 0.7, 0.11, 0.29, 0.33, 0.4]
    found = paired_difference(after, before, range(8))
    low, high = resample_by_hand([b - a for a, b in zip(before, after, strict=True)])
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.01)
    assert -0.7 < low < high < -0.05  # unlike the two samples' own intervals, which overlap


def test_attacks_of_several_records_of_a_setting_are_no_difference(
    tmp_path: Path, capsys: Captured
) -> None:
    words = ["audit", "--target", "tiny", "--limit", "2", "--device", "cpu"]
    for run, noise in (("plain", []), ("noise", NOISE)):
        for attack in ("blind", "span"):
            where = ["--out", str(tmp_path / run)]
            assert main([*words, "--attack", attack, *noise, *where]) == 0
    found = compared(capsys, tmp_path / "plain", tmp_path / "noise")
    (setting,) = found["settings"]  # type: ignore[misc]
    assert [change["what"] for change in setting["changes"]] == ["defenses"]
    assert main([*words, "--attack", "tag:steps=2", "--out", str(tmp_path / "plain")]) == 0
    found = compared(capsys, tmp_path / "plain", tmp_path / "noise")
    (setting,) = found["settings"]  # type: ignore[misc]
    attacks = next(change for change in setting["changes"] if change["what"] == "attacks")
    assert "tag:steps=2" in attacks["first"] and "tag" not in attacks["second"]
    assert all(name in attacks[side] for name in ("blind", "span") for side in ("first", "second"))


def test_attacks_of_one_name_are_told_apart_by_the_fields_that_differ(
    tmp_path: Path, capsys: Captured
) -> None:
    words = ["audit", "--target", "tiny", "--limit", "2", "--device", "cpu"]
    for run, attacks in (("a", ("blind", "tag:steps=2")), ("b", ("tag:steps=3", "blind"))):
        named = [word for attack in attacks for word in ("--attack", attack)]
        assert main([*words, *named, "--out", str(tmp_path / run)]) == 0
    (setting,) = compared(capsys, tmp_path / "a", tmp_path / "b")["settings"]  # type: ignore[misc]
    (changed,) = setting["changes"]
    assert (changed["first"], changed["second"]) == ("blind; tag:steps=2", "blind; tag:steps=3")


def test_a_person_reads_what_changed_and_which_way(
    runs: tuple[Path, Path], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    capsys.readouterr()
    assert main(["compare", *map(str, runs)]) == 0
    out = capsys.readouterr().out
    flat = " ".join(out.split())
    assert "defenses: none in A, gaussian_noise:std=0.5" in flat
    assert "Less leaks in B than in A: rouge1 changed by -" in flat
    assert "over 8 client batches that both have" in flat
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith(("A: ", "B: ")))


def test_a_run_beside_itself_shows_no_difference(runs: tuple[Path, Path], capsys: Captured) -> None:
    found = compared(capsys, runs[0], runs[0])
    (setting,) = found["settings"]  # type: ignore[misc]
    assert {line["reading"] for line in setting["differences"]} == {"no difference shown"}
    assert setting["matched_by"] == "hashes"


def test_only_batches_that_both_have_count(
    runs: tuple[Path, Path], tmp_path: Path, capsys: Captured
) -> None:
    rows = ["--data", "canaries:rows=6-13"]
    assert main([*WORDS, *NOISE, *rows, "--out", str(tmp_path)]) == 0
    (setting,) = compared(capsys, runs[0], tmp_path)["settings"]  # type: ignore[misc]
    assert setting["batches"] == 2
    before = [
        example.values["rouge1"]
        for example in read_record(record_paths(runs[0])[0]).attacks["tag"].examples[6:]
    ]
    after = [
        example.values["rouge1"]
        for example in read_record(record_paths(tmp_path)[0]).attacks["tag"].examples[:2]
    ]
    line = next(
        one for one in setting["differences"] if (one["attack"], one["metric"]) == ("tag", "rouge1")
    )
    assert (line["first"], line["second"]) == pytest.approx((sum(before) / 2, sum(after) / 2))  # type: ignore[arg-type]


def test_without_keys_rows_tell_and_that_is_said(
    runs: tuple[Path, Path], tmp_path: Path, capsys: Captured
) -> None:
    write_record(tmp_path, read_record(record_paths(runs[1])[0]))
    found = compared(capsys, runs[0], tmp_path)
    assert found["settings"][0]["matched_by"] == "description"  # type: ignore[index]
    assert any("rows and lengths" in sentence for sentence in found["says"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--data", "canaries:rows=50-53"], "share no client batch"),
        (["--batch-size", "2"], "A has 1 and B 2 examples a batch"),
    ],
)
def test_runs_on_other_examples_are_refused(
    runs: tuple[Path, Path], tmp_path: Path, capsys: Captured, words: list[str], reason: str
) -> None:
    assert (
        main([*WORDS[:-4], "--attack", "blind", *words, "--limit", "2", "--out", str(tmp_path)])
        == 0
    )
    capsys.readouterr()
    assert main(["compare", str(runs[0]), str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert reason in said and "same --data" in said


def test_settings_of_folders_are_paired_by_what_they_share(
    runs: tuple[Path, Path], tmp_path: Path, capsys: Captured
) -> None:
    plain, noise = (read_record(record_paths(run)[0]) for run in runs)
    one, other = tmp_path / "one", tmp_path / "other"
    for record in (plain, noise):
        write_record(one, record)
    for record in (
        plain,
        noise,
        replace(plain, spec={**plain.spec, "seed": 7, "defenses": [{"name": "sign"}]}),
    ):
        write_record(other, replace(record, spec={**record.spec, "dtype": "float64"}))
    found = compared(capsys, one, other)
    assert [[change["what"] for change in setting["changes"]] for setting in found["settings"]] == [
        ["dtype"]
    ] * 2  # type: ignore[attr-defined]
    assert ["sign" in reason for reason in found["left_out"]] == [True]  # type: ignore[attr-defined]
