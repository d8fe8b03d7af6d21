"""A drawn map holds every value, says what is in doubt, and can be read without colour, in the
dark, and by a screen reader."""

import io
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from gradleak.records.judgement import Judgement
from gradleak.records.schema import Score
from gradleak.records.statistics import Interval
from gradleak.report.pictures.heat_map import (
    Absent,
    HeatCell,
    HeatMap,
    Lead,
    conclude,
    draw_heat_map,
)
from gradleak.report.pictures.svg import choose_ink, measure_contrast, mix_paper
from gradleak.report.terminal.map_and_tradeoff import print_heat_map

SVG = "{http://www.w3.org/2000/svg}"
MEANS = {(1, "whole"): 0.912, (1, "query"): 0.134, (2, "whole"): 0.876, (2, "query"): 0.243}
LEAKS = Judgement("leaks", "rouge1", ("rouge1",), 0, 0, 40, 0, ())
JUDGED = dict.fromkeys(MEANS, LEAKS) | {
    (1, "query"): replace(LEAKS, verdict="could not be judged", doubts=("search_failed",))
}
FAILED = {(1, "query"): 0.5, (2, "query"): 0.05, (1, "whole"): 0.3, (2, "whole"): 0.0}


def score(mean: float | None, direction: str = "higher", unit: str = "fraction") -> Score:
    ends = (None, None) if mean is None else (mean - 0.1, mean + 0.1)
    return Score(mean, *ends, 0.05, 0.0, 0.1, unit, direction, 40)


@pytest.fixture
def heat_map() -> HeatMap:
    cells = [
        HeatCell(
            layer,
            module,
            500,
            0.05,
            {"rouge1": score(mean), "exact_match": score(0.625)},
            FAILED[layer, module],
            1.0,
            "ab",
            JUDGED[layer, module],
        )
        for (layer, module), mean in MEANS.items()
    ]
    return HeatMap(
        created="",
        target="tiny",
        data="a<b>&c",
        attack="energy",
        metric="rouge1",
        batches=40,
        examples=40,
        seed=0,
        knows=("lengths",),
        parameters=10_000,
        layers=(1, 2),
        modules=("whole", "query", "key"),
        cells=tuple(cells),
        absent=(Absent(1, "key", "It is frozen."), Absent(2, "key", "It is frozen.")),
        overall={"whole": {"rouge1": score(0.894)}, "query": {"rouge1": score(0.189)}},
        leads={"rouge1": Lead("query", "value", Interval(0.1, -0.02, 0.2, 80))},
    )


def printed(heat_map: HeatMap, terminal: bool = False) -> str:
    file = io.StringIO()
    colours = "truecolor" if terminal else None
    print_heat_map(
        Console(
            file=file, width=100, force_terminal=terminal, color_system=colours, highlight=False
        ),
        heat_map,
    )
    return file.getvalue()


def test_the_picture_is_xml_and_holds_every_value_with_words_for_each_cell(
    heat_map: HeatMap,
) -> None:
    root = ElementTree.fromstring(draw_heat_map(heat_map))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    for value in (
        "91.2",
        "13.4?",
        "87.6",
        "24.3",
        "89.4",
        "18.9",
        "layer 1",
        "whole",
        "key",
        "500",
        "5.00 %",
    ):
        assert value in texts
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert any(
        title.startswith(
            "layer 1, query: rouge1 13.4 [3.4, 23.4], blind 5.0, n = 40; word for word 62.5 %"
        )
        for title in titles
    )
    assert "layer 2, key: not attacked. It is frozen." in titles
    assert len(root.findall(f"{SVG}g")) == 6 + 3


def test_the_picture_needs_nothing_else_and_adapts_to_the_dark(heat_map: HeatMap) -> None:
    picture = draw_heat_map(heat_map)
    assert picture.count("http") == 1  # the namespace
    assert "prefers-color-scheme: dark" in picture


def test_the_table_holds_every_value_without_colour_and_with_it(heat_map: HeatMap) -> None:
    plain, coloured = printed(heat_map), printed(heat_map, terminal=True)
    for value in ("91.2", "13.4?", "87.6", "24.3", "–", "5.00 %", "62.5"):
        assert value in plain and value in coloured
    assert "\x1b" not in plain and "\x1b[38;2;" in coloured


def test_low_cells_are_in_doubt_only_where_the_search_failed(heat_map: HeatMap) -> None:
    assert [(cell.layer, cell.module) for cell in heat_map.cells if heat_map.in_doubt(cell)] == [
        (1, "query")
    ]
    told = " ".join(conclude(heat_map))
    assert "? may be more: the search failed" in told
    assert "3 of 4 views leak; 1 could not be judged." in told
    assert "in 2 of 4 cells" in told


def test_who_leaks_most_is_said_with_its_doubts(heat_map: HeatMap) -> None:
    told = " ".join(conclude(heat_map))
    assert (
        "query leaks most: rouge1 18.9 [8.9, 28.9], blind 5.0, mean of 2 layers, each with 5.00 %"
        " of the parameters." in told
    )
    assert (
        "That is 10.0 [-2.0, 20.0] more than value, the next: chance may have put it first." in told
    )
    assert "Whole layers: 89.4" in told
    assert "– key in 2 of 2 layers: It is frozen." in told
    assert "examples were attacked" not in told
    assert "3 examples were attacked" in " ".join(conclude(replace(heat_map, examples=3)))


def test_without_an_objective_low_is_not_called_safe(heat_map: HeatMap) -> None:
    blind = replace(
        heat_map, cells=tuple(replace(cell, search_failed=None) for cell in heat_map.cells)
    )
    assert "cannot be told from a view that hides" in " ".join(conclude(blind))
    assert "Search failed" not in printed(blind)


def test_of_metrics_that_fall_the_lowest_is_darkest_and_other_units_are_scaled_to_the_map(
    heat_map: HeatMap,
) -> None:
    assert heat_map.leak(score(0.25, "lower")) == 0.75
    cells = tuple(
        replace(cell, scores={"rouge1": score(4.0 + cell.layer, unit="edits")})
        for cell in heat_map.cells
    )
    scaled = replace(heat_map, cells=cells)
    assert [scaled.leak(score(mean, unit="edits")) for mean in (5.0, 5.5, 6.0)] == [0.0, 0.5, 1.0]


def test_a_metric_that_applies_to_nothing_is_said_to(heat_map: HeatMap) -> None:
    empty = replace(
        heat_map,
        cells=tuple(replace(cell, scores={"rouge1": score(None)}) for cell in heat_map.cells),
    )
    assert "rouge1 applies to none of these examples" in printed(empty)
    ElementTree.fromstring(draw_heat_map(empty))


@pytest.mark.parametrize("leak", [place / 20 for place in range(21)])
def test_ink_can_be_read_on_every_paper(leak: float) -> None:
    assert measure_contrast(mix_paper(leak), choose_ink(leak)) >= 4.5  # WCAG 2, level AA
