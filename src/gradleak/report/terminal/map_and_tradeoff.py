"""A leak map and a trade-off on a terminal, coloured where there is colour."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gradleak.report.numbers import write_interval, write_number
from gradleak.report.pictures import heat_map as maps
from gradleak.report.pictures import tradeoff_chart as tradeoffs
from gradleak.report.pictures.heat_map import NONE, WHOLE, HeatCell, HeatMap
from gradleak.report.pictures.svg import choose_ink, mix_paper
from gradleak.report.pictures.tradeoff_chart import Point, Tradeoff
from gradleak.report.terminal.console import build_table, number_columns, split_to_fit

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
        names = (module.replace("_", "_\n") for module in modules)
        table = build_table(Column("layer", no_wrap=True), *number_columns(*names))
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
    scores = (heat_map.overall.get(module, {}).get(heat_map.metric) for module in modules)
    table.add_row(
        "mean",
        *(
            _shade(write_number(score.mean, score.unit), heat_map.leak(score)) if score else NONE
            for score in scores
        ),
    )
    sizes = [maps.count_parameters(heat_map, module) for module in modules]
    for name, row in zip(("parameters", "share"), zip(*sizes, strict=True), strict=True):
        table.add_row(name, *row, style="dim")


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
    scores = (cell.scores.get(heat_map.metric) for cell in heat_map.cells)
    units = {score.unit for score in scores if score is not None}
    layers = " by layer and module" if heat_map.modules != (WHOLE,) else " by layer"
    return layers + (", in %" if units == {"fraction"} else "")


def print_tradeoff(console: Console, tradeoff: Tradeoff) -> None:
    """Prints a row for each setting, in the order asked for, then what may be concluded."""
    percent = ", leak in %" if tradeoff.points[0].leak.unit == "fraction" else ""
    title = f"Trade-off: {tradeoff.metric} against {tradeoff.utility}{percent}"
    console.print(Text(title, style="bold"))
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
    others = [name for name in ("mcc", "f1", "accuracy") if name != tradeoff.utility]
    epsilon = ("whole run", tradeoffs.write_point_epsilon)
    bounded = any(epsilon[1](point) != tradeoffs.NONE for point in tradeoff.points)
    return [
        ("gain", tradeoffs.write_point_gain),
        ("verdict", lambda point: point.verdict),
        (tradeoff.utility, _write_utility(tradeoff.utility)),
        (tradeoff.metric, lambda point: write_interval(point.leak)),
        ("blind", lambda point: write_number(point.leak.blind, point.leak.unit)),
        *((name, _write_utility(name)) for name in others),
        *([epsilon] if bounded else []),
    ]


def _write_utility(name: str) -> Callable[[Point], str]:
    return lambda point: tradeoffs.write_utility(point.utility[name])


def _build_table(tradeoff: Tradeoff, columns: Sequence[PointColumn]) -> Table:
    table = build_table(
        *(Column(name, no_wrap=True) for name in ("", "defense")),
        *number_columns(*(name for name, _ in columns)),
    )
    for place, point in enumerate(tradeoff.points, start=1):
        table.add_row(
            f"{place}{'*' if point is tradeoff.weakest else ' '}",
            point.defense,
            *(draw(point) for _, draw in columns),
            style="green" if tradeoff.meets(point) else "",
        )
    return table
