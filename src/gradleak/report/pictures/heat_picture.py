"""A leak map as a picture: one SVG that needs nothing else, for light and dark pages, with words for those who cannot see it."""

from collections.abc import Iterator
from xml.sax.saxutils import escape

from gradleak.report.numbers import mean_and_interval, number
from gradleak.report.pictures.heat_grid import STOPS, ink, paper
from gradleak.report.pictures.heat_map import NONE, HeatCell, HeatMap, conclusions, heading, parameters_of, text_of
from gradleak.report.pictures.svg import LINE, picture, small_lines, text, wrapped

LEFT, TOP, WIDTH, HEIGHT, GAP = 96, 66, 116, 34, 2  # pixels: where cells begin, and their size


def svg(heat_map: HeatMap, *, alone: bool = True) -> str:
    """The picture as text; where it does not stand alone, what may be concluded stands beside it and not in it."""
    title, sentences = f"Leak map: {heat_map.metric} by layer and module", [heading(heat_map), *conclusions(heat_map)]
    width, below = _width(heat_map), TOP + (len(heat_map.layers) + 3) * HEIGHT + 14
    lines = [line for sentence in (sentences if alone else sentences[:1]) for line in wrapped(sentence, width)]
    height = below + 52 + LINE * len(lines)
    parts = [
        *_columns(heat_map),
        *_rows(heat_map),
        *_totals(heat_map),
        *_legend(heat_map, below),
        *small_lines(lines, below + 42),
    ]
    return picture(title, sentences, width, height, parts)


def _columns(heat_map: HeatMap) -> Iterator[str]:
    for place, module in enumerate(heat_map.modules):
        yield text(_middle(place), TOP - 8, module)


def _rows(heat_map: HeatMap) -> Iterator[str]:
    for row, layer in enumerate(heat_map.layers):
        yield text(LEFT - 10, _baseline(row), f"layer {layer}", anchor="end")
        for place, module in enumerate(heat_map.modules):
            cell = heat_map.at(layer, module)
            leak = heat_map.leak(cell.scores.get(heat_map.metric)) if cell else None
            yield _box(place, row, text_of(heat_map, cell), leak, _told(heat_map, layer, module, cell))


def _totals(heat_map: HeatMap) -> Iterator[str]:
    """Below the layers: their mean, and what a module has of the parameters."""
    row = len(heat_map.layers)
    for name, line in zip(("mean", "parameters", "share"), range(row, row + 3), strict=True):
        yield text(LEFT - 10, _baseline(line) + 4, name, anchor="end", style="small")
    for place, module in enumerate(heat_map.modules):
        score = heat_map.overall.get(module, {}).get(heat_map.metric)
        shown = number(score.mean, score.unit) if score and score.mean is not None else NONE
        told = f"{module}, mean over layers: {mean_and_interval(score)}" if score else f"{module}: none"
        yield _box(place, row, shown, heat_map.leak(score), told, lower=4)
        for line, shown in enumerate(parameters_of(heat_map, module), start=row + 1):
            yield text(_middle(place), _baseline(line) + 4, shown, style="small")


def _legend(heat_map: HeatMap, top: int) -> Iterator[str]:
    places = [place / (len(STOPS) - 1) for place in range(len(STOPS))]
    stops = "".join(f'<stop offset="{place:g}" stop-color="{paper(place)}"/>' for place in places)
    fraction = all(cell.scores[heat_map.metric].unit == "fraction" for cell in heat_map.cells)
    nothing, everything = ("nothing", "everything") if fraction else ("least here", "most here")
    yield f'<defs><linearGradient id="scale">{stops}</linearGradient></defs>'
    yield f'<rect x="{LEFT}" y="{top}" width="{2 * WIDTH}" height="12" fill="url(#scale)"/>'
    yield text(LEFT - 10, top + 11, nothing, anchor="end", style="small")
    yield text(LEFT + 2 * WIDTH + 10, top + 11, f"{everything} leaks ({heat_map.metric})", anchor="start", style="small")


def _told(heat_map: HeatMap, layer: int, module: str, cell: HeatCell | None) -> str:
    """A cell in words."""
    if cell is None:
        why = [absent.reason for absent in heat_map.absent if (absent.layer, absent.module) == (layer, module)]
        return f"layer {layer}, {module}: not attacked. {' '.join(why)}"
    score = cell.scores[heat_map.metric]
    exact = cell.scores.get("exact_match")
    blind = f"blind {number(score.blind, score.unit)}"
    parts = [
        f"layer {layer}, {module}: {heat_map.metric} {mean_and_interval(score)}, {blind}, n = {score.n}",
        f"word for word {number(exact.mean, exact.unit)} %" if exact and exact.mean is not None else "",
        f"search failed in {cell.search_failed:.0%} of the batches" if cell.search_failed is not None else "",
        cell.verdict + (", may be more" if heat_map.in_doubt(cell) else ""),
        f"{cell.parameters:,} parameters, {100 * cell.share:.2f} %",
    ]
    return "; ".join(filter(None, parts))


def _box(place: int, row: int, shown: str, leak: float | None, told: str, lower: int = 0) -> str:
    x, y = LEFT + place * WIDTH, TOP + row * HEIGHT + lower
    look = 'class="absent"' if leak is None else f'fill="{paper(leak)}"'
    colour = "" if leak is None else f' style="fill:{ink(leak)}"'
    size = f'width="{WIDTH - GAP}" height="{HEIGHT - GAP}" rx="3"'
    return (
        f'<g role="img"><title>{escape(told)}</title><rect x="{x}" y="{y}" {size} {look}/>'
        f'<text x="{_middle(place):g}" y="{_baseline(row) + lower:g}" text-anchor="middle"{colour}>{escape(shown)}</text></g>'
    )


def _width(heat_map: HeatMap) -> int:
    return max(LEFT + len(heat_map.modules) * WIDTH + 16, 620)


def _middle(place: int) -> float:
    return LEFT + place * WIDTH + (WIDTH - GAP) / 2


def _baseline(row: int) -> float:
    return TOP + row * HEIGHT + (HEIGHT - GAP) / 2 + 5
