"""Sections that are pictures: attacks × defenses, and what lies beside records of a run.

That is a trade-off or a leak map. The numbers behind each picture stand below it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import count
from typing import Any, Self

from markupsafe import Markup

from gradleak.records.files import RecordError
from gradleak.records.judgement import LEAKS, judge, judge_summary, leading_metric
from gradleak.records.plain import from_plain
from gradleak.records.schema import Score
from gradleak.records.settings import Ran, Setting
from gradleak.report.naming import rank_naturally
from gradleak.report.numbers import write_gain, write_interval, write_number
from gradleak.report.page.opening import SettingList
from gradleak.report.page.section import JudgedRun, Report, Section
from gradleak.report.pictures import heat_map, tradeoff_chart
from gradleak.report.pictures.heat_map import HeatMap
from gradleak.report.pictures.svg import HeatBox, HeatGrid, embed
from gradleak.report.pictures.tradeoff_chart import Tradeoff
from gradleak.report.table_markup import (
    Column,
    draw_html_table,
    draw_markdown_table,
    number_columns,
)

ROOM = 30  # rows and columns
MARGIN, WIDTH, HEIGHT, LETTER = 8, 74, 36, 7.4  # pixels
LINE = 14  # pixels from one line of a long name to the next
SHORT, LONG = 26, 36  # letters of a defense's line, of an attack's name


@dataclass(frozen=True)
class HeatLine:
    """One attack under one defense; of several settings the one that leaks most."""

    attack: str
    defense: str
    metric: str
    score: Score
    verdict: str
    in_doubt: bool  # the number may be too low
    settings: int
    record: str


@dataclass(frozen=True)
class AttackHeat:
    """Attacks × defenses."""

    attacks: tuple[str, ...]
    defenses: tuple[str, ...]
    cells: tuple[HeatLine, ...]
    left_out: int = 0  # cells of attacks or defenses for which there was no room


@dataclass(frozen=True)
class AttacksUnderDefenses(Section):
    """Attacks × defenses, coloured by how much leaks."""

    name = "heat"
    title = heading = "Attacks × defenses"
    template = """
<p class="soft">
  {%- for name in measured %}{{ " or " if not loop.first }}{{ explained(name) }}{% endfor %},
  from pale (nothing) to dark red (everything).
  ? marks a score that may be too low: the search failed, could not be checked, or ignored the
  defense. Where a pair was run in several settings, the one that leaks most.
  {%- if section.heat.left_out %}
  {{ section.heat.left_out }} pairs are left out for want of room.
  {%- endif %}</p>
