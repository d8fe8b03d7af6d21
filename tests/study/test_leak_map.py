"""A map is the audits of its cells, run together: the same updates, the same draws, the same
records."""

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradleak.attacks.blind import Blind
from gradleak.audit import run_audit
from gradleak.audit.group import AuditGroup
from gradleak.audit.runner import run_audits
from gradleak.cli.map import MODULES
from gradleak.core.attack import Attack, Bench, Reconstruction, Silent
from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.records.run_folder import claim
from gradleak.records.store import read_record
from gradleak.report.pictures.heat_map import WHOLE, HeatMap
from gradleak.study import grid
from gradleak.study.leak_map import MapIncomplete, MapPlan, plan_map, run_map
from gradleak.targets.tiny import Tiny

TINY = {
    "target": "tiny",
    "data": "canaries",
    "limit": 2,
    "prior": "frequent_words",
    "dtype": "float64",
}
TAG = "tag:steps=2"
NOISE = "gaussian_noise:std=0.01"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class MatricesOnly(Attack):
    """Guesses blindly, and refuses to where no matrix is seen."""

    kind, name = "attack", "matrices_only"

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        return Blind().reconstruct(observations, bench)

    def objective(self, observations: Sequence[Observation], batches: Sequence[Batch]) -> Tensor:
        if all(tensor.ndim < 3 for one in observations for tensor in one.update.tensors.values()):
            raise GradleakError("No matrix is seen.")
        return torch.zeros(len(observations))


MAPPED = MODULES.split(",")


def planned(
    modules: Sequence[str] = MAPPED, attack: str = TAG, layers: str = "all", **settings: Any
) -> MapPlan:
    return plan_map(attack, layers, modules, "rouge1", TINY | settings)


def for_matrices(plan: MapPlan) -> MapPlan:
    return replace(plan, base=replace(plan.base, attacks=(MatricesOnly(),)))


def mapped(plan: MapPlan, folder: Path) -> HeatMap:
    return run_map(plan, folder, "cpu", Silent())


@pytest.fixture(scope="module")
def whole_map(tmp_path_factory: pytest.TempPathFactory) -> tuple[MapPlan, HeatMap, Path]:
    """Every layer and module of tiny."""
    plan, folder = planned(), tmp_path_factory.mktemp("map")
    return plan, mapped(plan, folder), folder


def test_every_layer_and_module_has_a_cell_and_a_record(
    whole_map: tuple[MapPlan, HeatMap, Path],
) -> None:
    _, heat_map, folder = whole_map
    assert [(cell.layer, cell.module) for cell in heat_map.cells] == [
        (layer, module) for layer in (1, 2) for module in MAPPED
    ]
    assert {path.stem for path in folder.glob("*.json")} == {
        "map",
        *(cell.record for cell in heat_map.cells),
    }
    assert not heat_map.absent
    for cell in heat_map.cells:
        record = read_record(folder / f"{cell.record}.json")
        assert record.target.visible_parameters == cell.parameters and record.data.batches == 2


def test_a_cell_is_the_audit_of_its_view(
    whole_map: tuple[MapPlan, HeatMap, Path], tiny64: Target
) -> None:
    plan, heat_map, folder = whole_map
    for cell in (plan.cells(tiny64)[0][place] for place in (0, 8)):
        alone, (ours,) = (
            run_audit(cell.spec).record,
            read_record(folder / f"{cell.spec.id}.json").attacks.values(),
        )
        (theirs,) = alone.attacks.values()
        assert ours.examples == theirs.examples
        assert ours.flags == theirs.flags
        assert [one.loss for one in ours.batches] == pytest.approx(
            [one.loss for one in theirs.batches]
        )
        assert heat_map.at(int(cell.axes["layer"]), cell.axes["module"]).scores == alone.worst_case  # type: ignore[union-attr]


