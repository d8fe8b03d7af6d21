"""Which module of which layer leaks most: one attack on every layer × module.

The picture is that of Li, Xu and Dras (2024), Figures 2 to 4. First the cells are planned, each an
audit with a view of one part alone; then they are run, a layer in one call; then their records are
summed up as one picture's worth of numbers.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradleak.audit.client import private_examples
from gradleak.audit.ready import open_all
from gradleak.audit.spec import AuditSpec, read
from gradleak.core.attack import Display
from gradleak.core.errors import GradleakError, RunFailed, refuse_unknown
from gradleak.core.metric import Metric
from gradleak.core.parts import MODULES, WITHOUT_LAYER, number_layers, read_layers
from gradleak.core.prior import PriorSpec
from gradleak.core.specs import to_string
from gradleak.core.target import Target
from gradleak.metrics import DEFAULT_METRICS
from gradleak.records import flags
from gradleak.records.files import write_whole
from gradleak.records.judgement import judge_record
from gradleak.records.schema import AttackRecord, BatchRecord, Record, Score, now
from gradleak.records.statistics import beside_blind, measure_gain
from gradleak.records.store import check_writable
from gradleak.report.pictures.heat_map import WHOLE, Absent, HeatCell, HeatMap, Lead, draw_heat_map
from gradleak.study.cells import Cell
from gradleak.study.grid import by_group_key, only_attack, run_cells, write_result
from gradleak.views import PartsView

SCHEMA = "gradleak.map/1"
FILE, PICTURE = "map.json", "heat_map.svg"
LAYER = "layer"
Place = tuple[int, str]  # layer and module
IN_LAYERS = (WHOLE, *(module for module in MODULES if module not in WITHOUT_LAYER))


@dataclass(frozen=True)
class MapPlan:
    """What is mapped: the attack and all else the cells share (`base`), and where."""

    base: AuditSpec
    layers: str
    modules: tuple[str, ...]
    metric: str  # the one that is drawn; all are kept

    def numbers(self, target: Target) -> tuple[int, ...]:
        """The layers of the map."""
        return tuple(sorted(number_layers(self.layers, (*target.parts, *target.frozen_parts))))

    def cells(self, target: Target) -> tuple[list[Cell], list[Absent]]:
        """The cells there are, layer by layer, each an audit that sees nothing else, and those the
        model lacks or does not train; none at all is an error."""
        cells, absent = [], []
        for layer, module in itertools.product(self.numbers(target), self.modules):
            try:
                view = PartsView(str(layer), () if module == WHOLE else (module,))
                view.visible(target)
            except GradleakError as error:
                absent.append(Absent(layer, module, str(error)))
            else:
                axes = {LAYER: str(layer), "module": module}
                cells.append(Cell(axes, replace(self.base, view=view)))
        if not cells:
            raise GradleakError(f"There is nothing to map. {absent[0].reason}")
        return cells, absent


def plan_map(
    attack: str, layers: str, modules: Sequence[str], metric: str, settings: Mapping[str, Any]
) -> MapPlan:
    """A map from plain values; what is wrong with them is said before anything is opened."""
    chosen = tuple(dict.fromkeys(modules))
    check_mapped(chosen)
    read_layers(layers)
    judge = read("metric", metric, Metric)
    # The usual ones in any case: so a map drawn by another of them takes the records that are
    # there.
    metrics = [*DEFAULT_METRICS, *([] if judge.name in DEFAULT_METRICS else [judge])]
    base = AuditSpec.from_plain({**settings, "attacks": [attack], "metrics": metrics})
    return MapPlan(base, layers, chosen, judge.name)


def check_mapped(modules: Sequence[str]) -> None:
    """Refuses names that no column of a map can have."""
    if not modules:
        raise GradleakError(f"A map needs modules: write for example --modules {WHOLE},query,key.")
    for module in modules:
        if module in WITHOUT_LAYER:
            raise GradleakError(
                f"{module} lies in no layer, so it has no column in a map of layers; see it alone"
                f" with gradleak audit --modules {module}."
            )
        refuse_unknown("Unknown module", module, IN_LAYERS, "Modules of a layer")


class MapIncomplete(RunFailed):
    """Some cells failed; the map of the others is drawn, and is here."""

    def __init__(self, heat_map: HeatMap, failures: Sequence[str]) -> None:
        Exception.__init__(
            self,
            f"{len(failures)} cells of the map failed; their tracebacks are in"
            f" {', '.join(failures)}.",
        )
        self.heat_map = heat_map


def run_map(
    plan: MapPlan, folder: Path, device: str, display: Display, memory: int | None = None
) -> HeatMap:
    """Attacks the cells that have no record in the folder yet, a layer at a time; then writes
    map.json and heat_map.svg.

    Cells that the attack refuses are absent from the map; where one fails, `MapIncomplete` has the
    map of the others.
    """
    if not isinstance(plan.base.prior, PriorSpec):
        raise GradleakError(
            "A leak map is of text models: audit pictures with --layers and --modules instead."
        )
    check_writable(folder)
    private_examples(plan.base)  # refused now, not after the model is opened
    opened = open_all(plan.base, device, display)
    cells, absent = plan.cells(opened.target)
    results = run_cells(
        cells,
        folder,
        device,
        display,
        memory=memory,
        opening=lambda _: opened,
        alike=by_layer,
    )
    records, failures = {}, []
    for result in results:
        place = (int(result.cell.axes[LAYER]), result.cell.axes["module"])
        if result.record is not None:
            records[place] = result.record
            continue
        why = result.refusal or f"It failed; the traceback is in {result.failure}."
        absent.append(Absent(*place, why))
        if not result.refusal:
            failures.append(str(result.failure))
    if not records:
        raise (RunFailed if failures else GradleakError)(
            f"No cell could be attacked. {absent[-1].reason}"
        )
    heat_map = summarise(plan, opened.target, records, absent)
    write_result(folder / FILE, SCHEMA, heat_map)
    write_whole(folder / PICTURE, draw_heat_map(heat_map))
    if failures:
        raise MapIncomplete(heat_map, failures)
    return heat_map


def by_layer(cell: Cell) -> object:
    """Cells that are attacked in one call: those of one layer.

    A call computes what any of its observations shows, for all of them: a pass goes as deep as the
    deepest part. Cells of one layer share nearly all of it. Cells of two layers would pay for each
    other's.
    """
    return cell.axes[LAYER], by_group_key(cell)


Records = Mapping[Place, Record]


def summarise(plan: MapPlan, target: Target, records: Records, absent: Sequence[Absent]) -> HeatMap:
    """The map that these records make."""
    spec, first = plan.base, next(iter(records.values()))
    there = {module: rows for module in plan.modules if (rows := select_module(records, module))}
    metrics = [metric.name for metric in spec.metrics]
    overall = {
        module: {metric: pool(list(rows.values()), metric) for metric in metrics}
        for module, rows in there.items()
    }
    return HeatMap(
        created=now(),
        target=to_string(spec.target),
        data=to_string(spec.data),
        attack=to_string(spec.attacks[0]),
        metric=plan.metric,
        batches=first.data.batches,
        examples=first.data.examples,
        seed=spec.seed,
        knows=only_attack(first).knowledge,
        parameters=first.target.parameters,
        layers=plan.numbers(target),
        modules=plan.modules,
        cells=tuple(
            draw_cell(layer, module, record) for (layer, module), record in records.items()
        ),
        absent=tuple(absent),
        overall=overall,
        leads={
            metric: found
            for metric in metrics
            if (found := find_lead(there, overall, metric)) is not None
        },
    )


def draw_cell(layer: int, module: str, record: Record) -> HeatCell:
    """What is drawn of one record."""
    attack, target = only_attack(record), record.target
    return HeatCell(
        layer=layer,
        module=module,
        parameters=target.visible_parameters,
        share=target.visible_parameters / target.parameters,
        scores=attack.scores,
        search_failed=share_failed(attack),
        seconds=attack.cost.seconds,
        record=record.id,
        judgement=judge_record(record),
    )


def share_failed(attack: AttackRecord) -> float | None:
    """In which share of the batches the truth fits better than the guess; none where that cannot
    be told."""
    judged = [_has_failed(one) for one in attack.batches if one.objective_at_truth is not None]
    return sum(judged) / len(judged) if judged else None


def _has_failed(batch: BatchRecord) -> bool:
    # A record writes infinity as nothing
    at_guess = math.inf if batch.objective_at_guess is None else batch.objective_at_guess
    rounding = flags.ROUNDING if batch.objective_rounding is None else batch.objective_rounding
    return (
        flags.search_failed(
            [at_guess], [batch.objective_at_truth], [(batch.objective_unit, rounding)]
        )
        is not None
    )


def select_module(records: Records, module: str) -> dict[int, Record]:
    """The records of one module, by layer."""
    return {layer: record for (layer, of), record in records.items() if of == module}


def pool(records: Sequence[Record], metric: str) -> Score:
    """The mean over layers and examples. Layers are as they are; chance is in the client
    batches, so these are redrawn whole."""
    one = only_attack(records[0]).scores[metric]
    kept = [
        example
        for record in records
        for example in only_attack(record).examples
        if example.values[metric] is not None
    ]
    ours, blind = (
        [example.values[metric] for example in kept],
        [example.blind_values[metric] for example in kept],
    )
    n = len({(example.batch, example.position) for example in kept})
    return beside_blind(
        ours, blind, [example.batch for example in kept], one.unit, one.direction, n
    )


def find_lead(
    there: Mapping[str, Mapping[int, Record]],
    overall: Mapping[str, Mapping[str, Score]],
    metric: str,
) -> Lead | None:
    """The module that leaks most, and by how much more than the next where both are; whole
    layers do not compete."""
    merit = {module: _merit(overall[module][metric]) for module in there if module != WHOLE}
    order = sorted(
        (module for module in merit if merit[module] is not None),
        key=lambda module: -(merit[module] or 0.0),
    )
    if not order:
        return None
    if len(order) == 1:
        return Lead(order[0])
    shared = [layer for layer in there[order[0]] if layer in there[order[1]]]
    ours, theirs = (
        [one for layer in shared for one in only_attack(there[module][layer]).examples]
        for module in order[:2]
    )
    difference = measure_gain(
        [one.values[metric] for one in ours],
        [one.values[metric] for one in theirs],
        [one.batch for one in ours],
        overall[order[0]][metric].direction,
    )
    return Lead(order[0], order[1], difference)


def _merit(score: Score) -> float | None:
    return score.mean if score.mean is None or score.direction == "higher" else -score.mean
