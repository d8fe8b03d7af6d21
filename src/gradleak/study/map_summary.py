"""The records of a map as one picture's worth of numbers: cells, modules over all layers, and
who leaks most."""

import math
from collections.abc import Mapping, Sequence

from gradleak.core.specs import to_string
from gradleak.core.target import Target
from gradleak.records import flags
from gradleak.records.judgement import judge_record
from gradleak.records.schema import AttackRecord, BatchRecord, ExampleRecord, Record, Score, now
from gradleak.records.scores import beside_blind
from gradleak.records.statistics import Interval, paired_difference
from gradleak.report.pictures.heat_map import WHOLE, Absent, HeatCell, HeatMap, Lead
from gradleak.study.map_cells import MapPlan

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