def test_what_is_finished_is_not_computed_again(
    whole_map: tuple[MapPlan, HeatMap, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, first, folder = whole_map
    copy = shutil.copytree(folder, tmp_path / "copy")
    monkeypatch.setattr(grid, "run_audits", None)
    again = mapped(plan, copy)
    assert (again.cells, again.overall, again.leads) == (first.cells, first.overall, first.leads)
    other = plan_map(TAG, "2", ["query", "whole"], "rouge2", TINY)
    assert mapped(other, copy).at(2, "query") == first.at(2, "query")


def test_an_interrupted_map_goes_on_after_its_last_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, ran = planned(("query", "key")), []

    def audits(specs: Any, **rest: Any) -> Any:
        ran.append(specs[0].view.layers)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return run_audits(specs, **rest)

    monkeypatch.setattr(grid, "run_audits", audits)
    with pytest.raises(KeyboardInterrupt):
        mapped(plan, tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 2 and not (tmp_path / "map.json").exists()
    assert len(mapped(plan, tmp_path).cells) == 4
    assert ran == ["1", "2", "2"]


def test_batches_that_do_not_fit_together_give_the_same_map(
    whole_map: tuple[MapPlan, HeatMap, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, together, _ = whole_map
    monkeypatch.setattr(AuditGroup, "_count_batches_at_once", lambda _: 1)
    apart = mapped(planned(("query",), layers="1"), tmp_path)
    assert apart.at(1, "query").scores == together.at(1, "query").scores  # type: ignore[union-attr]


def test_cells_of_one_layer_are_attacked_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def audits(specs: Any, **rest: Any) -> Any:
        calls.append([(spec.view.layers, *spec.view.modules) for spec in specs])
        return run_audits(specs, **rest)

    monkeypatch.setattr(grid, "run_audits", audits)
    mapped(planned(("whole", "query"), attack="blind"), tmp_path)
    assert calls == [[("1",), ("1", "query")], [("2",), ("2", "query")]]


def test_a_cell_that_another_run_works_on_is_left_to_it(
    tiny64: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(("query", "key"), attack="blind", layers="1")
    (first, _), _ = plan.cells(tiny64)
    seen: list[list[str]] = []

    def audits(specs: Any, **rest: Any) -> Any:
        seen.append([spec.id for spec in specs])
        elsewhere.close()  # the other run gives its claim back meanwhile
        return run_audits(specs, **rest)

    monkeypatch.setattr(grid, "run_audits", audits)
    with contextlib.ExitStack() as elsewhere:
        assert elsewhere.enter_context(claim(tmp_path, first.spec.id))
        assert len(mapped(plan, tmp_path).cells) == 2
    # After the other cells, since the other run had not finished it
    assert seen[1:] == [[first.spec.id]]


def test_a_cell_that_fails_leaves_its_traceback_and_the_others_a_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def audits(specs: Any, **rest: Any) -> Any:
        if any("key" in spec.view.modules for spec in specs):
            raise RuntimeError("out of luck")
        return run_audits(specs, **rest)

    monkeypatch.setattr(grid, "run_audits", audits)
    with pytest.raises(MapIncomplete, match="1 cells of the map failed") as failed:
        mapped(planned(("query", "key"), attack="blind", layers="1"), tmp_path)
    assert failed.value.exit_code == 3 and [
        cell.module for cell in failed.value.heat_map.cells
    ] == ["query"]
    (absent,) = failed.value.heat_map.absent
    (failure,) = tmp_path.glob("*.failed.txt")
    assert absent.reason == f"It failed; the traceback is in {failure}."
    assert "out of luck" in failure.read_text() and (tmp_path / "map.json").exists()


def test_what_does_not_train_or_is_of_no_use_is_absent_and_not_an_error(tmp_path: Path) -> None:
    heat_map = mapped(
        for_matrices(
            planned(("query", "layernorm"), target={"name": "tiny", "frozen": ["layers:1"]})
        ),
        tmp_path,
    )
    assert [(cell.layer, cell.module) for cell in heat_map.cells] == [(2, "query")]
    reasons = {(one.layer, one.module): one.reason for one in heat_map.absent}
    assert set(reasons) == {(1, "query"), (1, "layernorm"), (2, "layernorm")}
    assert "is frozen" in reasons[1, "query"] and reasons[2, "layernorm"] == "No matrix is seen."
    with pytest.raises(GradleakError, match="No cell could be attacked. No matrix is seen."):
        mapped(for_matrices(planned(("layernorm",))), tmp_path)


def test_a_model_without_any_of_it_is_refused() -> None:
    frozen = Tiny(frozen=("layers:all",)).open(CPU)
    with pytest.raises(GradleakError, match="There is nothing to map. Nothing of query trains"):
        planned(("query",)).cells(frozen)


def test_the_map_file_holds_every_metric_of_every_cell(
    whole_map: tuple[MapPlan, HeatMap, Path],
) -> None:
    plan, heat_map, folder = whole_map
    kept = json.loads((folder / "map.json").read_text())
    assert kept["schema"] == "gradleak.map/1" and kept["metric"] == "rouge1"
    assert len(kept["cells"]) == 14
    for cell in kept["cells"]:
        assert {"rouge1", "rouge2", "exact_match"} <= set(cell["scores"]) and cell["seconds"] > 0
        assert cell["share"] == pytest.approx(cell["parameters"] / kept["parameters"])
    assert set(kept["leads"]) <= {metric.name for metric in plan.base.metrics}
    first = heat_map.leads["rouge1"].first
    means = {
        module: scores["rouge1"].mean
        for module, scores in heat_map.overall.items()
        if module != WHOLE
    }
    assert first == max(means, key=lambda module: means[module] or 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules": ["querry"]}, r"Unknown module 'querry' \(did you mean 'query'\?\)"),
        ({"modules": ["hole"]}, r"did you mean 'whole'"),
        ({"modules": ["head"]}, "head lies in no layer"),
        ({"modules": []}, "A map needs modules"),
        ({"layers": "3-1"}, "Layers are written as"),
        ({"metric": "rouge3"}, "Unknown metric 'rouge3'"),
        ({"attack": "tagg"}, "Unknown attack 'tagg'"),
    ],
)
def test_bad_plans_are_refused_before_anything_is_opened(
    changes: dict[str, Any], message: str
) -> None:
    usual = {"attack": TAG, "layers": "all", "modules": ["query"], "metric": "rouge1"}
    with pytest.raises(GradleakError, match=message):
        plan_map(**(usual | changes), settings=TINY)
