"""Secrets beside guesses, word by word.

Without --show-secrets nothing of them is in a report: the words are withheld here, before anything
is drawn, so that no form of it can show any.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from markupsafe import Markup, escape

from gradleak.records.judgement import leading_metric
from gradleak.records.schema import ExampleRecord
from gradleak.records.settings import Ran, Setting
from gradleak.report.numbers import write_number
from gradleak.report.page.opening import Opening
from gradleak.report.page.section import JudgedRun, Report, Section
from gradleak.report.page.setting_list import SettingList
from gradleak.report.shown_guesses import (
    WORD,
    WordMark,
    choose_evenly,
    find_kept_secrets,
    is_picture,
    make_printable,
    mark_words,
)
from gradleak.report.table_markup import draw_markdown_table

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
    <div class="row"><span>secret</span><span>{{ secret(item) }}</span></div>
    <div class="row"><span>guess</span><span>{{ guess(item) }}</span></div>
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
        items = [item for setting, ran in chosen for item in _show_guesses(run, setting, ran, each)]
        return cls(tuple(items))

    def prepare(self, report: Report) -> Mapping[str, Any]:
        settings = report.find(SettingList).settings
        lower = {row.metric for row in settings if row.score.direction == "lower"}

        def score_of(item: GalleryItem) -> float | str:
            """What the page sorts by: more is more leak."""
            if item.score is None:
                return ""
            return (-1 if item.metric in lower else 1) * item.score

        return {
            "items": self.gallery,
            "any_words": any(item.words for item in self.gallery),
            "any_exact": report.find(Opening).verdict.exact,
            "score_of": score_of,
            "secret": _draw_secret,
            "guess": _draw_guess,
        }

    def write_markdown(self, report: Report) -> Iterator[str]:
        privacy = "Texts are withheld." if report.redacted else "These are private texts."
        legend = "**Right beside its right neighbour**, _right word elsewhere_, wrong."
        yield from (f"## {self.heading}", "", f"{legend} {privacy}", "")
        head = ["attack", "defense", "secret", "guess", report.metric]
        yield from draw_markdown_table(head, [_list_cells(item) for item in self.gallery])


def _show_guesses(run: JudgedRun, setting: Setting, ran: Ran, most: int) -> Iterator[GalleryItem]:
    if not ran.source.has_details:
        return
    record = ran.source.whole()
    secrets = {**run.secrets_of(record), **find_kept_secrets(record)}
    hashes = {(secret.batch, secret.position): secret.hash for secret in record.secrets}
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
    if guess is None:
        return
    written = WORD.findall(guess)  # what mark_words returns is in small letters
    marks = ["unknown"] * len(written)
    if secret is not None:
        marks = [NAMES[mark] for _, mark in mark_words(secret, guess)]
    for mark, text in zip(marks, written, strict=True):
        yield Word(mark, make_printable(text) if show else None)


def _draw_guess(item: GalleryItem) -> Markup:
    """Draws the words with their marks, and says in words how many are right."""
    if item.picture is not None:
        return _draw_picture(item.picture, "the guess")
    if not item.words:
        return Markup('<span class="soft">none kept, or withheld</span>')
    right = sum(word.mark in ("pair", "word") for word in item.words)
    compared = any(word.mark != "unknown" for word in item.words)
    count = f"{right} of {len(item.words)} words right: " if compared else ""
    withheld = "text withheld" if item.words[0].text is None else ""
    marked = Markup(" ").join(map(_draw_word, item.words))
    return Markup('<span class="visually-hidden">{}{}</span>{}').format(count, withheld, marked)


def _draw_word(word: Word) -> Markup:
    hidden = Markup(' aria-hidden="true"') if word.text is None else Markup("")
    text = BLOCK if word.text is None else word.text
    mark = Markup('<mark class="{}" title="{}"{}>{}</mark>')
    return mark.format(word.mark, TITLES[word.mark], hidden, text)


def _draw_secret(item: GalleryItem) -> Markup:
    if item.secret is None:
        return Markup('<span class="soft">withheld (hash {})</span>').format(item.secret_hash)
    return (
        _draw_picture(item.secret, "the secret") if is_picture(item.secret) else escape(item.secret)
    )


def _draw_picture(address: str, name: str) -> Markup:
    return Markup('<img class="pixels" src="{}" alt="{}">').format(address, name)


def _list_cells(item: GalleryItem) -> list[str]:
    words = (IN_MARKDOWN[word.mark].format(word.text or BLOCK) for word in item.words)
    secret = item.secret or f"hash {item.secret_hash}"
    return [item.attack, item.defense, secret, " ".join(words), write_number(item.score, item.unit)]
