"""A leak map on a terminal: coloured numbers, or plain ones where there is no colour."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradleak.report.numbers import number
from gradleak.report.pictures.heat_grid import ink, paper
from gradleak.report.pictures.heat_map import NONE, WHOLE, HeatCell, HeatMap, conclusions, heading, parameters_of, text_of
from gradleak.report.terminal.console import fitting, plain_table

EXACT = "exact_match"
Draw = Callable[[HeatCell | None], Text]


def print_heat_map(console: Console, heat_map: HeatMap) -> None:
    """The map, then word-for-word matches and failed searches in the same order, then what may be concluded."""
    console.print(Text(f"Leak map: {heat_map.metric}{_percent(heat_map)}", style="bold"))
    console.print(heading(heat_map), style="dim")
    console.print()
    _print(console, heat_map, lambda cell: _coloured(heat_map, cell), with_totals=True)
    if heat_map.metric != EXACT and any(EXACT in cell.scores for cell in heat_map.cells):
        console.print(Text("Rebuilt word for word, in %", style="bold"))
        _print(console, heat_map, _exact)
    if any(cell.search_failed is not None for cell in heat_map.cells):
        console.print(Text("Search failed, in % of the batches", style="bold"))
        _print(console, heat_map, _failed)
    for sentence in conclusions(heat_map):
        console.print(sentence)


def _print(console: Console, heat_map: HeatMap, draw: Draw, with_totals: bool = False) -> None:
    def build(modules: Sequence[str]) -> Table:
        table = plain_table()
        table.add_column("layer", no_wrap=True)
        for module in modules:
            table.add_column(module.replace("_", "_\n"), justify="right", no_wrap=True)
        for layer in heat_map.layers:
            table.add_row(str(layer), *(draw(heat_map.at(layer, module)) for module in modules))
        if with_totals:
            _add_totals(table, heat_map, modules)
        return table

    for table in fitting(console, heat_map.modules, build):
        console.print(table)
        console.print()


def _add_totals(table: Table, heat_map: HeatMap, modules: Sequence[str]) -> None:
    table.add_section()
    scores = [heat_map.overall.get(module, {}).get(heat_map.metric) for module in modules]
    table.add_row("mean", *(_shaded(number(score.mean, score.unit), heat_map.leak(score)) if score else NONE for score in scores))
    sizes = [parameters_of(heat_map, module) for module in modules]
    table.add_row("parameters", *(count for count, _ in sizes), style="dim")
    table.add_row("share", *(share for _, share in sizes), style="dim")


def _coloured(heat_map: HeatMap, cell: HeatCell | None) -> Text:
    return _shaded(text_of(heat_map, cell), heat_map.leak(cell.scores.get(heat_map.metric)) if cell else None)


def _shaded(text: str, leak: float | None) -> Text:
    return Text(text, style="dim") if leak is None else Text(text, style=f"{ink(leak)} on {paper(leak)}")


def _exact(cell: HeatCell | None) -> Text:
    score = cell.scores.get(EXACT) if cell else None
    return Text(NONE if score is None or score.mean is None else number(score.mean, score.unit))


def _failed(cell: HeatCell | None) -> Text:
    share = cell.search_failed if cell else None
    return Text(NONE if share is None else f"{100 * share:.0f}")


def _percent(heat_map: HeatMap) -> str:
    units = {cell.scores[heat_map.metric].unit for cell in heat_map.cells if heat_map.metric in cell.scores}
    layers = " by layer and module" if heat_map.modules != (WHOLE,) else " by layer"
    return layers + (", in %" if units == {"fraction"} else "")
