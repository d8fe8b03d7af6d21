"""What comes first in a report: the verdict over the run, its story and reasons to doubt it; then
the settings, the ones that leak most first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self

from gradleak.records.flags import FLAGS
from gradleak.records.judgement import (
    DOUBTS,
    LEAKS,
    NOT_JUDGED,
    NOT_SHOWN,
    Coverage,
    list_flags_beside,
)
from gradleak.records.schema import Record, Score
from gradleak.records.settings import Setting
from gradleak.report.numbers import write_blind, write_gain, write_interval, write_number
from gradleak.report.page.section import JudgedRun, Report, Section, find_exact_score
from gradleak.report.page.story import Story, tell_story
from gradleak.report.table_markup import draw_markdown_table
from gradleak.report.verdict import (
    count_verdicts,
    count_whole,
    write_conclusion,
    write_worst_case,
)

NO_PROOF = "That is not a proof of safety."
GAPS = 20  # shown on the page; report.json has all


@dataclass(frozen=True)
class ScoreLine:
    """One metric of the worst setting."""

    metric: str
    score: Score


@dataclass(frozen=True)
class FlagLine:
    """A reason to doubt, where it was raised, and what it means."""

    name: str
    attacks: tuple[str, ...]
    settings: int
    detail: str  # the numbers of the first that raised it
    meaning: str
    what_to_do: str
    lowers_trust: bool  # in a low score


@dataclass(frozen=True)
class Verdict:
    """What leaks, how much more than blind, who could do it, and why not to trust it."""

    # It leaks where any setting does, and else could not be judged where any setting could not.
    verdict: str
    leaks: bool
    in_doubt: bool  # nothing is shown to leak, and the attacks rather than the defense may be why
    headline: str
    sentences: tuple[str, ...]
    setting: str  # where most leaks
    exact: str  # "3 of 30", or nothing where it was not measured
    scores: tuple[ScoreLine, ...]  # of that setting, the worst case over attacks
    knowledge: tuple[str, ...]
    flags: tuple[FlagLine, ...]


@dataclass(frozen=True)
class Opening(Section):
    """The verdict and the story, with what is not in the numbers."""

    name = "verdict"
    title = heading = "Verdict"
    template = """
<div class="verdict {{ 'leaks' if verdict.leaks else 'doubt' if verdict.in_doubt else '' }}">
  <p class="headline">{{ verdict.headline }}</p>
  {% for sentence in verdict.sentences %}<p>{{ sentence }}</p>{% endfor %}
  {% if not verdict.leaks %}
  <p><strong>A low score bounds these attacks, not what a stronger one could do.</strong></p>
  {% endif %}
  <dl class="tiles">
    {% if lead %}
    <div><dt>{{ explained(report.metric) }}, {{ term("worst case") }}</dt><dd>
      {{- number(lead.mean, lead.unit) }}{{ percent(lead) -}}
      <small>95 % {{ term("interval") }}: {{ number(lead.low, lead.unit) }} to
        {{ number(lead.high, lead.unit) }}, n = {{ lead.n }}</small></dd></div>
    <div><dt>{{ term("blind guess") }}</dt><dd>
      {{- number(lead.blind, lead.unit) }}{{ percent(lead) -}}
      <small>same knowledge, no update</small></dd></div>
    <div><dt>{{ term("gain") }} over blind</dt><dd>
      {{- gain(lead) }}{{ percent(lead) -}}
      <small>what the update gave away</small></dd></div>
    {% endif %}
    {% if verdict.exact %}
    <div><dt>{{ term("word for word") }}</dt><dd>
      {{- verdict.exact }}<small>examples rebuilt whole</small></dd></div>
    {% endif %}
    {% if report.settings_run > 1 %}
    <div><dt>{{ term("setting", "settings") }} that leak</dt><dd>
      {{- report.settings_leaking }} of {{ report.settings_run -}}
      <small>the others: see below, none is called safe</small></dd></div>
    {% endif %}
  </dl>
</div>
<div class="story">
  {% for title, sentences in story_parts %}
  <div>
    <h3>{{ title }}</h3>
    <ul>{% for sentence in sentences %}<li>{{ sentence }}</li>{% endfor %}</ul>
  </div>
  {% endfor %}
