"""A search in two stages: who goes on, who wins, and what is said of the winner."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gradleak.core.attack import Attack, Silent
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.core.specs import from_string
from gradleak.datasets import TuningPart
from gradleak.records.schema import (
    AttackRecord,
    DataRecord,
    ExampleRecord,
    Record,
    Score,
    TargetRecord,
)
from gradleak.records.store import read_record
from gradleak.study import grid, tuning
from gradleak.study.cells import Cell
from gradleak.study.grid import CellResult
from gradleak.study.tuning import Effort, SearchRange, Tuned, plan_tuning, tune

TINY = {"target": "tiny", "data": "canaries"}
RATES = [SearchRange.between("learning_rate", 0.001, 0.09)]  # all below the default, 0.1
Values = Callable[[Attack, str], Sequence[float]]


def record(cell: Cell, metric: str, values: Sequence[float], direction: str) -> Record:
    score = Score(
        sum(values) / len(values), 0.0, 1.0, 0.0, 0.0, 0.0, "fraction", direction, len(values)
    )
    examples = tuple(
        ExampleRecord(place, 0, values={metric: value}) for place, value in enumerate(values)
    )
    plain = cell.spec.to_dict()
    return Record(
        created="",
        spec=plain,
        versions={},
        machine={},
        data=DataRecord("", len(values), len(values)),
        target=TargetRecord("tiny", "", 1, 1),
        secrets=(),
        attacks={"tag": AttackRecord(plain["attacks"][0], {metric: score}, examples, ())},
        worst_case={},
    )


def searched(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    values: Values,
    effort: Effort,
    metric: str = "rouge2",
    direction: str = "higher",
) -> tuple[Tuned, dict[str, list[Attack]]]:
    """A search in which audits give the values that are told; and the attacks that each stage
    ran."""
    ran: dict[str, list[Attack]] = {}

    def run(cells: Sequence[Cell], *_: Any, **__: Any) -> list[CellResult]:
        data = cells[0].spec.data
        assert isinstance(data, TuningPart)
        ran[data.stage] = [cell.spec.attacks[0] for cell in cells]
        given = [(cell, values(cell.spec.attacks[0], data.stage)) for cell in cells]
        failed = folder / "failed.txt"
        return [
            (
                CellResult(cell, record(cell, metric, list(one), direction))
                if one
                else CellResult(cell, None, failed)
            )
            for cell, one in given
        ]

    monkeypatch.setattr(tuning, "run_cells", run)
    plan = plan_tuning("tag:steps=2,l1_weight=0.01", RATES, effort, metric, TINY)
    return tune(plan, folder, "cpu", Silent()), ran


def rate(attack: Attack) -> float:
    return float(attack.learning_rate)  # type: ignore[attr-defined]


def test_the_best_on_the_coarse_sentences_and_the_defaults_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned, ran = searched(
        monkeypatch, tmp_path, lambda attack, _: [-rate(attack)] * 4, Effort(8, 2, 3, 4)
    )
    assert len(ran["coarse"]) == 8
    assert ran["fine"] == [*sorted(ran["coarse"], key=rate)[:3], ran["coarse"][0]]
    assert [ranked.fine is not None for ranked in tuned.ranked] == [True] * 4 + [False] * 4


def test_the_fine_sentences_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def values(attack: Attack, stage: str) -> list[float]:
        return [rate(attack) if stage == "fine" else -rate(attack)] * 4

    tuned, ran = searched(monkeypatch, tmp_path, values, Effort(8, 2, 3, 4))
    assert from_string("attack", tuned.winner) == max(ran["fine"], key=rate) == ran["coarse"][0]
    assert tuned.verdict.startswith("The defaults come first")


def test_of_lower_is_better_metrics_the_lowest_wins_and_gains_are_positive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def values(attack: Attack, _: str) -> list[float]:
        return [rate(attack) * share for share in (1.0, 1.1, 1.2, 1.3)]

    tuned, ran = searched(
        monkeypatch, tmp_path, values, Effort(8, 2, 3, 4), "secret_edit_distance", "lower"
    )
    winner = tuned.ranked[0]
    assert from_string("attack", tuned.winner) == min(ran["coarse"], key=rate)
    assert winner.gain is not None and winner.gain.low > 0
    assert tuned.verdict.startswith("The winner leaks more than the defaults on n = 4")


def test_a_winner_that_may_be_luck_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def values(attack: Attack, stage: str) -> list[float]:
        return [0.5] * 20 if rate(attack) == 0.1 else [0.0, 1.0] * 9 + [1.0, 1.0]

    tuned, _ = searched(monkeypatch, tmp_path, values, Effort(3, 10, 2, 20))
    assert tuned.verdict == "The winner is not distinguishable from the defaults at n = 20."


def test_equals_leave_the_defaults_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, _ = searched(monkeypatch, tmp_path, lambda *_: [0.5] * 4, Effort(4, 2, 2, 4))
    assert tuned.ranked[0].is_default


def test_failed_audits_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def values(attack: Attack, _: str) -> list[float]:
        return [] if rate(attack) == 0.1 else [rate(attack)] * 4

    tuned, _ = searched(monkeypatch, tmp_path, values, Effort(4, 2, 2, 4))
    assert len(tuned.ranked) == 3 and len(tuned.failures) == 2
    assert "nothing to compare" in tuned.verdict
    with pytest.raises(RunFailed, match=r"All 4 combinations failed.*failed\.txt"):
        searched(monkeypatch, tmp_path, lambda *_: [], Effort(4, 2, 2, 4))


def test_a_search_leaves_a_record_for_each_audit_and_is_not_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_tuning("tag:steps=2", [], Effort(3, 1, 1, 2), "rouge1", TINY)
    first = tune(plan, tmp_path, "cpu", Silent())
    kept = json.loads((tmp_path / "tuning.json").read_text())
    records = {
        path.stem: read_record(path) for path in tmp_path.glob("*.json") if path.stem != "tuning"
    }
    named = [
        kept["ranked"][place][stage]
        for place in range(3)
        for stage in ("coarse_record", "fine_record")
    ]
    assert set(records) == {name for name in named if name}
    assert {record.data.examples for record in records.values()} == {1, 2}
    assert kept["schema"] == "gradleak.tuning/1" and kept["winner"] == first.winner
    monkeypatch.setattr(grid, "run_audits", None)
    assert tune(plan, tmp_path, "cpu", Silent()).ranked == first.ranked


def test_the_stages_share_no_secret(tmp_path: Path) -> None:
    plan = plan_tuning("tag:steps=1", RATES, Effort(1, 2, 1, 3), "rouge1", TINY)
    tune(plan, tmp_path, "cpu", Silent())
    coarse, fine = sorted(
        (
            {secret.hash for secret in read_record(path).secrets}
            for path in tmp_path.glob("*.json")
            if path.stem != "tuning"
        ),
        key=len,
    )
    assert (len(coarse), len(fine)) == (2, 3) and not coarse & fine


def test_little_data_is_split_in_proportion(tmp_path: Path) -> None:
    data = tmp_path / "notes.csv"
    data.write_text(
        "text,label\n" + "".join(f"the cat {'is ' * place}red,0\n" for place in range(9))
    )
    plan = plan_tuning("tag", [], Effort(), "rouge2", {**TINY, "data": str(data)})
    assert (len(plan.part("coarse").load()), len(plan.part("fine").load())) == (3, 6)
    assert (
        "first 9 examples of file:path=" in plan.where_to_report()
        and "must not be reported on" in plan.where_to_report()
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,0\nb,0\n", "holds 2 examples for tuning; at least 3"),
        ("a b,0\n" * 30, "too few different texts"),
    ],
)
def test_too_little_data_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "notes.csv").write_text("text,label\n" + content)
    with pytest.raises(GradleakError, match=message):
        plan_tuning("tag", [], Effort(), "rouge2", {**TINY, "data": str(tmp_path / "notes.csv")})


def test_a_metric_that_applies_to_no_sentence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text(
        "text,label\nthe cat,0\nmy dog is red,1\nwe paid the bank,0\n"
    )
    plan = plan_tuning(
        "tag:steps=1",
        RATES,
        Effort(1),
        "secret_recall",
        {**TINY, "data": str(tmp_path / "notes.csv")},
    )
    with pytest.raises(
        GradleakError, match="secret_recall applies to none of the tuning sentences"
    ):
        tune(plan, tmp_path / "out", "cpu", Silent())