<div class="scroll" tabindex="0" role="region" aria-label="Heat map of attacks and defenses">
{{- picture -}}
</div>
<details><summary>The numbers behind it</summary>{{ table }}</details>
"""

    heat: AttackHeat

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        return cls(compare_attacks(run))

    def prepare(self, report: Report) -> Mapping[str, Any]:
        measured = report.find(SettingList).metrics
        columns = [
            *(Column("attack"), Column("defense")),
            *number_columns(f"{' or '.join(measured)} [95 %]", "blind", "gain", "n"),
            *(Column("verdict"), Column("record")),
        ]
        rows = [_list_cells(cell) for cell in self.heat.cells]
        return {
            "measured": measured,
            "picture": Markup(draw_attack_heat(self.heat)),
            "table": draw_html_table(columns, rows, name="heat-table"),
        }

    def write_markdown(self, report: Report) -> Iterator[str]:
        yield from (f"## {self.heading}", "")
        scores = {(cell.attack, cell.defense): _write_score(cell) for cell in self.heat.cells}
        rows = [
            [defense, *(scores.get((attack, defense), "not run") for attack in self.heat.attacks)]
            for defense in self.heat.defenses
        ]
        yield from draw_markdown_table(["defense", *self.heat.attacks], rows)


def compare_attacks(run: JudgedRun) -> AttackHeat:
    """Takes, of several settings under one defense, the one that leaks most.

    Settings of one defense differ in data, seed or batch size.
    """
    settings = run.settings_by_name
    metrics = {leading_metric(ran.attack.scores) for setting in settings for ran in setting.attacks}
    found: dict[tuple[str, str], list[HeatLine]] = {}
    for setting in settings:
        for ran in setting.attacks:
            line = _judge_attack(run, setting, ran, with_metric=len(metrics) > 1)
            if line is not None:
                found.setdefault((line.attack, line.defense), []).append(line)
    cells = [_choose_worst(lines) for lines in found.values()]
    attacks = sorted({cell.attack for cell in cells}, key=rank_naturally)[:ROOM]
    defenses = sorted({cell.defense for cell in cells}, key=rank_naturally)[:ROOM]
    shown = [cell for cell in cells if cell.attack in attacks and cell.defense in defenses]
    shown.sort(key=lambda cell: (rank_naturally(cell.defense), rank_naturally(cell.attack)))
    return AttackHeat(tuple(attacks), tuple(defenses), tuple(shown), len(cells) - len(shown))


def _judge_attack(
    run: JudgedRun, setting: Setting, ran: Ran, *, with_metric: bool
) -> HeatLine | None:
    judged = judge([(ran.attack, ran.columns)], setting.record.data.batches)
    score = ran.attack.scores.get(judged.metric)
    if score is None or score.mean is None:
        return None
    return HeatLine(
        attack=run.labels.attack(ran.attack.spec) + (f" ({judged.metric})" if with_metric else ""),
        defense=run.labels.defense(setting.record),
        metric=judged.metric,
        score=score,
        verdict=judged.verdict,
        in_doubt=judged.may_be_more,
        settings=1,
        record=ran.source.id,
    )


def _choose_worst(lines: Sequence[HeatLine]) -> HeatLine:
    sign = 1 if lines[0].score.direction == "higher" else -1
    worst = max(lines, key=lambda line: (line.verdict == LEAKS, sign * (line.score.mean or 0.0)))
    return replace(worst, settings=len(lines))


def measure_leak(score: Score) -> float:
    """Returns how much leaks, 0 to 1, for the colour of a box.

    A fraction is taken as it is, an error by how far it lies below blind's; other units count as
    everything.
    """
    if (
        score.unit != "fraction"
        and score.direction == "lower"
        and score.mean is not None
        and score.blind
    ):
        return min(max(1 - score.mean / score.blind, 0.0), 1.0)
    if score.unit != "fraction" or score.mean is None:
        return 1.0
    return score.mean if score.direction == "higher" else 1 - score.mean


def draw_attack_heat(heat: AttackHeat) -> str:
    """Draws defenses down and attacks across.

    Names of attacks slant upwards, so that many fit a narrow page.
    """
    cells = {(cell.attack, cell.defense): cell for cell in heat.cells}
    names = {defense: _break_name(defense) for defense in heat.defenses}
    longest = max((len(line) for lines in names.values() for line in lines), default=4)
    highest = min(max((len(name) for name in heat.attacks), default=4), LONG)
    # Names slant by 40°, and so reach upwards by less than their length
    left, top = int(longest * LETTER) + MARGIN + 10, int(highest * LETTER * 0.75) + 2 * MARGIN + 12
    grid = HeatGrid(left, top, WIDTH, HEIGHT)
    width, height = left + len(heat.attacks) * WIDTH + 60, top + len(heat.defenses) * HEIGHT + 10
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="group" aria-label="Score of every attack under every defense; '
        'the same numbers are in the table below">'
    ]
    for column, attack in enumerate(heat.attacks):
        turn = f"translate({left + column * WIDTH + WIDTH / 2:g} {top - 8}) rotate(-40)"
        parts.append(f'<text transform="{turn}">{escape(_cut(attack, LONG))}</text>')
    for row, (defense, lines) in enumerate(names.items()):
        first = top + row * HEIGHT + 21 - LINE // 2 * (len(lines) - 1)
        parts += [
            f'<text x="{left - 8}" y="{y}" text-anchor="end">{escape(line)}</text>'
            for y, line in zip(count(first, LINE), lines, strict=False)
        ]
        parts += [
            grid.draw_box(row, column, _fill_box(cells.get((attack, defense)), attack, defense))
            for column, attack in enumerate(heat.attacks)
        ]
    return "".join([*parts, "</svg>"])


def _fill_box(cell: HeatLine | None, attack: str, defense: str) -> HeatBox:
    if cell is None:
        return HeatBox("", None, f"{attack} under {defense}: not run")
    shown = write_number(cell.score.mean, cell.score.unit) + ("?" if cell.in_doubt else "")
    return HeatBox(shown, measure_leak(cell.score), _describe_cell(cell))


def _describe_cell(cell: HeatLine) -> str:
    score = cell.score
    doubt = "; may be more: the search failed, could not be checked, or ignored the defense"
    most = f"; the most of {cell.settings} settings" if cell.settings > 1 else ""
    return (
        f"{cell.attack} under {cell.defense}: {cell.metric} {write_interval(score)}, "
        f"blind {write_number(score.blind, score.unit)}, n = {score.n}; "
        f"{cell.verdict}{doubt if cell.in_doubt else ''}{most}"
    )


def _write_score(cell: HeatLine) -> str:
    return write_interval(cell.score) + ("?" if cell.in_doubt else "")


def _list_cells(cell: HeatLine) -> list[str | Markup]:
    score = cell.score
    return [
        *(cell.attack, cell.defense, _write_score(cell)),
        *(write_number(score.blind, score.unit), write_gain(score), str(score.n)),
        *(cell.verdict, Markup("<code>{}</code>").format(cell.record)),
    ]


def _break_name(label: str) -> list[str]:
    """Breaks a name into one line or two, after a colon or comma: a phone is narrow."""
    if len(label) <= SHORT:
        return [label]
    cut = max(label.rfind(mark, 0, SHORT) for mark in ":,+ ") + 1 or SHORT
    return [label[:cut], _cut(label[cut:], SHORT)]


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"


# A trade-off and a leak map look alike: sentences, a picture, a table.
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
    needs = "tradeoff"
    template = TEMPLATE

    tradeoff: Tradeoff | None

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        return cls(_read_beside(run, "tradeoff.json", Tradeoff, "points", "audit"))

    def prepare(self, report: Report) -> Mapping[str, Any]:
        assert self.tradeoff is not None
        columns = [
            Column("defense"),
            *number_columns("gain over blind [95 %]", f"{self.tradeoff.utility} [95 %]"),
            *(Column("ε of the whole run"), Column("meets the target"), Column("verdict")),
        ]
        rows = [
            [
                point.defense,
                tradeoff_chart.write_point_gain(point),
                tradeoff_chart.write_utility(point.utility[self.tradeoff.utility]),
                tradeoff_chart.write_point_epsilon(point),
                ("yes" if self.tradeoff.meets(point) else "no")
                + (", in doubt" if point.in_doubt else ""),
                point.verdict,
            ]
            for point in self.tradeoff.points
        ]
        drawn = tradeoff_chart.draw_tradeoff(self.tradeoff, alone=False)
        return {
            "conclusions": list(tradeoff_chart.conclude(self.tradeoff)),
            "picture": Markup(embed(drawn, "tradeoff-picture")),
            "picture_name": self.heading,
            "table": draw_html_table(columns, rows, stacked=False),
            "table_name": "Trade-off",
        }

    def write_markdown(self, report: Report) -> Iterator[str]:
        if self.tradeoff is not None:
            yield from _list_sentences(self.heading, tradeoff_chart.conclude(self.tradeoff))


@dataclass(frozen=True)
class LeakMapOverLayers(Section):
    """The leak map of a run that `gradleak map` made."""

    name = "map"
    title = "Leak map"
    heading = "Leak map over layers"
    needs = "leak_map"
    template = TEMPLATE

    leak_map: HeatMap | None

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        return cls(_read_beside(run, "map.json", HeatMap, "cells", "record"))

    def prepare(self, report: Report) -> Mapping[str, Any]:
        assert self.leak_map is not None
        columns = [
            *(Column("layer"), Column("module")),
            *number_columns(f"{self.leak_map.metric} [95 %]", "parameters", "share"),
            *(Column("verdict"), Column("record")),
        ]
        rows = [
            [
                *(str(cell.layer), cell.module),
                write_interval(cell.scores[self.leak_map.metric])
                + ("?" if self.leak_map.in_doubt(cell) else ""),
                *(f"{cell.parameters:,}", f"{100 * cell.share:.2f} %", cell.verdict),
                Markup("<code>{}</code>").format(cell.record),
            ]
            for cell in self.leak_map.cells
        ]
        drawn = heat_map.draw_heat_map(self.leak_map, alone=False)
        return {
            "conclusions": list(heat_map.conclude(self.leak_map)),
            "picture": Markup(embed(drawn, "map-picture")),
            "picture_name": "Leak map over layers and modules",
            "table": draw_html_table(columns, rows, stacked=False),
            "table_name": self.title,
        }

    def write_markdown(self, report: Report) -> Iterator[str]:
        if self.leak_map is not None:
            yield from _list_sentences(self.heading, heat_map.conclude(self.leak_map))


def _read_beside(run: JudgedRun, name: str, wanted: Any, parts: str, record: str) -> Any:
    """Reads what a command left beside a run's records; none where it left nothing.

    Its parts name their records by id, and are judged by these as they are now. Records in the
    folder itself count: those below it are of other runs.
    """
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
    found = from_plain(wanted, plain, name)
    ids = {getattr(part, record) for part in getattr(found, parts)}
    beside = [one for one in run.summaries if one.path.parent == run.folder and one.id in ids]
    now = {summary.id: judge_summary(summary) for summary in beside}
    judged = tuple(
        replace(part, judgement=now.get(getattr(part, record), part.judgement))
        for part in getattr(found, parts)
    )
    return replace(found, **{parts: judged})


def _list_sentences(heading: str, sentences: Iterable[str]) -> Iterator[str]:
    yield from (f"## {heading}", "", *(f"- {one}" for one in sentences), "")