</div>
{% if report.settings_run == 1 and verdict.flags %}
<h3>Reasons to doubt</h3>
<ul class="flags">
  {% for flag in verdict.flags %}
  <li class="{{ 'trust' if flag.lowers_trust }}">
    <p><strong>{{ flag.name }}</strong>
      <span class="soft small">{{ flag.attacks|join(", ") }}</span></p>
    <p>{{ flag.detail }} {{ flag.meaning }}</p><p class="soft">{{ flag.what_to_do }}</p>
  </li>
  {% endfor %}
</ul>
{% endif %}
{% if coverage.gaps %}
<h3 id="gaps">Not in these numbers</h3>
<p><strong>{{ coverage.sentence() }}</strong></p>
<ul>
  {%- for gap in coverage.gaps[:most_gaps] %}
  <li><strong>{{ gap.kind|replace("_", " ") }}</strong>: {{ gap.cell }}.
    <span class="soft">{{ gap.why }}</span></li>
  {%- endfor %}
  {%- if coverage.gaps|length > most_gaps %}
  <li>… and {{ coverage.gaps|length - most_gaps }} more.</li>
  {%- endif %}
</ul>
{% endif %}
<details><summary>All scores of the worst case</summary><table class="stack">
  <caption>{{ verdict.setting }}; fractions in %, intervals 95 % over client batches</caption>
  <thead><tr><th scope="col">metric</th><th scope="col" class="number">mean [95 %]</th>
    <th scope="col" class="number">blind</th><th scope="col" class="number">gain</th>
    <th scope="col" class="number">n</th></tr></thead>
  <tbody>
  {%- for one in verdict.scores %}
  <tr><th scope="row">{{ explained(one.metric) }}</th>
    <td class="number" data-label="mean [95 %]">{{ interval(one.score) }}</td>
    <td class="number" data-label="blind">{{ number(one.score.blind, one.score.unit) }}</td>
    <td class="number" data-label="gain">{{ gain(one.score) }}</td>
    <td class="number" data-label="n">{{ one.score.n }}</td></tr>
  {%- endfor %}
  </tbody>
