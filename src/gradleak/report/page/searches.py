"""How searches went: the objective and the likeness of the guess, step by step."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Self

from markupsafe import Markup

from gradleak.records.schema import AttackRecord
from gradleak.records.settings import Ran, Setting
from gradleak.report.page.section import JudgedRun, Report, Section
from gradleak.report.shown_guesses import Secrets, choose_evenly, find_kept_secrets, split_words
from gradleak.report.table_markup import Column, draw_html_table, number_columns

LINES = 6  # searches drawn
POINTS = 60
LEFT, TOP, WIDTH, HEIGHT = 56, 14, 300, 150  # pixels: the frame of a picture
DECADES = 100  # a range this wide is drawn on a logarithmic scale


@dataclass(frozen=True)
class TracePoint:
    """One step of a search, over the batches that recorded it."""

    step: int
    median: float
    low: float
    high: float
    batches: int


@dataclass(frozen=True)
class TraceLine:
    """How an attack's objective fell and, where the secret is known, how like it the guess got."""

    attack: str
    setting: str
    record: str
    objective: tuple[TracePoint, ...]
    similarity: tuple[TracePoint, ...]


@dataclass(frozen=True)
class Searches(Section):
    """One search of each attack; attacks that record no steps have none. Markdown leaves it out."""

    name = "traces"
    title = "Over time"
    heading = "Searches over time"
    template = """
<p class="soft">The line is the median of the client batches; the band holds all of them.
  {%- if section.traces|selectattr("similarity")|list %}
  Likeness is the F1 of shared words, on batches of one example.{% endif %}</p>
<details class="fold"><summary>{{ section.traces|length }}
  search{{ "es" if section.traces|length != 1 }}</summary>
{% for trace in section.traces %}
<h3>{{ trace.attack }} <span class="soft small">{{ trace.setting }}</span></h3>
<div class="charts">
  {% if trace.objective|length > 1 %}
  {{ draw_search(trace.objective, "objective of " + trace.attack) }}
  {% endif %}
  {% if trace.similarity|length > 1 %}
  {{ draw_search(trace.similarity, "likeness of the guess to the secret", is_share=True) }}
  {% endif %}
</div>
<details class="screen"><summary>The numbers behind it</summary>
<div class="scroll" tabindex="0" role="region" aria-label="{{ trace.attack }} over time">
{{- draw_table(trace) }}</div></details>
{% endfor %}
</details>
"""

    traces: tuple[TraceLine, ...]

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        return cls(tuple(trace_searches(run)))

    @property
    def is_shown(self) -> bool:
        return bool(self.traces)

    def prepare(self, report: Report) -> Mapping[str, Any]:
        return {"draw_search": _draw_search, "draw_table": _draw_table}


def trace_searches(run: JudgedRun) -> list[TraceLine]:
    """Takes one search of each attack, under the setting that comes first."""
    firsts: dict[str, tuple[Setting, Ran]] = {}
    for setting in run.settings:
        for ran in setting.attacks:
            if not ran.source.has_details:
                continue
            firsts.setdefault(run.labels.attack(ran.attack.spec), (setting, ran))
    found = []
    for name, (setting, ran) in choose_evenly(list(firsts.items()), 2 * LINES):
        record = ran.source.whole()
        attack = ran.find_in(record)
        secrets = {**run.secrets_of(record), **find_kept_secrets(record)}
        objective, similarity = _trace_objective(attack), _trace_similarity(attack, secrets)
        if len(objective) > 1 or len(similarity) > 1:
            label = run.labels.setting(setting.record)
            found.append(TraceLine(name, label, record.id, tuple(objective), tuple(similarity)))
    return found[:LINES]


def measure_likeness(secret: str, guess: str) -> float:
    """Returns the F1 of shared words, each spent once: ROUGE-1 without special tokens."""
    known, guessed = Counter(split_words(secret)), Counter(split_words(guess))
    shared, total = sum((known & guessed).values()), known.total() + guessed.total()
    return 2 * shared / total if total else 0.0


def _trace_objective(attack: AttackRecord) -> list[TracePoint]:
    return _gather_points(
        (step, loss) for batch in attack.batches for step, loss in batch.losses if loss is not None
    )


def _trace_similarity(attack: AttackRecord, secrets: Secrets) -> list[TracePoint]:
    """Takes batches of one example: on the way, guesses are not yet aligned to secrets."""
    return _gather_points(
        (step, measure_likeness(secrets[batch.batch, 0], sentences[0]))
        for batch in attack.batches
        for step, sentences in batch.guesses
        if len(sentences) == 1 and (batch.batch, 0) in secrets
    )


def _gather_points(values: Iterable[tuple[int, float]]) -> list[TracePoint]:
    by_step: dict[int, list[float]] = {}
    for step, value in values:
        by_step.setdefault(step, []).append(value)
    found = []
    for step in choose_evenly(sorted(by_step), POINTS):
        here = by_step[step]
        found.append(TracePoint(step, statistics.median(here), min(here), max(here), len(here)))
    return found


def _draw_search(points: Sequence[TracePoint], title: str, *, is_share: bool = False) -> Markup:
    """Draws the median and the band of all batches over the steps; a share goes from 0 to 100 %."""
    low, high = min(point.low for point in points), max(point.high for point in points)
    if is_share:
        low, high = 0.0, 1.0
    logarithmic = not is_share and low > 0 and high / low >= DECADES
    scale = math.log10 if logarithmic else float
    bottom, top = scale(low), scale(high)
    last = max(point.step for point in points) or 1

    def place(step: int, value: float) -> str:
        height = (scale(value) - bottom) / (top - bottom) if top > bottom else 0.5
        return f"{LEFT + WIDTH * step / last:.1f},{TOP + HEIGHT * (1 - height):.1f}"

    band = [place(point.step, point.high) for point in points]
    band += [place(point.step, point.low) for point in reversed(points)]
    line = " ".join(place(point.step, point.median) for point in points)
    title = escape(title)
    right, below = LEFT + WIDTH, TOP + HEIGHT + 18
    parts = [
        (
            '<svg class="chart" viewBox="0 0 380 208" width="380" height="208" role="img" '
            f'aria-label="{title}">'
        ),
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<polygon class="band" points="{" ".join(band)}"/>',
        f'<polyline class="line" points="{line}"/>',
    ]
    for value, y in ((high, TOP + 4), (low, TOP + HEIGHT + 4)):
        tick = f"{100 * value:.0f} %" if is_share else f"{value:.2g}"
        parts.append(f'<text class="small" x="{LEFT - 6}" y="{y}" text-anchor="end">{tick}</text>')
    note = ", logarithmic" if logarithmic else ""
    parts += [
        f'<text class="small" x="{LEFT}" y="{below}">step 0</text>',
        f'<text class="small" x="{right}" y="{below}" text-anchor="end">step {last}</text>',
        f'<text class="small" x="{LEFT}" y="{below + 18}">{title}{note}</text></svg>',
    ]
    return Markup("".join(parts))


def _draw_table(trace: TraceLine) -> Markup:
    columns = [Column("what"), *number_columns("step", "median", "least", "most", "batches")]
    rows = [
        [
            what,
            str(one.step),
            *(f"{value:.4g}" for value in (one.median, one.low, one.high)),
            str(one.batches),
        ]
        for what, points in (("objective", trace.objective), ("likeness", trace.similarity))
        for one in points
    ]
    return draw_html_table(columns, rows, stacked=False)
