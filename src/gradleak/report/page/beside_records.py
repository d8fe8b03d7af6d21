"""What lies beside the records of a run, as sections: a trade-off, and a leak map."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from markupsafe import Markup

from gradleak.records.errors import RecordError
from gradleak.records.judgement import Judgement, judge_summary
from gradleak.records.plain import from_plain
from gradleak.report.numbers import write_interval
from gradleak.report.page.section import JudgedRun, Report, Section
from gradleak.report.pictures import heat_map, tradeoff_chart
from gradleak.report.pictures.heat_map import HeatCell, HeatMap
from gradleak.report.pictures.svg import embed
from gradleak.report.pictures.tradeoff_chart import Point, Tradeoff
from gradleak.report.table_markup import Column, draw_html_table, number_columns

# Both sections look alike: sentences, a picture, a table.
TEMPLATE = """
{% for sentence in conclusions %}<p>{{ sentence }}</p>{% endfor %}
<div class="scroll picture" tabindex="0" role="region" aria-label="{{ picture_name }}">
{{- picture -}}
</div>
<details><summary>The numbers behind it</summary>
<div class="scroll" tabindex="0" role="region" aria-label="{{ table_name }}">
{{- table -}}
</div></details>
"""


@dataclass(frozen=True)
class LeakAgainstUtility(Section):
    """The trade-off of a run that `gradleak tradeoff` made."""

    name = "tradeoff"
    title = heading = "Leakage against utility"
    template = TEMPLATE

    tradeoff: Tradeoff | None

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        """Takes the trade-off of the file, with settings judged by their records as they are."""
        found: Tradeoff | None = _read_beside(run, "tradeoff.json", Tradeoff)
        if found is None:
            return cls(None)
        now = _judge_beside(run, {one.audit for one in found.points})
        points = (replace(one, judgement=now.get(one.audit, one.judgement)) for one in found.points)
        return cls(replace(found, points=tuple(points)))

    @property
    def is_shown(self) -> bool:
        return self.tradeoff is not None

    def prepare(self, report: Report) -> Mapping[str, Any]:
        assert self.tradeoff is not None
        found = self.tradeoff
        columns = [
            Column("defense"),
            *number_columns("gain over blind [95 %]", f"{found.utility} [95 %]"),
            *(Column("ε of the whole run"), Column("meets the target"), Column("verdict")),
        ]
        rows = [_list_point(found, point) for point in found.points]
        drawn = tradeoff_chart.draw_tradeoff(found, alone=False)
        return {
            "conclusions": list(tradeoff_chart.conclude(found)),
            "picture": Markup(embed(drawn, "tradeoff-picture")),
            "picture_name": self.heading,
            "table": draw_html_table(columns, rows, stacked=False),
            "table_name": "Trade-off",
        }

    def write_markdown(self, report: Report) -> Iterator[str]:
        if self.tradeoff is not None:
            sentences = tradeoff_chart.conclude(self.tradeoff)
            yield from (f"## {self.heading}", "", *(f"- {one}" for one in sentences), "")


@dataclass(frozen=True)
class LeakMapOverLayers(Section):
    """The leak map of a run that `gradleak map` made."""

    name = "map"
    title = "Leak map"
    heading = "Leak map over layers"
    template = TEMPLATE

    leak_map: HeatMap | None

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        """Takes the map of the file, with cells judged by their records as they are."""
        found: HeatMap | None = _read_beside(run, "map.json", HeatMap)
        if found is None:
            return cls(None)
        now = _judge_beside(run, {one.record for one in found.cells})
        cells = (replace(one, judgement=now.get(one.record, one.judgement)) for one in found.cells)
        return cls(replace(found, cells=tuple(cells)))

    @property
    def is_shown(self) -> bool:
        return self.leak_map is not None

    def prepare(self, report: Report) -> Mapping[str, Any]:
        assert self.leak_map is not None
        found = self.leak_map
        columns = [
            *(Column("layer"), Column("module")),
            *number_columns(f"{found.metric} [95 %]", "parameters", "share"),
            *(Column("verdict"), Column("record")),
        ]
        rows = [_list_cell(found, cell) for cell in found.cells]
        drawn = heat_map.draw_heat_map(found, alone=False)
        return {
            "conclusions": list(heat_map.conclude(found)),
            "picture": Markup(embed(drawn, "map-picture")),
            "picture_name": "Leak map over layers and modules",
            "table": draw_html_table(columns, rows, stacked=False),
            "table_name": self.title,
        }

    def write_markdown(self, report: Report) -> Iterator[str]:
        if self.leak_map is not None:
            sentences = heat_map.conclude(self.leak_map)
            yield from (f"## {self.heading}", "", *(f"- {one}" for one in sentences), "")


def _read_beside(run: JudgedRun, name: str, wanted: Any) -> Any:
    path = run.folder / name if run.folder is not None else None
    if path is None or not path.is_file():
        return None
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(
            f"{path} is not a whole JSON file. Make it again, or delete it to have a report "
            "without it."
        ) from error
    return from_plain(wanted, plain, name)


def _judge_beside(run: JudgedRun, ids: set[str]) -> Mapping[str, Judgement]:
    """Judges the records with these ids in the folder itself; those below are of other runs."""
    beside = [summary for summary in run.summaries if summary.path.parent == run.folder]
    return {summary.id: judge_summary(summary) for summary in beside if summary.id in ids}


def _list_point(found: Tradeoff, point: Point) -> list[str]:
    meets = "yes" if found.meets(point) else "no"
    return [
        point.defense,
        tradeoff_chart.write_point_gain(point),
        tradeoff_chart.write_utility(point.utility[found.utility]),
        tradeoff_chart.write_point_epsilon(point),
        f"{meets}{', in doubt' if point.in_doubt else ''}",
        point.verdict,
    ]


def _list_cell(found: HeatMap, cell: HeatCell) -> list[str | Markup]:
    doubt = "?" if found.in_doubt(cell) else ""
    return [
        *(str(cell.layer), cell.module, write_interval(cell.scores[found.metric]) + doubt),
        *(f"{cell.parameters:,}", f"{100 * cell.share:.2f} %", cell.verdict),
        Markup("<code>{}</code>").format(cell.record),
    ]
