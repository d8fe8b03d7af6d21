"""A leak map: what it holds, which cells are in doubt, what may be concluded, and its picture."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gradleak.records.flags import FAILED_SHARE, few_examples
from gradleak.records.judgement import LEAKS, NOT_JUDGED, Judgement
from gradleak.records.schema import Score
from gradleak.records.statistics import Interval
from gradleak.report.numbers import write_count, write_interval, write_number
from gradleak.report.pictures.svg import (
    LINE,
    STOPS,
    HeatBox,
    HeatGrid,
    draw_picture,
    draw_small_print,
    draw_text,
    mix_paper,
    wrap_sentence,
)
from gradleak.report.verdict import count_others

WHOLE = "whole"  # the column of layers seen whole
NONE = "–"  # a cell that is not there
DOUBT = (
    "? may be more: the search failed, could not be checked, or something else stands "
    "against it; its record says what."
)
GRID = HeatGrid(left=96, top=66, width=116, height=34)


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
    judgement: Judgement | None = (
        None  # of its record; none in a map of before there were any, whose records are not at hand
    )

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
    """The module that leaks most, the next, and by how much more, both on the same examples."""

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
    overall: dict[str, dict[str, Score]] = field(
        default_factory=dict
    )  # by module and metric, over all layers
    leads: dict[str, Lead] = field(default_factory=dict)  # by metric

    def at(self, layer: int, module: str) -> HeatCell | None:
        """Returns the cell of a layer and module, if it is there."""
        return next(
            (cell for cell in self.cells if (cell.layer, cell.module) == (layer, module)), None
        )

    def of(self, module: str) -> list[HeatCell]:
        """Returns the cells of one module."""
        return [cell for cell in self.cells if cell.module == module]

    def leak(self, score: Score | None) -> float | None:
        """Returns how much a score of the drawn metric leaks: 0 nothing, 1 everything.

        Without a scale of its own, 0 and 1 are the least and the most of this map.
        """
        if score is None or score.mean is None:
            return None
        means = [cell.scores[self.metric].mean for cell in self.cells]
        ends = [0.0, 1.0] if score.unit == "fraction" else [one for one in means if one is not None]
        low, high = min(ends), max(ends)
        height = (score.mean - low) / (high - low) if high > low else 1.0
        return min(max(height if score.direction == "higher" else 1 - height, 0.0), 1.0)

    def in_doubt(self, cell: HeatCell) -> bool:
        """Whether the attack rather than the view may be why no more came out."""
        return cell.judgement is None or cell.judgement.may_be_more


def write_score(heat_map: HeatMap, cell: HeatCell | None) -> str:
    """Writes `88.1`, `3.2?` where that is in doubt, a dash where there is no cell."""
    score = cell.scores.get(heat_map.metric) if cell else None
    if cell is None or score is None or score.mean is None:
        return NONE
    return write_number(score.mean, score.unit) + ("?" if heat_map.in_doubt(cell) else "")


def describe_setup(heat_map: HeatMap) -> str:
    """Describes all that was held fixed."""
    return (
        f"target {heat_map.target} · data {heat_map.data} · attack {heat_map.attack} · n = "
        f"{heat_map.examples} in {heat_map.batches} batches · told "
        f"{', '.join(heat_map.knows) or 'nothing'} · seed {heat_map.seed}"
    )


def count_parameters(heat_map: HeatMap, module: str) -> tuple[str, str]:
    """Counts the parameters of a layer's module, with their share of the model.

    Where layers differ, both are ranges.
    """
    cells = sorted(heat_map.of(module), key=lambda cell: cell.parameters)
    if not cells:
        return NONE, NONE
    ends = (cells[0], cells[-1])
    counts = dict.fromkeys(f"{cell.parameters:,}" for cell in ends)
    shares = dict.fromkeys(f"{100 * cell.share:.2f}" for cell in ends)
    return "–".join(counts), "–".join(shares) + " %"


def conclude(heat_map: HeatMap) -> Iterator[str]:
    """Says who leaks most and how sure that is, and where the search failed."""
    if all(cell.scores[heat_map.metric].mean is None for cell in heat_map.cells):
        yield f"{heat_map.metric} applies to none of these examples: choose another --metric."
        return
    yield from _name_leader(heat_map)
    if WHOLE in heat_map.overall:
        yield (
            f"Whole layers: {write_interval(heat_map.overall[WHOLE][heat_map.metric])}, with "
            f"{count_parameters(heat_map, WHOLE)[1]} of the parameters each."
        )
    yield from _name_failures(heat_map)
    if few := few_examples(heat_map.examples):
        yield few.detail
    # `– ffn_in in 2 of 2 layers, query in 1 of 2: …`, each reason once
    for reason in dict.fromkeys(one.reason for one in heat_map.absent):
        modules = [one.module for one in heat_map.absent if one.reason == reason]
        first, *others = [
            f"{module} in {modules.count(module)} of {len(heat_map.layers)}"
            for module in heat_map.modules
            if module in modules
        ]
        yield f"{NONE} {', '.join([f'{first} layers', *others])}: {reason}"


def _name_leader(heat_map: HeatMap) -> Iterator[str]:
    lead = heat_map.leads.get(heat_map.metric)
    if lead is None:
        return
    score, cells = heat_map.overall[lead.first][heat_map.metric], heat_map.of(lead.first)
    leaks = any(cell.verdict == LEAKS for cell in cells)
    most = "leaks most" if leaks else "scores highest, and no layer of it is shown to leak"
    yield (
        f"{lead.first} {most}: {heat_map.metric} {write_interval(score)}, blind "
        f"{write_number(score.blind, score.unit)}, mean of "
        f"{write_count(len(cells), 'layer', 'layers')}, each with "
        f"{count_parameters(heat_map, lead.first)[1]} of the parameters."
    )
    if lead.difference is not None:
        mean, low, high = (
            write_number(value, score.unit)
            for value in (lead.difference.mean, lead.difference.low, lead.difference.high)
        )
        by = f"That is {mean} [{low}, {high}] more than {lead.second}, the next"
        yield f"{by}." if lead.difference.low > 0 else f"{by}: chance may have put it first."
    verdicts = [cell.verdict for cell in heat_map.cells]
    leaking = f"{verdicts.count(LEAKS)} of {len(verdicts)} views leak"
    yield "; ".join([leaking, *count_others(verdicts)]) + "."


def _name_failures(heat_map: HeatMap) -> Iterator[str]:
    shares = [cell.search_failed for cell in heat_map.cells if cell.search_failed is not None]
    if not shares:
        yield (
            "This attack has no objective, so that a failed search cannot be told from a view "
            "that hides."
        )
        return
    failed = sum(share >= FAILED_SHARE for share in shares)
    if failed:
        yield (
            f"The search failed in at least {FAILED_SHARE:.0%} of the batches in {failed} of "
            f"{len(shares)} cells: these are lower bounds."
        )
    if any(heat_map.in_doubt(cell) for cell in heat_map.cells):
        yield DOUBT


def draw_heat_map(heat_map: HeatMap, *, alone: bool = True) -> str:
    """Draws the map.

    Where it does not stand alone, what may be concluded stands beside it, not in it.
    """
    sentences = [describe_setup(heat_map), *conclude(heat_map)]
    width = max(GRID.left + len(heat_map.modules) * GRID.width + 16, 620)
    below = GRID.top + (len(heat_map.layers) + 3) * GRID.height + 14
    written = sentences if alone else sentences[:1]
    lines = [line for sentence in written for line in wrap_sentence(sentence, width)]
    names = enumerate(heat_map.modules)
    parts = [
        *(draw_text(GRID.middle(place), GRID.top - 8, module) for place, module in names),
        *_draw_rows(heat_map),
        *_draw_totals(heat_map),
        *_draw_scale(heat_map, below),
        *draw_small_print(lines, below + 42),
    ]
    title = f"Leak map: {heat_map.metric} by layer and module"
    return draw_picture(title, sentences, width, below + 52 + LINE * len(lines), parts)


def _draw_rows(heat_map: HeatMap) -> Iterator[str]:
    for row, layer in enumerate(heat_map.layers):
        yield draw_text(GRID.left - 10, GRID.baseline(row), f"layer {layer}", anchor="end")
        for place, module in enumerate(heat_map.modules):
            yield GRID.draw_box(row, place, _fill_box(heat_map, layer, module))


def _fill_box(heat_map: HeatMap, layer: int, module: str) -> HeatBox:
    cell = heat_map.at(layer, module)
    leak = heat_map.leak(cell.scores.get(heat_map.metric)) if cell else None
    return HeatBox(write_score(heat_map, cell), leak, _describe_cell(heat_map, layer, module, cell))


def _draw_totals(heat_map: HeatMap) -> Iterator[str]:
    """Draws, below the layers, their mean and what a module has of the parameters."""
    row = len(heat_map.layers)
    for line, name in enumerate(("mean", "parameters", "share"), start=row):
        yield draw_text(GRID.left - 10, GRID.baseline(line) + 4, name, anchor="end", style="small")
    for place, module in enumerate(heat_map.modules):
        score = heat_map.overall.get(module, {}).get(heat_map.metric)
        shown = write_number(score.mean, score.unit) if score and score.mean is not None else NONE
        mean = f", mean over layers: {write_interval(score)}" if score else ": none"
        yield GRID.draw_box(
            row, place, HeatBox(shown, heat_map.leak(score), module + mean), lower=4
        )
        for line, size in enumerate(count_parameters(heat_map, module), start=row + 1):
            yield draw_text(GRID.middle(place), GRID.baseline(line) + 4, size, style="small")


def _draw_scale(heat_map: HeatMap, top: int) -> Iterator[str]:
    stops = "".join(
        f'<stop offset="{place:g}" stop-color="{mix_paper(place)}"/>'
        for place in (number / (len(STOPS) - 1) for number in range(len(STOPS)))
    )
    place, right = f'x="{GRID.left}" y="{top}"', GRID.left + 2 * GRID.width + 10
    yield from (
        f'<defs><linearGradient id="scale">{stops}</linearGradient></defs>',
        f'<rect {place} width="{2 * GRID.width}" height="12" fill="url(#scale)"/>',
    )
    fraction = all(cell.scores[heat_map.metric].unit == "fraction" for cell in heat_map.cells)
    nothing, everything = ("nothing", "everything") if fraction else ("least here", "most here")
    words = f"{everything} leaks ({heat_map.metric})"
    yield from (
        draw_text(GRID.left - 10, top + 11, nothing, anchor="end", style="small"),
        draw_text(right, top + 11, words, anchor="start", style="small"),
    )


def _describe_cell(heat_map: HeatMap, layer: int, module: str, cell: HeatCell | None) -> str:
    """Describes a cell in words."""
    where = f"layer {layer}, {module}"
    if cell is None:
        there = (one for one in heat_map.absent if (one.layer, one.module) == (layer, module))
        return f"{where}: not attacked. {' '.join(one.reason for one in there)}"
    score, exact, failed = (
        *(cell.scores[heat_map.metric], cell.scores.get("exact_match")),
        cell.search_failed,
    )
    whole = exact and exact.mean is not None and write_number(exact.mean, exact.unit)
    parts = {
        f"{where}: {heat_map.metric} {write_interval(score)}, blind "
        f"{write_number(score.blind, score.unit)}, n = {score.n}": True,
        f"word for word {whole} %": whole,
        f"search failed in {failed or 0:.0%} of the batches": failed is not None,
        cell.verdict + (", may be more" if heat_map.in_doubt(cell) else ""): True,
        f"{cell.parameters:,} parameters, {100 * cell.share:.2f} %": True,
    }
    return "; ".join(part for part, holds in parts.items() if holds)
