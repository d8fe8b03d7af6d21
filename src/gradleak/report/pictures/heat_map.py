"""What a leak map holds, which of its cells are in doubt, and the sentences below it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gradleak.records.flags import FAILED_SHARE, few_examples
from gradleak.records.judgement import LEAKS, NOT_JUDGED, NOT_SHOWN, Judgement
from gradleak.records.schema import Score
from gradleak.records.statistics import Interval
from gradleak.report.numbers import mean_and_interval, number

WHOLE = "whole"  # the column of layers seen whole
NONE = "–"  # a cell that is not there
DOUBT = "? may be more: the search failed, could not be checked, or something else stands against it; its record says what."


@dataclass(frozen=True)
class HeatCell:
    """One layer and module: how much of the model is seen, and what came out."""

    layer: int
    module: str
    parameters: int
    share: float  # of the model's parameters
    scores: dict[str, Score]  # by metric
    search_failed: float | None  # share of the batches; none where the attack has no objective
    seconds: float
    record: str  # id
    judgement: Judgement | None = None  # of its record; none in a map of before there were any, whose records are not at hand

    @property
    def verdict(self) -> str:
        return NOT_JUDGED if self.judgement is None else self.judgement.verdict


@dataclass(frozen=True)
class Absent:
    """A cell that could not be attacked."""

    layer: int
    module: str
    reason: str


@dataclass(frozen=True)
class Lead:
    """The module that leaks most, the next, and by how much more over the same layers and examples."""

    first: str
    second: str | None = None
    difference: Interval | None = None


@dataclass(frozen=True)
class HeatMap:
    """A whole map, as map.json keeps it. All metrics are here; `metric` is the one drawn."""

    created: str
    target: str
    data: str
    attack: str
    metric: str
    batches: int
    examples: int
    seed: int
    knows: tuple[str, ...]
    parameters: int  # of the model
    layers: tuple[int, ...]
    modules: tuple[str, ...]
    cells: tuple[HeatCell, ...]
    absent: tuple[Absent, ...] = ()
    overall: dict[str, dict[str, Score]] = field(default_factory=dict)  # by module and metric, over all layers
    leads: dict[str, Lead] = field(default_factory=dict)  # by metric

    def at(self, layer: int, module: str) -> HeatCell | None:
        """The cell of a layer and module, if it is there."""
        return next((cell for cell in self.cells if (cell.layer, cell.module) == (layer, module)), None)

    def of(self, module: str) -> list[HeatCell]:
        """The cells of one module."""
        return [cell for cell in self.cells if cell.module == module]

    def leak(self, score: Score | None) -> float | None:
        """How much a score of the drawn metric leaks: 0 nothing, 1 everything, or the least and most of this map."""
        if score is None or score.mean is None:
            return None
        low, high = (0.0, 1.0) if score.unit == "fraction" else self._range()
        height = (score.mean - low) / (high - low) if high > low else 1.0
        return min(max(height if score.direction == "higher" else 1 - height, 0.0), 1.0)

    def in_doubt(self, cell: HeatCell) -> bool:
        """Whether the attack rather than the view may be why no more came out."""
        return cell.judgement is None or cell.judgement.may_be_more

    def _range(self) -> tuple[float, float]:
        means = [cell.scores[self.metric].mean for cell in self.cells]
        there = [mean for mean in means if mean is not None]
        return min(there), max(there)


def text_of(heat_map: HeatMap, cell: HeatCell | None) -> str:
    """`88.1`, `3.2?` where that is in doubt, a dash where there is no cell."""
    score = cell.scores.get(heat_map.metric) if cell else None
    if cell is None or score is None or score.mean is None:
        return NONE
    return number(score.mean, score.unit) + ("?" if heat_map.in_doubt(cell) else "")


def heading(heat_map: HeatMap) -> str:
    """All that was held fixed."""
    told = ", ".join(heat_map.knows) or "nothing"
    return (
        f"target {heat_map.target} · data {heat_map.data} · attack {heat_map.attack} · n = {heat_map.examples} in "
        f"{heat_map.batches} batches · told {told} · seed {heat_map.seed}"
    )


def parameters_of(heat_map: HeatMap, module: str) -> tuple[str, str]:
    """How many parameters a layer's module has and their share of the model; a range where layers differ."""
    cells = sorted(heat_map.of(module), key=lambda cell: cell.parameters)
    if not cells:
        return NONE, NONE
    counts = dict.fromkeys(f"{cell.parameters:,}" for cell in (cells[0], cells[-1]))
    shares = dict.fromkeys(f"{100 * cell.share:.2f}" for cell in (cells[0], cells[-1]))
    return "–".join(counts), "–".join(shares) + " %"