</table></details>
"""

    story: Story
    verdict: Verdict
    coverage: Coverage  # cells that were meant and are missing, failed or unreadable

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        return cls(tell_story(run), reach_verdict(run), run.coverage)

    def prepare(self, report: Report) -> Mapping[str, Any]:
        leading = (one.score for one in self.verdict.scores if one.metric == report.metric)
        return {
            "verdict": self.verdict,
            "coverage": self.coverage,
            "lead": next(leading, None),
            "story_parts": self._story_parts,
            "most_gaps": GAPS,
        }

    def write_markdown(self, report: Report) -> Iterator[str]:
        yield from (f"# What leaks: {report.title}", "", f"**{self.story.happened}**", "")
        yield from (self.verdict.headline, "")
        yield from (*(f"- {sentence}" for sentence in self.verdict.sentences), "")
        if self.coverage.gaps:
            yield from ("## Not in these numbers", "", self.coverage.sentence(), "")
            gaps = (f"- {gap.kind}: {gap.cell}. {gap.why}" for gap in self.coverage.gaps)
            yield from (*gaps, "")
        for title, sentences in self._story_parts:
            yield from (f"## {title}", "", *(f"- {sentence}" for sentence in sentences), "")
        if self.verdict.flags:
            yield from ("## Reasons to doubt", "")
            for flag in self.verdict.flags:
                where = f" ({flag.settings} of {report.settings_run} settings)"
                named = f"`{flag.name}`{where if report.settings_run > 1 else ''}"
                yield f"- {named}: {flag.detail} {flag.meaning} {flag.what_to_do}"
            yield ""

    @property
    def _story_parts(self) -> Sequence[tuple[str, Sequence[str]]]:
        return (
            ("What it means", self.story.means),
            ("What was not tried", self.story.not_tried),
            ("What would change it", self.story.would_change),
        )


def reach_verdict(run: JudgedRun) -> Verdict:
    """Judges the run as a whole and says where most leaks."""
    worst = run.settings[0]
    record = worst.merge()
    exact = record.worst_case.get("exact_match")
    verdicts = {run.judgements[setting].verdict for setting in run.settings}
    verdict = next(one for one in (LEAKS, NOT_JUDGED, NOT_SHOWN) if one in verdicts)
    gaps = f" {run.coverage.sentence()}" if run.coverage.gaps else ""
    return Verdict(
        verdict=verdict,
        leaks=verdict == LEAKS,
        in_doubt=verdict == NOT_JUDGED,
        headline=_write_headline(run) + gaps,
        sentences=tuple(_explain_worst(run, worst, record)),
        setting=run.labels.setting(record),
        exact="" if exact is None else count_whole(exact),
        scores=tuple(
            ScoreLine(name, one) for name, one in record.worst_case.items() if one.mean is not None
        ),
        knowledge=tuple(_list_knowledge(worst)),
        flags=tuple(list_flags(run, run.settings)),
    )


def _write_headline(run: JudgedRun) -> str:
    share = count_verdicts([run.judgements[setting].verdict for setting in run.settings])
    leaking = run.leaking
    if not leaking:
        chance = "no attack is shown to have rebuilt more than a blind guess"
        return f"{share}{': ' if len(run.settings) == 1 else '; '}{chance}. {NO_PROOF}"
    first = run.judgements[leaking[0]]
    if first.named and not first.above_blind and not first.whole:
        batches = leaking[0].record.data.batches
        return (
            f"The updates themselves name every word in {first.named} of {batches} batches; no"
            " attack rebuilt more than a blind guess."
            + (f" {share}." if len(run.settings) > 1 else "")
        )
    by_metric = {run.judgements[setting].metric: setting for setting in reversed(leaking)}
    worst = sorted(by_metric.values(), key=leaking.index)
    quotes = (_quote_score(setting, run.judgements[setting].metric) for setting in worst)
    return f"{share}. In the worst, {'; '.join(quotes)}."


def _quote_score(setting: Setting, metric: str) -> str:
    score = setting.choose_quote(metric)
    blind = f"blind {write_blind(score)}, gain {write_gain(score)}"
    return f"{metric} {write_interval(score)}, {blind}" + (
        " (in %)" if score.unit == "fraction" else ""
    )


def _list_knowledge(setting: Setting) -> list[str]:
    return sorted({fact for ran in setting.attacks for fact in ran.attack.knowledge})


def _explain_worst(run: JudgedRun, worst: Setting, record: Record) -> Iterator[str]:
    judgement = run.judgements[worst]
    if len(run.settings) > 1:
        most = "Most was rebuilt under" if judgement.leaks else "The highest score is under"
        yield f"{most}: {run.labels.setting(record)}."
    yield from (write_worst_case(record), write_conclusion(judgement, record))
    known = ", ".join(_list_knowledge(worst)) or "nothing beyond the update"
    yield f"The attacker was told: {known}; attacks: {', '.join(record.attacks)}."


def list_flags(run: JudgedRun, settings: Sequence[Setting]) -> list[FlagLine]:
    """Lists every flag that stands against some settings of the run, each flag once."""
    found: dict[str, FlagLine] = {}
    for setting in settings:
        counted = set[str]()
        for record in (summary.record for summary in setting.summaries):
            for name, details in list_flags_beside(run.judgements[setting], record).items():
                line = found.get(name) or _explain_flag(name, next(iter(details.values())))
                attacks = [run.labels.attack(record.attacks[key].spec) for key in details if key]
                found[name] = replace(
                    line,
                    attacks=tuple(dict.fromkeys([*line.attacks, *attacks])),
                    settings=line.settings + (name not in counted),
                )
                counted.add(name)
    return sorted(found.values(), key=lambda line: not line.lowers_trust)


def _explain_flag(name: str, detail: str) -> FlagLine:
    flag = FLAGS.get(name)  # a later version may know more flags
    meaning, what_to_do = (flag.meaning, flag.what_to_do) if flag else ("", "")
    return FlagLine(name, (), 0, detail, meaning, what_to_do, name in DOUBTS)


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
        return {
            "rows": self.settings,
            "measured": self.metrics,
            "any_exact": any(row.exact for row in self.settings),
        }

    def write_markdown(self, report: Report) -> Iterator[str]:
        yield from (f"## {self.heading}", "", "Fractions in %; intervals over client batches.", "")
        yield from draw_markdown_table(
            [
                *("setting", f"{' or '.join(self.metrics)} [95 %]", "blind", "gain"),
                *("word for word", "verdict", "flags"),
            ],
            [self._list_cells(row) for row in self.settings],
        )

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
        flags=tuple(dict.fromkeys(chain.from_iterable(raised))),
        doubts=tuple(list_flags(run, [setting])),
    )
