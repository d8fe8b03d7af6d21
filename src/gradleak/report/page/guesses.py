"""The guesses of attacks: how searches came to them, and what they are beside the secrets.

Without --show-secrets nothing of them is in a report: the words are withheld here, before anything
is drawn, so that no form of it can show any.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Self

from markupsafe import Markup

from gradleak.records.judgement import leading_metric
from gradleak.records.schema import ExampleRecord
from gradleak.records.settings import Ran, Setting
from gradleak.report.numbers import write_number
from gradleak.report.page.opening import Opening, SettingList
from gradleak.report.page.section import JudgedRun, Report, Section
from gradleak.report.shown_guesses import (
    WORD,
    WordMark,
    choose_evenly,
    find_hashes,
    is_picture,
    make_printable,
    mark_words,
    split_words,
)
from gradleak.report.table_markup import (
    Column,
    draw_html_table,
    draw_markdown_table,
    number_columns,
    render,
)

LINES = 6  # searches drawn
POINTS = 60
LEFT, TOP, WIDTH, HEIGHT = 56, 14, 300, 150  # pixels: the frame of a picture
DECADES = 100  # a range this wide is drawn on a logarithmic scale
SEARCH = """
<svg class="chart" viewBox="0 0 380 208" width="380" height="208" role="img" aria-label="
{{- title }}"><rect class="frame" {{ frame|safe }}/>
{#- #}<polygon class="band" points="{{ band|join(" ") }}"/>
{#- #}<polyline class="line" points="{{ line|join(" ") }}"/>
{%- for y, tick in ticks -%}
<text class="small" x="{{ left - 6 }}" y="{{ y }}" text-anchor="end">{{ tick }}</text>
{%- endfor -%}
<text class="small" x="{{ left }}" y="{{ below }}">step 0</text>
{#- #}<text class="small" x="{{ right }}" y="{{ below }}" text-anchor="end">step {{ last }}</text>
{#- #}<text class="small" x="{{ left }}" y="{{ below + 18 }}">{{ title }}{{ note }}</text></svg>
""".strip()


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
    needs = "traces"
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
        return cls(tuple(islice(trace_searches(run), LINES)))

    def prepare(self, report: Report) -> Mapping[str, Any]:
        return {"draw_search": _draw_search, "draw_table": _draw_table}


def trace_searches(run: JudgedRun) -> Iterator[TraceLine]:
    """Yields one search of each attack, under the setting that comes first."""
    firsts: dict[str, tuple[Setting, Ran]] = {}
    for setting in run.settings:
        for ran in setting.attacks:
            firsts.setdefault(run.labels.attack(ran.attack.spec), (setting, ran))
    for name, (setting, ran) in choose_evenly(list(firsts.items()), 2 * LINES):
        if ran.source.has_details:
            line = _trace_search(run, name, setting, ran)
            if len(line.objective) > 1 or len(line.similarity) > 1:
                yield line


def _trace_search(run: JudgedRun, name: str, setting: Setting, ran: Ran) -> TraceLine:
    record = ran.source.whole()
    attack, secrets = ran.find_in(record), run.find_secrets(record)
    objective = _gather_points(
        (step, loss) for batch in attack.batches for step, loss in batch.losses if loss is not None
    )
    # Of batches of one example: on the way, guesses are not yet aligned to secrets
    similarity = _gather_points(
        (step, measure_likeness(secrets[batch.batch, 0], sentences[0]))
        for batch in attack.batches
        for step, sentences in batch.guesses
        if len(sentences) == 1 and (batch.batch, 0) in secrets
    )
    return TraceLine(name, run.labels.setting(setting.record), record.id, objective, similarity)


def measure_likeness(secret: str, guess: str) -> float:
    """Returns the F1 of shared words, each spent once: ROUGE-1 without special tokens."""
    known, guessed = Counter(split_words(secret)), Counter(split_words(guess))
    shared, total = sum((known & guessed).values()), known.total() + guessed.total()
    return 2 * shared / total if total else 0.0


def _gather_points(values: Iterable[tuple[int, float]]) -> tuple[TracePoint, ...]:
    by_step: dict[int, list[float]] = {}
    for step, value in values:
        by_step.setdefault(step, []).append(value)
    return tuple(
        TracePoint(step, statistics.median(here), min(here), max(here), len(here))
        for step, here in choose_evenly(sorted(by_step.items()), POINTS)
    )


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

    return render(
        SEARCH,
        frame=f'x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"',
        band=[
            *(place(point.step, point.high) for point in points),
            *(place(point.step, point.low) for point in reversed(points)),
        ],
        line=[place(point.step, point.median) for point in points],
        ticks=[
            (y, f"{100 * value:.0f} %" if is_share else f"{value:.2g}")
            for value, y in ((high, TOP + 4), (low, TOP + HEIGHT + 4))
        ],
        left=LEFT,
        right=LEFT + WIDTH,
        below=TOP + HEIGHT + 18,
        last=last,
        title=title,
        note=", logarithmic" if logarithmic else "",
    )


def _draw_table(trace: TraceLine) -> Markup:
    return draw_html_table(
        [Column("what"), *number_columns("step", "median", "least", "most", "batches")],
        [
            [
                *(what, str(one.step)),
                *(f"{value:.4g}" for value in (one.median, one.low, one.high)),
                str(one.batches),
            ]
            for what, points in (("objective", trace.objective), ("likeness", trace.similarity))
            for one in points
        ],
        stacked=False,
    )


ITEMS = 200
PAIRS = 40  # attacks on settings, of which guesses are shown
NAMES = {WordMark.PAIR: "pair", WordMark.WORD: "word", WordMark.WRONG: "wrong"}
TITLES = {"pair": "right pair", "word": "right word", "wrong": "wrong", "unknown": "not compared"}
IN_MARKDOWN = {"pair": "**{}**", "word": "_{}_", "wrong": "{}", "unknown": "{}"}
BLOCK = "▇▇▇"  # a word withheld: always as long, so that not even its length is told


@dataclass(frozen=True)
class Word:
    """A word of a guess; no text where it is withheld."""

    mark: str  # pair, word, wrong, or unknown where the secret is not at hand
    text: str | None


@dataclass(frozen=True)
class GalleryItem:
    """One secret beside one guess."""

    attack: str
    defense: str
    setting: str
    batch: int
    position: int
    record: str
    secret_hash: str
    secret: str | None  # a text, or a picture as a data URI
    words: tuple[Word, ...]
    picture: str | None  # the guess as a data URI, where it is a picture
    metric: str  # the leading one
    unit: str
    score: float | None  # by it
    exact: bool
    certified: bool


@dataclass(frozen=True)
class GuessGallery(Section):
    """The first examples of every attack, not the best: chosen ones would flatter it."""

    name = "guesses"
    title = "Guesses"
    heading = "Secrets beside guesses"
    template = """
{% macro picture(address, name) %}<img class="pixels" src="{{ address }}" alt="{{ name }}">
  {%- endmacro %}
<p class="soft">
  {%- if report.redacted %}Private data is withheld: a good guess is the secret itself.
  {%- if any_words %} Each block stands for a word of the guess.{% endif %}
  Run <code>gradleak report --show-secrets</code> where you may see them.
  {%- else %}<strong>These are private.</strong> Keep this page as you keep the data.{% endif %}
  The first examples of each attack, not the best.
  {%- if any_words %}
  <mark class="pair">right, beside its right neighbour</mark>,
  <mark class="word">right word, elsewhere</mark>, <mark>wrong</mark>.{% endif %}</p>
{% if items %}
<details class="fold"><summary>{{ items|length }} guess{{ "es" if items|length != 1 }}</summary>
<p class="paper">One of each attack and setting is printed; the page has them all.</p>
<div class="controls" id="gallery-controls" hidden>
  <label>Attack <select id="gallery-attack"><option value="">all</option>
    {%- for name in items|map(attribute="attack")|unique %}<option>{{ name }}</option>{% endfor -%}
  </select></label>
  <label>Defense <select id="gallery-defense"><option value="">all</option>
    {%- for name in items|map(attribute="defense")|unique %}<option>{{ name }}</option>{% endfor -%}
  </select></label>
  <label>Show <select id="gallery-kind"><option value="">every guess</option>
    {%- if any_exact %}<option value="exact">word for word</option>{% endif %}
    <option value="certified">proven by the update</option></select></label>
  <label>Order <select id="gallery-order"><option value="run">as run</option>
    <option value="most">most rebuilt first</option>
    <option value="least">least rebuilt first</option></select></label>
  <label>Contains <input id="gallery-words" type="search" autocomplete="off"></label>
  <span id="gallery-shown" class="soft small" role="status" aria-live="polite"></span>
</div>
<ul class="gallery" id="gallery">
  {% for item in items %}
  <li data-attack="{{ item.attack }}"{% if item.batch == 0 and item.position == 0 %} class="first"
    {%- endif %} data-defense="{{ item.defense }}" data-score="{{ score_of(item) }}"
    data-exact="{{ 'yes' if item.exact else 'no' }}"
    data-certified="{{ 'yes' if item.certified else 'no' }}">
    <p class="head"><b>{{ item.attack }}</b><span>{{ item.setting }}</span>
      {#- #}<span>batch {{ item.batch }}
      {%- if item.position %}, example {{ item.position }}{% endif %}</span>
      {%- if item.score is not none -%}
      <span>{{ item.metric }} {{ number(item.score, item.unit) }}</span>
      {%- endif %}
      {%- if item.exact %}<span class="badge bad">word for word</span>{% endif %}
      {%- if item.certified %}<span class="badge">proven by the update</span>{% endif %}</p>
    <div class="row"><span>secret</span><span>
      {%- if item.secret is none %}<span class="soft">withheld (hash {{ item.secret_hash }})</span>
      {%- elif is_picture(item.secret) %}{{ picture(item.secret, "the secret") }}
      {%- else %}{{ item.secret }}
      {%- endif %}</span></div>
    <div class="row"><span>guess</span><span>
      {%- if item.picture is not none %}{{ picture(item.picture, "the guess") }}
      {%- elif item.words %}<span class="visually-hidden">{{ in_words(item) }}</span>
      {%- for word in item.words %}{{ " " if not loop.first -}}
      <mark class="{{ word.mark }}" title="{{ titles[word.mark] }}"
        {%- if word.text is none %} aria-hidden="true">{{ block }}
        {%- else %}>{{ word.text }}{% endif %}</mark>
      {%- endfor %}
      {%- else %}<span class="soft">none kept, or withheld</span>
      {%- endif %}</span></div>
  </li>
  {%- endfor %}
</ul></details>
{% else %}<p>No guesses were kept.</p>{% endif %}
"""

    gallery: tuple[GalleryItem, ...]

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        pairs = [(one, ran) for one in run.settings_by_name for ran in one.attacks]
        chosen = choose_evenly(pairs, PAIRS)
        each = max(3, ITEMS // max(1, len(chosen)))
        shown = (_show_guesses(run, setting, ran, each) for setting, ran in chosen)
        return cls(tuple(chain.from_iterable(shown)))

    def prepare(self, report: Report) -> Mapping[str, Any]:
        rows = report.find(SettingList).settings
        lower = {row.metric for row in rows if row.score.direction == "lower"}

        def score_of(item: GalleryItem) -> float | str:
            """What the page sorts by: more is more leak."""
            if item.score is None:
                return ""
            return -item.score if item.metric in lower else item.score

        return {
            "items": self.gallery,
            "any_words": any(item.words for item in self.gallery),
            "any_exact": report.find(Opening).verdict.exact,
            "score_of": score_of,
            "is_picture": is_picture,
            "in_words": _describe_guess,
            "titles": TITLES,
            "block": BLOCK,
        }

    def write_markdown(self, report: Report) -> Iterator[str]:
        privacy = "Texts are withheld." if report.redacted else "These are private texts."
        legend = "**Right beside its right neighbour**, _right word elsewhere_, wrong."
        yield from (f"## {self.heading}", "", f"{legend} {privacy}", "")
        yield from draw_markdown_table(
            ["attack", "defense", "secret", "guess", report.metric],
            [_list_cells(item) for item in self.gallery],
        )


def _show_guesses(run: JudgedRun, setting: Setting, ran: Ran, most: int) -> Iterator[GalleryItem]:
    if ran.source.has_details:
        record = ran.source.whole()
        secrets, hashes = run.find_secrets(record), find_hashes(record)
        for example in ran.find_in(record).examples[:most]:
            place = (example.batch, example.position)
            yield _compare(run, setting, ran, example, secrets.get(place), hashes.get(place, ""))


def _compare(
    run: JudgedRun, setting: Setting, ran: Ran, example: ExampleRecord, secret: str | None, key: str
) -> GalleryItem:
    metric = leading_metric(ran.attack.scores)
    pictured, show = is_picture(example.guess), run.shows_secrets
    return GalleryItem(
        attack=run.labels.attack(ran.attack.spec),
        defense=run.labels.defense(setting.record),
        setting=run.labels.setting(setting.record),
        batch=example.batch,
        position=example.position,
        record=ran.source.id,
        secret_hash=key[:12],
        secret=make_printable(secret) if show and secret is not None else None,
        words=() if pictured else tuple(_mark_guess(secret, example.guess, show)),
        picture=example.guess if show and pictured else None,
        metric=metric,
        unit=ran.attack.scores[metric].unit if metric in ran.attack.scores else "",
        score=example.values.get(metric),
        exact=example.values.get("exact_match") == 1,
        certified=example.certified,
    )


def _mark_guess(secret: str | None, guess: str | None, show: bool) -> Iterator[Word]:
    written = WORD.findall(guess or "")  # what mark_words returns is in small letters
    marks = ["unknown"] * len(written)
    if secret is not None and guess is not None:
        marks = [NAMES[mark] for _, mark in mark_words(secret, guess)]
    for mark, text in zip(marks, written, strict=True):
        yield Word(mark, make_printable(text) if show else None)


def _describe_guess(item: GalleryItem) -> str:
    """Says how many of its words are right, for who cannot see their marks."""
    marks = [word.mark for word in item.words]
    count = f"{marks.count('pair') + marks.count('word')} of {len(marks)} words right: "
    withheld = "text withheld" if item.words[0].text is None else ""
    return ("" if {*marks} == {"unknown"} else count) + withheld


def _list_cells(item: GalleryItem) -> list[str]:
    words = (IN_MARKDOWN[word.mark].format(word.text or BLOCK) for word in item.words)
    return [
        *(item.attack, item.defense, item.secret or f"hash {item.secret_hash}", " ".join(words)),
        write_number(item.score, item.unit),
    ]
