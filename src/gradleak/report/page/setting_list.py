"""The settings of a run, the ones that leak most first, with their verdicts and doubts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from gradleak.records.judgement import list_flags_beside
from gradleak.records.schema import Score
from gradleak.records.settings import Setting
from gradleak.report.numbers import write_gain, write_interval, write_number
from gradleak.report.page.opening import FlagLine, list_flags
from gradleak.report.page.section import JudgedRun, Report, Section, find_exact_score
from gradleak.report.table_markup import draw_markdown_table

ROWS = 100  # settings listed; each may need an interval of its own


@dataclass(frozen=True)
class SettingLine:
    """One client under all attacks run on it."""

    label: str
    records: tuple[str, ...]
    attacks: tuple[str, ...]
    metric: str  # the leading one: another of texts than of pictures
    score: Score  # of it, worst case
    exact: Score | None
    verdict: str  # leaks, not shown, or could not be judged
    leaks: bool
    flags: tuple[str, ...]
    doubts: tuple[FlagLine, ...]  # the same with their numbers and what they mean


@dataclass(frozen=True)
class SettingList(Section):
    """A line for each setting; one setting alone is told by the verdict."""

    name = "settings"
    title = "Settings"
    heading = "Settings, most leaking first"
    template = """
{% if report.settings_run > rows|length %}
<p class="soft">The first {{ rows|length }} of {{ report.settings_run }}.</p>
{% endif %}
<table class="stack">
  <caption>{{ term("worst case", "Worst case") }} over the attacks of a {{ term("setting") }},
    example by example; in % where a fraction. Reasons to doubt a row stand below it.</caption>
  <thead><tr><th scope="col">setting</th><th scope="col">verdict</th>
    <th scope="col" class="number">{{ measured|join(" or ") }} [95 %]</th>
    <th scope="col" class="number">blind</th>
    {%- if any_exact %}<th scope="col" class="number">word for word</th>{% endif %}</tr></thead>
  {% for row in rows %}
  <tbody>
    <tr><th scope="row">{{ row.label }}</th>
      <td data-label="verdict">
        {%- if row.leaks %}<strong class="bad">{{ term("leaks") }}</strong>
        {%- else %}{{ term(row.verdict) }}{% endif %}</td>
      <td class="number" data-label="{{ row.metric }} [95 %]">
        {{- row.metric ~ " " if measured|length > 1 }}{{ interval(row.score) }}</td>
      <td class="number" data-label="blind">{{ number(row.score.blind, row.score.unit) }}</td>
      {%- if any_exact %}
      <td class="number" data-label="word for word">
        {{- interval(row.exact) if row.exact else "–" }}</td>
      {%- endif %}</tr>
    {% if row.doubts %}
    <tr class="doubts"><td colspan="5"><details><summary>{{ row.doubts|length }}
      reason{{ "s" if row.doubts|length != 1 }} to doubt: {{ row.flags|join(", ") }}</summary>
      <ul>
        {%- for flag in row.doubts %}
        <li><strong>{{ explained(flag.name) }}</strong>
          {%- if flag.attacks %}
          <span class="soft">({{ flag.attacks|join(", ") }})</span>
          {%- endif %}:
          {{ flag.detail }}</li>
        {%- endfor %}
      </ul></details></td></tr>
    {% endif %}
  </tbody>
  {% endfor %}
</table>
"""

    settings: tuple[SettingLine, ...]  # not all where there are very many

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        return cls(tuple(_describe_setting(run, setting) for setting in run.settings[:ROWS]))

    @property
    def is_shown(self) -> bool:
        return len(self.settings) > 1

    @property
    def metrics(self) -> list[str]:
        """The leading metrics of these settings."""
        return list(dict.fromkeys(row.metric for row in self.settings))

    def prepare(self, report: Report) -> Mapping[str, Any]:
        any_exact = any(row.exact for row in self.settings)
        return {"rows": self.settings, "measured": self.metrics, "any_exact": any_exact}

    def write_markdown(self, report: Report) -> Iterator[str]:
        yield from (f"## {self.heading}", "", "Fractions in %; intervals over client batches.", "")
        score = f"{' or '.join(self.metrics)} [95 %]"
        head = ["setting", score, "blind", "gain", "word for word", "verdict", "flags"]
        yield from draw_markdown_table(head, [self._list_cells(row) for row in self.settings])

    def _list_cells(self, row: SettingLine) -> list[str]:
        metric = f"{row.metric} " if len(self.metrics) > 1 else ""
        return [
            row.label,
            metric + write_interval(row.score),
            write_number(row.score.blind, row.score.unit),
            write_gain(row.score),
            write_interval(row.exact) if row.exact else "–",
            row.verdict,
            ", ".join(row.flags),
        ]


def _describe_setting(run: JudgedRun, setting: Setting) -> SettingLine:
    judgement = run.judgements[setting]
    raised = [list_flags_beside(judgement, one.record) for one in setting.summaries]
    return SettingLine(
        label=run.labels.setting(setting.record),
        records=tuple(summary.id for summary in setting.summaries),
        attacks=tuple(run.labels.attack(ran.attack.spec) for ran in setting.attacks),
        metric=judgement.metric,
        score=setting.worst(judgement.metric),
        exact=find_exact_score(setting),
        verdict=judgement.verdict,
        leaks=judgement.leaks,
        flags=tuple(dict.fromkeys(name for flags in raised for name in flags)),
        doubts=tuple(list_flags(run, [setting])),
    )
