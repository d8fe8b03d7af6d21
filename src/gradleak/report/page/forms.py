"""A report in each of its forms: HTML, PDF, Markdown and JSON, with the JSON's schema.

The page is one file that needs nothing else. Chromium prints it as PDF, with the page breaks of its
print style.
"""

import json
import os
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from gradleak.records.errors import RecordError
from gradleak.records.files import write_whole
from gradleak.records.schema import Score
from gradleak.report.numbers import write_duration, write_gain, write_interval, write_number
from gradleak.report.page.facts import WordLinks, explain_words
from gradleak.report.page.opening import Opening
from gradleak.report.page.section import Report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OFFLINE = (
    "--headless=new --disable-gpu --disable-dev-shm-usage --no-first-run "
    "--disable-background-networking --disable-sync "
    "--disable-component-update --disable-extensions --disable-default-apps --no-pdf-header-footer"
).split()
PATIENCE = 120  # seconds


def write_html(report: Report) -> str:
    """Writes the page."""
    links = WordLinks(explain_words(report))
    known = {
        "report": report,
        "term": links.link,
        "explained": links.link_if_known,
        "number": write_number,
        "interval": write_interval,
        "gain": write_gain,
        "percent": _write_percent,
        "duration": write_duration,
    }
    insides = [
        (
            section,
            Markup(render(section.template, **known, section=section, **section.prepare(report))),
        )
        for section in report.sections
        if section.is_shown
    ]
    return render(
        _read_template("report.html"),
        report=report,
        happened=report.find(Opening).story.happened,
        sections=insides,
        css=Markup(read_style()),
        js=Markup(_read_template("report.js")),
    )


def write_markdown(report: Report) -> str:
    """Writes what words and tables can hold, for a pull request or a wiki."""
    lines = (line for section in report.sections for line in section.write_markdown(report))
    return "\n".join(lines) + "\n"


def write_json(report: Report) -> str:
    """Writes report.json, as docs/report.schema.json describes it."""
    return json.dumps(report.plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def find_browser() -> str:
    """Finds Chromium or one of its kind; where there is none, says what to do."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise RecordError(
            "A PDF is printed by Chromium, and there is none on the PATH. Install it (Debian, "
            "Ubuntu: apt install chromium), "
            "or write the HTML page and print it from any browser."
        )
    return found


def write_pdf(report: Report) -> bytes:
    """Prints the page. It lies in a private folder while the browser reads it."""
    browser = find_browser()
    with tempfile.TemporaryDirectory(prefix="gradleak-") as folder:
        source, printed = Path(folder) / "page.html", Path(folder) / "page.pdf"
        write_whole(source, write_html(report))
        words = [
            browser,
            *OFFLINE,
            f"--user-data-dir={folder}/profile",
            f"--print-to-pdf={printed}",
        ]
        words += (
            ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []
        )  # root cannot have Chromium's sandbox
        try:
            done = subprocess.run(
                [*words, source.as_uri()],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RecordError(
                f"{browser} did not print the page within {PATIENCE} s. Print the HTML page "
                "yourself."
            ) from error
        if not printed.is_file():
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise RecordError(
                f"{browser} could not print the page and said: {said}. Print the HTML page from "
                "any browser."
            )
        return printed.read_bytes()


def read_style() -> str:
    """Returns the look of the page, for pages beside it."""
    return _read_template("report.css")


def _write_percent(score: Score) -> str:
    return " %" if score.unit == "fraction" else ""


def render(template: str, **known: Any) -> str:
    """Fills in a template; what is not marked as HTML is escaped."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(known)


@cache
def _read_template(name: str) -> str:
    return (files("gradleak.report.page") / "templates" / name).read_text(encoding="utf-8")
