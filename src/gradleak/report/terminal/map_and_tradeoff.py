"""A leak map and a trade-off on a terminal, coloured where there is colour."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradleak.report.numbers import write_interval, write_number
from gradleak.report.pictures import heat_map as maps
from gradleak.report.pictures import tradeoff_chart as tradeoffs
from gradleak.report.pictures.heat_map import NONE, WHOLE, HeatCell, HeatMap
from gradleak.report.pictures.svg import choose_ink, mix_paper
from gradleak.report.pictures.tradeoff_chart import Point, Tradeoff
from gradleak.report.terminal.console import build_table, split_to_fit

EXACT = "exact_match"
Draw = Callable[[HeatCell | None], Text]
PointColumn = tuple[str, Callable[[Point], str]]


def print_heat_map(console: Console, heat_map: HeatMap) -> None:
    """Prints the map, then word-for-word matches, failed searches, and what may be concluded."""
    console.print(Text(f"Leak map: {heat_map.metric}{_describe_axes(heat_map)}", style="bold"))
    console.print(maps.describe_setup(heat_map), style="dim")
    console.print()
    _print_grid(console, heat_map, lambda cell: _colour_score(heat_map, cell), with_totals=True)
    if heat_map.metric != EXACT and any(EXACT in cell.scores for cell in heat_map.cells):
        console.print(Text("Rebuilt word for word, in %", style="bold"))
        _print_grid(console, heat_map, _write_exact)
    if any(cell.search_failed is not None for cell in heat_map.cells):
        console.print(Text("Search failed, in % of the batches", style="bold"))
        _print_grid(console, heat_map, _write_failed)
    for sentence in maps.conclude(heat_map):
        console.print(sentence)


def _print_grid(console: Console, heat_map: HeatMap, draw: Draw, with_totals: bool = False) -> None:
    def build(modules: Sequence[str]) -> Table:
        table = build_table()
        table.add_column("layer", no_wrap=True)
        for module in modules:
            table.add_column(module.replace("_", "_\n"), justify="right", no_wrap=True)
        for layer in heat_map.layers:
            table.add_row(str(layer), *(draw(heat_map.at(layer, module)) for module in modules))
        if with_totals:
            _add_totals(table, heat_map, modules)
        return table

    for table in split_to_fit(console, heat_map.modules, build):
        console.print(table)
        console.print()


def _add_totals(table: Table, heat_map: HeatMap, modules: Sequence[str]) -> None:
    table.add_section()
    scores = [heat_map.overall.get(module, {}).get(heat_map.metric) for module in modules]
    table.add_row(
        "mean",
        *(
            _shade(write_number(score.mean, score.unit), heat_map.leak(score)) if score else NONE
            for score in scores
        ),
    )
    sizes = [maps.count_parameters(heat_map, module) for module in modules]
    table.add_row("parameters", *(count for count, _ in sizes), style="dim")
    table.add_row("share", *(share for _, share in sizes), style="dim")


def _colour_score(heat_map: HeatMap, cell: HeatCell | None) -> Text:
    return _shade(
        maps.write_score(heat_map, cell),
        heat_map.leak(cell.scores.get(heat_map.metric)) if cell else None,
    )


def _shade(text: str, leak: float | None) -> Text:
    return (
        Text(text, style="dim")
        if leak is None
        else Text(text, style=f"{choose_ink(leak)} on {mix_paper(leak)}")
    )


def _write_exact(cell: HeatCell | None) -> Text:
    score = cell.scores.get(EXACT) if cell else None
    return Text(
        NONE if score is None or score.mean is None else write_number(score.mean, score.unit)
    )


def _write_failed(cell: HeatCell | None) -> Text:
    share = cell.search_failed if cell else None
    return Text(NONE if share is None else f"{100 * share:.0f}")


def _describe_axes(heat_map: HeatMap) -> str:
    units = {
        cell.scores[heat_map.metric].unit
        for cell in heat_map.cells
        if heat_map.metric in cell.scores
    }
    layers = " by layer and module" if heat_map.modules != (WHOLE,) else " by layer"
    return layers + (", in %" if units == {"fraction"} else "")


def print_tradeoff(console: Console, tradeoff: Tradeoff) -> None:
    """Prints a row for each setting, in the order asked for, then what may be concluded."""
    fraction = tradeoff.points[0].leak.unit == "fraction"
    percent = ", leak in %" if fraction else ""
    console.print(
        Text(f"Trade-off: {tradeoff.metric} against {tradeoff.utility}{percent}", style="bold")
    )
    for line in tradeoffs.describe_setup(tradeoff):
        console.print(line, style="dim")
    console.print()
    for table in split_to_fit(
        console, _list_columns(tradeoff), lambda columns: _build_table(tradeoff, columns)
    ):
        console.print(table)
        console.print()
    for sentence in tradeoffs.conclude(tradeoff):
        console.print(sentence)


def _list_columns(tradeoff: Tradeoff) -> list[PointColumn]:
    names = [
        tradeoff.utility,
        *(name for name in ("mcc", "f1", "accuracy") if name != tradeoff.utility),
    ]
    with_epsilon = any(
        tradeoffs.write_point_epsilon(point) != tradeoffs.NONE for point in tradeoff.points
    )
    return [
        ("gain", tradeoffs.write_point_gain),
        ("verdict", lambda point: point.verdict),
        *((name, _write_utility(name)) for name in names[:1]),
        (tradeoff.metric, lambda point: write_interval(point.leak)),
        ("blind", lambda point: write_number(point.leak.blind, point.leak.unit)),
        *((name, _write_utility(name)) for name in names[1:]),
        *([("whole run", tradeoffs.write_point_epsilon)] if with_epsilon else []),
    ]


def _write_utility(name: str) -> Callable[[Point], str]:
    return lambda point: tradeoffs.write_utility(point.utility[name])


def _build_table(tradeoff: Tradeoff, columns: Sequence[PointColumn]) -> Table:
    table = build_table()
    table.add_column("", no_wrap=True)
    table.add_column("defense", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for place, point in enumerate(tradeoff.points, start=1):
        style = "green" if tradeoff.meets(point) else ""
        mark = "*" if point is tradeoff.weakest else " "
        table.add_row(
            f"{place}{mark}", point.defense, *(draw(point) for _, draw in columns), style=style
        )
    return table