def conclusions(heat_map: HeatMap) -> Iterator[str]:
    """Who leaks most and how sure that is, whole layers for comparison, where the search failed."""
    if all(cell.scores[heat_map.metric].mean is None for cell in heat_map.cells):
        yield f"{heat_map.metric} applies to none of these examples: choose another --metric."
        return
    yield from _leader(heat_map)
    if WHOLE in heat_map.overall:
        score = heat_map.overall[WHOLE][heat_map.metric]
        yield f"Whole layers: {mean_and_interval(score)}, with {parameters_of(heat_map, WHOLE)[1]} of the parameters each."
    yield from _failures(heat_map)
    few = few_examples(heat_map.examples)
    if few is not None:
        yield few.detail
    for module, absent in {one.module: one for one in reversed(heat_map.absent)}.items():
        layers = sum(one.module == module for one in heat_map.absent)
        yield f"{NONE} {module}, in {layers} of {len(heat_map.layers)} layers: {absent.reason}"


def _leader(heat_map: HeatMap) -> Iterator[str]:
    lead = heat_map.leads.get(heat_map.metric)
    if lead is None:
        return
    score = heat_map.overall[lead.first][heat_map.metric]
    layers, share = len(heat_map.of(lead.first)), parameters_of(heat_map, lead.first)[1]
    over = f"mean of {layers} layer{'s' if layers > 1 else ''}, each with {share} of the parameters"
    blind = f"blind {number(score.blind, score.unit)}"
    leaks = any(cell.verdict == LEAKS for cell in heat_map.of(lead.first))
    most = "leaks most" if leaks else "scores highest, and no layer of it is shown to leak"
    yield f"{lead.first} {most}: {heat_map.metric} {mean_and_interval(score)}, {blind}, {over}."
    yield _verdicts(heat_map)
    if lead.difference is not None:
        ends = f"[{number(lead.difference.low, score.unit)}, {number(lead.difference.high, score.unit)}]"
        by = f"That is {number(lead.difference.mean, score.unit)} {ends} more than {lead.second}, the next"
        yield f"{by}." if lead.difference.low > 0 else f"{by}: chance may have put it first."


def _verdicts(heat_map: HeatMap) -> str:
    """`5 of 12 views leak; 4 not shown either way; 3 could not be judged.`"""
    words = [cell.verdict for cell in heat_map.cells]
    others = {"not shown either way": words.count(NOT_SHOWN), "could not be judged": words.count(NOT_JUDGED)}
    told = [f"{words.count(LEAKS)} of {len(words)} views leak", *(f"{count} {word}" for word, count in others.items() if count)]
    return "; ".join(told) + "."


def _failures(heat_map: HeatMap) -> Iterator[str]:
    told = [cell for cell in heat_map.cells if cell.search_failed is not None]
    if not told:
        yield "This attack has no objective, so that a failed search cannot be told from a view that hides."
        return
    failed = [cell for cell in told if (cell.search_failed or 0.0) >= FAILED_SHARE]
    if failed:
        where = f"in {len(failed)} of {len(told)} cells"
        yield f"The search failed in at least {FAILED_SHARE:.0%} of the batches {where}: these are lower bounds."
    if any(heat_map.in_doubt(cell) for cell in heat_map.cells):
        yield DOUBT
