"""A trade-off is audits and trainings under the same defenses; what is finished is never done
again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.core.attack import Silent
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.defenses.clipping_and_noise import Clipping, GaussianNoise
from gradleak.records.store import read_record
from gradleak.report.pictures.tradeoff_chart import Tradeoff
from gradleak.study import grid
from gradleak.study import leak_and_utility as comparing
from gradleak.study.leak_and_utility import (
    TradeoffPlan,
    gain_over_blind,
    plan_tradeoff,
    read_chain,
    run_tradeoff,
)
from gradleak.training.fine_tuning import FineTuning
from gradleak.training.material import intervals

DEFENSES = ("none", "sign", "dp_sgd")


def planned(defenses: tuple[str, ...] = DEFENSES, **more: Any) -> TradeoffPlan:
    audit = {
        "target": "tiny",
        "data": "canaries",
        "limit": 2,
        "attacks": ["blind", "tag:steps=2"],
        "prior": "frequent_words",
    }
    return plan_tradeoff(defenses, audit, FineTuning(1, 32, 1e-3), **more)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tradeoff]:
    folder = tmp_path_factory.mktemp("tradeoff")
    return folder, run_tradeoff(planned(), folder, "cpu", Silent())


def test_every_setting_has_a_record_a_training_and_its_numbers(
    finished: tuple[Path, Tradeoff],
) -> None:
    folder, tradeoff = finished
    assert [point.defense for point in tradeoff.points] == list(DEFENSES)
    for point in tradeoff.points:
        record = read_record(folder / f"{point.audit}.json")
        assert point.leak == record.worst_case["rouge1"]
        assert point.gain == gain_over_blind(record, "rouge1")
        assert point.gain.mean == pytest.approx(
            (point.leak.mean or 0.0) - (point.leak.blind or 0.0)
        )
        kept = json.loads((folder / "training" / f"{point.training}.json").read_text())
        assert sum(map(sum, kept["counts"])) == tradeoff.test_examples == 84
    # No weights are left
    assert sorted(path.suffix for path in (folder / "training").iterdir()) == [".json"] * 3
    assert {one.accountant for one in tradeoff.points[2].guarantees} >= {"PRV (Opacus)"}
    plain = json.loads((folder / "tradeoff.json").read_text())
    assert (
        plain["schema"] == "gradleak.tradeoff/1"
        and len(plain["points"]) == 3
        and "weakest" in plain
    )
    assert (folder / "tradeoff.svg").is_file()


def test_the_same_again_takes_what_is_there(
    finished: tuple[Path, Tradeoff], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tradeoff = finished
    monkeypatch.setattr(grid, "run_audits", None)
    monkeypatch.setattr(comparing, "train", None)
    assert run_tradeoff(planned(max_leak=1.0), folder, "cpu", Silent()).points == tradeoff.points


def test_a_training_that_runs_away_leaves_the_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = comparing.train

    def fail(settings: FineTuning, *rest: Any) -> None:
        if settings.defenses:
            raise RunFailed("The loss is not finite.")
        inner(settings, *rest)

    monkeypatch.setattr(comparing, "train", fail)
    found = run_tradeoff(planned(("none", "sign")), tmp_path, "cpu", Silent())
    assert [point.defense for point in found.points] == ["none"]
    assert [one.defense for one in found.missing] == ["sign"]


def test_an_interruption_loses_no_finished_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, trained = comparing.train, []

    def interrupted(settings: FineTuning, *rest: Any) -> None:
        if settings.defenses:
            raise KeyboardInterrupt
        inner(settings, *rest)

    monkeypatch.setattr(comparing, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_tradeoff(planned(("none", "sign")), tmp_path, "cpu", Silent())
    monkeypatch.setattr(
        comparing,
        "train",
        lambda settings, *rest: (trained.append(settings), inner(settings, *rest)),
    )
    monkeypatch.setattr(grid, "run_audits", None)
    assert len(run_tradeoff(planned(("none", "sign")), tmp_path, "cpu", Silent()).points) == 2
    assert [len(settings.defenses) for settings in trained] == [1]


def test_a_chain_is_written_with_plus_signs_between_spaces() -> None:
    assert read_chain("clipping:clip=1e+1 + gaussian_noise:std=0.5") == (
        Clipping(clip=10.0),
        GaussianNoise(std=0.5),
    )
    assert read_chain(" none ") == ()
    assert len(planned(("none", "sign", " none")).settings) == 2  # of twins one is left


def test_data_of_one_class_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("text,label\n" + "call me,1\n" * 30)
    plan = planned(train_data=str(tmp_path / "notes.csv"))
    with pytest.raises(GradleakError, match="All 20 training examples have label 1"):
        run_tradeoff(plan, tmp_path / "out", "cpu", Silent())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "table",
    [
        [[50, 0], [0, 50]],
        [[60, 0], [40, 0]],
        [[45, 5], [10, 40]],
        [[9, 1, 0], [0, 8, 2], [1, 1, 8]],
    ],
)
def test_utility_intervals_hold_their_score_and_are_never_of_no_width(
    table: list[list[int]],
) -> None:
    for found in intervals(torch.tensor(table, dtype=torch.float64)).values():
        assert found.low <= found.mean <= found.high and found.high - found.low > 0.01
        assert found.n == sum(map(sum, table))


def test_more_test_examples_narrow_the_intervals() -> None:
    few = torch.tensor([[40.0, 10.0], [10.0, 40.0]])
    widths = [
        found["mcc"].high - found["mcc"].low for found in (intervals(few), intervals(9 * few))
    ]
    assert widths[1] < widths[0] / 2
