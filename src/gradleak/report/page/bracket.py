"""The section of what no attack could do: for each setting that was bounded, rebuilt ≤ at most ≤
guaranteed on one scale."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from typing import Any, Self

from markupsafe import Markup

from gradleak.records.judgement import Bracket, list_brackets
from gradleak.records.schema import BoundsRecord
from gradleak.report.numbers import MISSING
from gradleak.report.page.section import JudgedRun, Report, Section
from gradleak.report.table_markup import (
    Column,
    draw_html_table,
    draw_markdown_table,
    number_columns,
)
from gradleak.report.verdict import (
    describe_bounds,
    write_bound,
    write_bracket,
    write_rebuilt,
)

WIDTH, LEFT, TOP, ROW = 340, 12, 14, 46  # pixels
SCALE = WIDTH - 2 * LEFT


@dataclass(frozen=True)
class SettingBracket:
    """What was rebuilt of one setting, and what no attack could."""

    setting: str
    record: str
    brackets: tuple[Bracket, ...]
    bounds: BoundsRecord
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class WhatNoAttackCouldDo(Section):
    """The brackets of the settings that were bounded."""

    name = "bounds"
    title = heading = "What no attack could do"
    needs = "bounded"
    template = """
<p>What attacks rebuilt is a lower end: the next attack may do better. The upper end is computed:
  filled, what the first attack that was named rebuilt; the bar, what an oracle gets that is told
  everything but one word, with its 95 % interval; the stroke, what the noise guarantees; the dots,
  what is right without the update. The first is measured on these texts, the second is a theorem
  for texts drawn from its prior and an estimate on these, the third is a theorem.</p>
{% for one, picture, table in drawn %}
<h3>{{ one.setting }}</h3>
<div class="charts">{{ picture }}</div>
<details><summary>The numbers behind it</summary>{{ table }}</details>
<ul class="soft">{% for sentence in one.sentences %}<li>{{ sentence }}</li>{% endfor %}</ul>
{% endfor %}
"""

    bounded: tuple[SettingBracket, ...]

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        summaries = (one for setting in run.settings_by_name for one in setting.summaries)
        return cls(
            tuple(
                SettingBracket(
                    run.labels.setting(one.record),
                    one.id,
                    tuple(list_brackets(one.record)),
                    one.record.bounds,
                    tuple(describe_bounds(one.record)),
                )
                for one in summaries
                if one.record.bounds is not None
            )
        )

    def prepare(self, report: Report) -> Mapping[str, Any]:
        columns = [
            *(Column("measure"), Column("attack")),
            *number_columns("rebuilt [95 %]", "at most [95 %]", "guaranteed", "without the update"),
        ]
        return {
            "drawn": [
                (
                    one,
                    Markup(draw_brackets(one.brackets)),
                    draw_html_table(columns, [_list_cells(bracket) for bracket in one.brackets]),
                )
                for one in self.bounded
            ]
        }

    def write_markdown(self, report: Report) -> Iterator[str]:
        yield from (f"## {self.heading}", "")
        yield from draw_markdown_table(
            ["setting", "measure", "attack", "rebuilt", "at most", "guaranteed", "without"],
            [
                [one.setting, *_list_cells(bracket)]
                for one in self.bounded
                for bracket in one.brackets
            ],
        )


def _list_cells(bracket: Bracket) -> list[str]:
    return [bracket.of, bracket.attack or MISSING, *write_bracket(bracket)]


def draw_brackets(brackets: Sequence[Bracket]) -> str:
    """Draws one scale from 0 to 100 % for each measure."""
    height = TOP + ROW * len(brackets) + 8
    said = "; ".join(
        f"{one.of}: rebuilt {write_rebuilt(one)}, at most {write_bound(one.at_most)}"
        for one in brackets
    )
    parts = (_draw_bracket(one, TOP + ROW * row) for row, one in enumerate(brackets))
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(said)}">{"".join(chain.from_iterable(parts))}</svg>'
    )


def _draw_bracket(bracket: Bracket, top: int) -> Iterator[str]:
    most, bar = bracket.at_most, top + 8
    yield (
        f'<text x="{LEFT}" y="{top}" class="small">{escape(bracket.of)}, %</text>'
        f'<rect class="frame" x="{LEFT}" y="{bar}" width="{SCALE}" height="14"/>'
    )
    ends = [_at(end) for end in (most.low, most.high) if end is not None]
    if ends:
        size = f'width="{max(ends) - min(ends):g}" height="20"'
        yield f'<rect class="band" x="{min(ends):g}" y="{bar - 3}" {size}/>'
    yield f'<path class="line" d="M{_at(most.mean):g} {bar - 3}v20"/>'
    if bracket.rebuilt is not None and bracket.rebuilt.mean is not None:
        width = _at(bracket.rebuilt.mean) - LEFT
        yield f'<rect class="bar" x="{LEFT}" y="{bar + 3}" width="{width:g}" height="8"/>'
    if bracket.guaranteed is not None:
        yield f'<path class="limit" d="M{_at(bracket.guaranteed.mean):g} {bar - 5}v24"/>'
    if most.without_update is not None:
        yield f'<path class="absent" d="M{_at(most.without_update):g} {bar - 3}v20"/>'


def _at(share: float) -> float:
    return LEFT + SCALE * min(max(share, 0.0), 1.0)
