"""A report as one HTML file that needs nothing else."""

from functools import cache
from importlib.resources import files

from jinja2 import Environment
from markupsafe import Markup, escape

from gradleak.records.judgement import RULES
from gradleak.records.schema import Score
from gradleak.report.numbers import duration, gain, mean_and_interval, number
from gradleak.report.page import attack_heat, glossary, trace_picture
from gradleak.report.page.gallery import PICTURE
from gradleak.report.page.section import GalleryItem, Report
from gradleak.report.pictures import heat_map, heat_picture, tradeoff_chart, tradeoff_picture
from gradleak.report.pictures.svg import inline

BLOCK = "▇▇▇"  # a word withheld: always as long, so that not even its length is told
MARKS = {"pair": "right pair", "word": "right word", "wrong": "wrong", "unknown": "not compared"}


def html(report: Report) -> str:
    """The page."""
    lead = next((one.score for one in report.verdict.scores if one.metric == report.metric), None)
    return (
        _environment()
        .from_string(_file("report.html"))
        .render(
            report=report,
            verdict=report.verdict,
            glossary=glossary.entries(report),
            anchor=glossary.anchor,
            lead=lead,
            sections=_sections(report),
            css=Markup(_file("report.css")),
            js=Markup(_file("report.js")),
            heat_svg=Markup(attack_heat.svg(report.heat)),
            tradeoff_svg=report.tradeoff
            and Markup(inline(tradeoff_picture.svg(report.tradeoff, alone=False), "tradeoff-picture")),
            tradeoff_says=list(tradeoff_chart.conclusions(report.tradeoff)) if report.tradeoff else [],
            map_svg=report.leak_map and Markup(inline(heat_picture.svg(report.leak_map, alone=False), "map-picture")),
            map_says=list(heat_map.conclusions(report.leak_map)) if report.leak_map else [],
            trace_svg=lambda points, title, percent: Markup(trace_picture.svg(points, title, percent=percent)),
            guess=_guess,
            secret=_secret,
            lower={row.metric for row in report.settings if row.score.direction == "lower"},
            number=number,
            interval=mean_and_interval,
            gain=gain,
            metrics=" or ".join(dict.fromkeys(row.metric for row in report.settings)),
            measured=list(dict.fromkeys(row.metric for row in report.settings)),
            mixed=len({row.metric for row in report.settings}) > 1,
            rules=RULES,
            duration=duration,
            percent=_percent,
            gain_text=tradeoff_chart.gain_text,
            utility_text=tradeoff_chart.utility_text,
            epsilon_text=tradeoff_chart.epsilon_text,
        )
    )


def _sections(report: Report) -> list[tuple[str, str]]:
    there = {
        "verdict": ("Verdict", True),
        "threat": ("Who attacks", True),
        "settings": ("Settings", len(report.settings) > 1),
        "heat": ("Attacks × defenses", True),
        "tradeoff": ("Leakage against utility", report.tradeoff is not None),
        "map": ("Leak map", report.leak_map is not None),
        "traces": ("Over time", bool(report.traces)),
        "guesses": ("Guesses", True),
        "cost": ("Cost", True),
        "provenance": ("Provenance", True),
        "reproduce": ("Reproduce", True),
        "glossary": ("Words", True),
    }
    return [(name, title) for name, (title, shown) in there.items() if shown]


def _guess(item: GalleryItem) -> Markup:
    """The words, marked; in words for who cannot see the marks."""
    if item.picture is not None:
        return _picture(item.picture, "the guess")
    if not item.words:
        return Markup('<span class="soft">none kept, or withheld</span>')
    right = sum(word.mark in ("pair", "word") for word in item.words)
    compared = any(word.mark != "unknown" for word in item.words)
    told = f"{right} of {len(item.words)} words right: " if compared else ""
    marked = " ".join(
        f'<mark class="{word.mark}" title="{MARKS[word.mark]}"'
        + (f' aria-hidden="true">{BLOCK}' if word.text is None else f">{escape(word.text)}")
        + "</mark>"
        for word in item.words
    )
    withheld = "text withheld" if item.words[0].text is None else ""
    return Markup(f'<span class="visually-hidden">{told}{withheld}</span>{marked}')


def _secret(item: GalleryItem) -> Markup:
    if item.secret is None:
        return Markup('<span class="soft">withheld (hash {})</span>').format(item.secret_hash)
    return _picture(item.secret, "the secret") if item.secret.startswith(PICTURE) else escape(item.secret)


def _picture(address: str, name: str) -> Markup:
    return Markup('<img class="pixels" src="{}" alt="{}">').format(address, name)


def _percent(score: Score) -> str:
    return " %" if score.unit == "fraction" else ""


def style() -> str:
    """The look of the page, for pages beside it."""
    return _file("report.css")


@cache
def _environment() -> Environment:
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)


@cache
def _file(name: str) -> str:
    return (files("gradleak.report.page") / "templates" / name).read_text(encoding="utf-8")
