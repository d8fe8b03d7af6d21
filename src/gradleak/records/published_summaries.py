"""Published cells as summaries of records: tables are drawn from them as from a run. Scores and
flags are computed anew."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from gradleak.records import flags
from gradleak.records.flags import RaisedFlag
from gradleak.records.published import (
    GAIN,
    SUFFIX,
    Mark,
    MetricKind,
    Published,
    PublishedBatch,
    PublishedCell,
    Tallied,
    add_up,
    against_blind,
    cell_column,
    read_published,
)
from gradleak.records.schema import (
    AttackRecord,
    CostRecord,
    DataRecord,
    GuaranteeRecord,
    NoiseRecord,
    Record,
    Score,
    TargetRecord,
)
from gradleak.records.statistics import beside_blind, paired_difference, score_of
from gradleak.records.store import Columns, Summary, read_summaries

# In the order in which an audit raises them. Those of no rule here hold of the whole cell if any
# source raised them.
ORDER = (
    *(
        "search_failed",
        "other_answer_fits",
        "few_examples",
        "generous_knowledge",
        "dead_gradient",
        "no_objective",
    ),
    *(
        "unmodelled_dropout",
        "near_chance",
        "not_adaptive",
        "one_draw",
        "seen_before_defense",
        "member_failed",
    ),
    "member_out_of_time",
)


def read_sources(paths: Sequence[Path]) -> list[Summary]:
    """Summaries of runs and of published files; what files know of one study adds up."""
    found: list[Summary] = []
    files: dict[str, list[tuple[Path, Published]]] = {}
    for path in paths:
        if path.suffix == SUFFIX:
            known = read_published(path)
            files.setdefault(known.study, []).append((path, known))
        else:
            found += read_summaries(path)
    for group in files.values():
        found += summaries_of(add_up([known for _, known in group]), group[0][0])
    return found


def summaries_of(published: Published, path: Path) -> list[Summary]:
    """One summary a cell; `path` is the file it comes from."""
    return [_summary(cell, path) for cell in published.cells]


def _summary(cell: PublishedCell, path: Path) -> Summary:
    name, newest = str(cell.attack["name"]), cell.sources[-1]
    numbers = dict(zip(dict.fromkeys(batch.rows for batch in cell.batches), count(), strict=False))
    batches = len({rows for rows, _ in cell.keys})
    machines = {_machine(source.machine) for source in cell.sources}
    attack = AttackRecord(
        spec=dict(cell.attack),
        scores={kind.name: _score(cell, kind) for kind in cell.metrics},
        knowledge=cell.knowledge,
        flags=_flags(cell, batches * cell.batch_size),
        cost=_cost(cell),
        version=cell.version,
    )
    record = Record(
        created=newest.created,
        spec=_spec(cell, batches),
        versions=dict(newest.versions),
        machine={**newest.machine, "name": " and ".join(sorted(machines))},
        data=DataRecord("", batches, batches * cell.batch_size),
        target=TargetRecord(**cell.model),
        secrets=(),
        attacks={name: attack},
        worst_case={},
        guarantees=tuple(GuaranteeRecord(**one) for one in cell.guarantees),
        noise=_noise(cell),
    )
    columns = Columns(
        tuple(map(numbers.__getitem__, _clusters(cell))),
        {kind.name: cell_column(cell, kind.name) for kind in cell.metrics},
        {kind.name: cell_column(cell, kind.name, blind=True) for kind in cell.metrics},
    )
    return Summary(path, record, {name: columns})


def _spec(cell: PublishedCell, batches: int) -> dict[str, Any]:
    """The audit that would have attacked all these batches; in the order that specs have, for
    whoever prints one."""
    limit, attacks = {"limit": batches}, {"attacks": [dict(cell.attack)]}
    found: dict[str, Any] = {}
    for key, value in cell.setting.items():
        found |= {key: value} | (limit if key == "data" else {})
    return found | limit | attacks


def _score(cell: PublishedCell, kind: MetricKind) -> Score:
    if cell.tallied is None:
        ours, theirs = (cell_column(cell, kind.name, blind=blind) for blind in (False, True))
        return beside_blind(ours, theirs, _clusters(cell), kind.unit, kind.direction)
    found, chance = (
        None if one is None else one.interval()
        for one in (cell.tallied.values.get(kind.name), cell.tallied.blind.get(kind.name))
    )
    return score_of(found, chance, kind.unit, kind.direction)


def _clusters(cell: PublishedCell) -> list[tuple[int, ...]]:
    """The batch of each example."""
    return [batch.rows for batch in cell.batches for _ in batch.rows]


def _flags(cell: PublishedCell, examples: int) -> tuple[RaisedFlag, ...]:
    """By the rules of an audit, over all batches."""
    said = Counter(flag for source in cell.sources for flag in source.flags)
    marks = _marks(cell)
    compared = sum(count for mark, count in marks.items() if mark & Mark.COMPARED)
    by_rule = {
        "search_failed": _share(marks, Mark.SEARCH_FAILED, compared) >= flags.FAILED_SHARE,
        "other_answer_fits": _share(marks, Mark.OTHER_FITS, compared) >= flags.FAILED_SHARE,
        "dead_gradient": _share(marks, Mark.DEAD, sum(marks.values())) >= flags.DEAD_SHARE,
        "few_examples": flags.few_examples(examples) is not None,
        "near_chance": _near_chance(cell, marks),
        "no_objective": said["no_objective"] == len(cell.sources),
    }
    names = dict.fromkeys([*ORDER, *said])
    return tuple(RaisedFlag(name, "") for name in names if by_rule.get(name, said[name] > 0))


def _share(marks: Mapping[Mark, int], wanted: Mark, of: int) -> float:
    return sum(count for mark, count in marks.items() if mark & wanted) / of if of else 0.0


def _marks(cell: PublishedCell) -> dict[Mark, int]:
    counted = Counter(batch.marks for batch in cell.batches)
    if cell.tallied is not None:
        counted += Counter({Mark(mark): count for mark, count in cell.tallied.marks.items()})
    return dict(counted)


def _near_chance(cell: PublishedCell, marks: Mapping[Mark, int]) -> bool:
    if any(mark & Mark.BEYOND_LUCK for mark in marks):
        return False
    if cell.tallied is not None:
        gained = cell.tallied.blind.get(GAIN)
        return gained is not None and gained.interval().low <= 0
    pairs = against_blind(cell)
    return pairs is not None and paired_difference(*pairs, _clusters(cell)).low <= 0


def _cost(cell: PublishedCell) -> CostRecord:
    parts: list[PublishedBatch | Tallied] = [*cell.batches]
    parts += [cell.tallied] if cell.tallied else []
    peaks = [one.peak_memory_bytes for one in cell.sources if one.peak_memory_bytes is not None]
    return CostRecord(
        sum(part.seconds for part in parts),
        sum(part.steps for part in parts),
        max(peaks, default=None),
    )


def _noise(cell: PublishedCell) -> NoiseRecord | None:
    """The median over the batches; their mean where there are only sums of them."""
    if cell.tallied is not None and cell.tallied.noise is not None:
        sums = cell.tallied.noise
        return NoiseRecord(sums.total / sums.n, sums.low, sums.high, {})
    noises = [batch.noise for batch in cell.batches if batch.noise is not None]
    return NoiseRecord(statistics.median(noises), min(noises), max(noises), {}) if noises else None


def _machine(machine: Mapping[str, Any]) -> str:
    return str(machine.get("name") or machine.get("device", "unknown"))
