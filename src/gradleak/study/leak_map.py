"""Which module of which layer leaks most: one attack on every layer × module.

The picture is that of Li, Xu and Dras (2024), Figures 2 to 4. First the cells are planned, each an
audit with a view of one part alone; then they are run, a layer in one call; then their records are
summed up as one picture's worth of numbers.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradleak.audit.client import private_examples
from gradleak.audit.display import Display
from gradleak.audit.spec import AuditSpec, read
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.core.metric import Metric
from gradleak.core.parts import MODULES, WITHOUT_LAYER, Part, numbered, read_layers
from gradleak.core.prior import PriorSpec
from gradleak.core.registry import did_you_mean
from gradleak.core.specs import to_string
from gradleak.core.target import Target
from gradleak.metrics import DEFAULT_METRICS
from gradleak.records import flags
from gradleak.records.files import write_whole
from gradleak.records.judgement import judge_record
from gradleak.records.plain import to_plain
from gradleak.records.schema import AttackRecord, BatchRecord, ExampleRecord, Record, Score, now
from gradleak.records.scores import beside_blind
from gradleak.records.statistics import Interval, paired_difference
from gradleak.records.store import check_writable
from gradleak.report.pictures.heat_map import WHOLE, Absent, HeatCell, HeatMap, Lead, draw_heat_map
from gradleak.study.cells import Cell
from gradleak.study.grid import by_group_key, run_cells
from gradleak.views import Parts

MAPPED = (WHOLE, "query", "key", "value", "attention_output", "ffn_in", "ffn_out")
IN_LAYERS = (WHOLE, *(module for module in MODULES if module not in WITHOUT_LAYER))


@dataclass(frozen=True, eq=False)
class MapCell:
    """One layer and module, with the audit that sees nothing else."""

    layer: int
    module: str
    spec: AuditSpec
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class MapPlan:
    """What is mapped: the attack and all else the cells share (`base`), and where."""

    base: AuditSpec
    layers: str
    modules: tuple[str, ...]
    metric: str  # the one that is drawn; all are kept

    def numbers(self, target: Target) -> tuple[int, ...]:
        """The layers of the map."""
        return tuple(sorted(numbered(self.layers, (*target.parts, *target.frozen_parts))))

    def cells(self, target: Target) -> tuple[list[MapCell], list[Absent]]:
        """The cells there are, layer by layer, and those the model lacks or does not train; none
        at all is an error."""
        cells, absent = [], []
        for layer in self.numbers(target):
            for module in self.modules:
                try:
                    cells.append(self._cell(target, layer, module))
                except GradleakError as error:
                    absent.append(Absent(layer, module, str(error)))
        if not cells:
            raise GradleakError(f"There is nothing to map. {absent[0].reason}")
        return cells, absent

    def _cell(self, target: Target, layer: int, module: str) -> MapCell:
        view = Parts(str(layer), () if module == WHOLE else (module,))
        seen = tuple(target.part(name) for name in view.visible(target))
        return MapCell(layer, module, replace(self.base, view=view), seen)


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
        if module not in IN_LAYERS:
            near = did_you_mean(module, list(IN_LAYERS))
            raise GradleakError(
                f"Unknown module {module!r}{near} Modules of a layer: {', '.join(IN_LAYERS)}."
            )


SCHEMA = "gradleak.map/1"
FILE, PICTURE = "map.json", "heat_map.svg"
LAYER = "layer"


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
    display.say(f"Opening {to_string(plan.base.target)} on {device}")
    target = plan.base.target.open(torch.device(device), getattr(torch, plan.base.dtype))
    opened = (target, plan.base.prior.open(target))
    cells, absent = plan.cells(target)
    results = run_cells(
        [Cell({LAYER: str(cell.layer), "module": cell.module}, cell.spec) for cell in cells],
        folder,
        device,
        display,
        memory=memory,
        opened=lambda _: opened,
        alike=by_layer,
    )
    records, failures = {}, []
    for cell, result in zip(cells, results, strict=True):
        if result.record is not None:
            records[cell.layer, cell.module] = result.record
            continue
        absent.append(
            Absent(
                cell.layer,
                cell.module,
                result.refusal or f"It failed; the traceback is in {result.failure}.",
            )
        )
        if not result.refusal:
            failures.append(str(result.failure))
    if not records:
        raise (RunFailed if failures else GradleakError)(
            f"No cell could be attacked. {absent[-1].reason}"
        )
    heat_map = summarise(plan, target, records, absent)
    write_map(folder, heat_map)
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


def write_map(folder: Path, heat_map: HeatMap) -> None:
    """Writes map.json and heat_map.svg, each whole or not at all."""
    plain = {"schema": SCHEMA, **to_plain(heat_map)}
    write_whole(
        folder / FILE, json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )
    write_whole(folder / PICTURE, draw_heat_map(heat_map))


Records = Mapping[tuple[int, str], Record]  # by layer and module


def summarise(plan: MapPlan, target: Target, records: Records, absent: Sequence[Absent]) -> HeatMap:
    """The map that these records make."""
    spec, first = plan.base, next(iter(records.values()))
    there = {module: rows for module in plan.modules if (rows := column(records, module))}
    metrics = [metric.name for metric in spec.metrics]
    overall = {
        module: {metric: pooled(list(rows.values()), metric) for metric in metrics}
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
        knows=only(first).knowledge,
        parameters=first.target.parameters,
        layers=plan.numbers(target),
        modules=plan.modules,
        cells=tuple(cell(layer, module, record) for (layer, module), record in records.items()),
        absent=tuple(absent),
        overall=overall,
        leads={
            metric: found
            for metric in metrics
            if (found := lead(there, overall, metric)) is not None
        },
    )


def cell(layer: int, module: str, record: Record) -> HeatCell:
    """What is drawn of one record."""
    attack, target = only(record), record.target
    return HeatCell(
        layer=layer,
        module=module,
        parameters=target.visible_parameters,
        share=target.visible_parameters / target.parameters,
        scores=attack.scores,
        search_failed=failed_share(attack),
        seconds=attack.cost.seconds,
        record=record.id,
        judgement=judge_record(record),
    )


def failed_share(attack: AttackRecord) -> float | None:
    """In which share of the batches the truth fits better than the guess; none where that cannot
    be told."""
    judged = [one for one in attack.batches if one.objective_at_truth is not None]
    failed = [one for one in judged if _has_failed(one)]
    return len(failed) / len(judged) if judged else None


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


def column(records: Records, module: str) -> dict[int, Record]:
    """The records of one module, by layer."""
    return {layer: record for (layer, of), record in records.items() if of == module}


def pooled(records: Sequence[Record], metric: str) -> Score:
    """The mean over layers and examples. Layers are as they are; chance is in the client
    batches, so these are redrawn whole."""
    one = only(records[0]).scores[metric]
    kept = [
        example
        for record in records
        for example in only(record).examples
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


def lead(
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
    pairs = [
        (ours, theirs)
        for layer in shared
        for ours, theirs in zip(
            *(only(there[module][layer]).examples for module in order[:2]), strict=True
        )
        if ours.values[metric] is not None and theirs.values[metric] is not None
    ]
    return Lead(
        order[0],
        order[1],
        _difference(pairs, metric, overall[order[0]][metric].direction) if pairs else None,
    )


def only(record: Record) -> AttackRecord:
    """The one attack of a cell."""
    (attack,) = record.attacks.values()
    return attack


def _difference(
    pairs: Sequence[tuple[ExampleRecord, ExampleRecord]], metric: str, direction: str
) -> Interval:
    ours, theirs = ([pair[side].values[metric] or 0.0 for pair in pairs] for side in (0, 1))
    groups = [pair[0].batch for pair in pairs]
    return (
        paired_difference(ours, theirs, groups)
        if direction == "higher"
        else paired_difference(theirs, ours, groups)
    )


def _merit(score: Score) -> float | None:
    return score.mean if score.mean is None or score.direction == "higher" else -score.mean
