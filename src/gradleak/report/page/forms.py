"""A report in each of its forms (HTML, PDF, Markdown and JSON), and a page over a folder of runs.

A page is one file that needs nothing else. Chromium prints it as PDF, with the page breaks of its
print style.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from gradleak.records.files import RecordError, write_whole
from gradleak.records.judgement import MISSING, Coverage
from gradleak.records.run_folder import FAILED_SUFFIX, read_run
from gradleak.records.schema import Record, now
from gradleak.records.store import RECORD, TRAININGS, Summary, read_summary
from gradleak.report.naming import write_component, write_defenses
from gradleak.report.numbers import (
    write_count,
    write_duration,
    write_gain,
    write_interval,
    write_number,
)
from gradleak.report.page.facts import WordLinks, explain_words
from gradleak.report.page.opening import Opening, reach_verdict
from gradleak.report.page.section import JudgedRun, Report
from gradleak.report.page.story import tell_story
from gradleak.report.table_markup import render

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
        "percent": lambda score: " %" if score.unit == "fraction" else "",
        "duration": write_duration,
    }
    page = render(
        _read_template("report.html"),
        report=report,
        happened=report.find(Opening).story.happened,
        sections=[
            (one, render(one.template, **known, section=one, **one.prepare(report)))
            for one in report.sections
            if one.is_shown
        ],
        css=_read_template("report.css"),
        js=_read_template("report.js"),
    )
    return str(page)  # what is put into it afterwards is not escaped


def write_markdown(report: Report) -> str:
    """Writes what words and tables can hold, for a pull request or a wiki."""
    shown = (section for section in report.sections if not section.is_empty)
    return "\n".join(line for one in shown for line in one.write_markdown(report)) + "\n"


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
            *(browser, *OFFLINE, f"--user-data-dir={folder}/profile", f"--print-to-pdf={printed}"),
            # root cannot have Chromium's sandbox
            *(["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []),
        ]
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


@cache
def _read_template(name: str) -> Markup:
    return Markup((files("gradleak.report.page") / "templates" / name).read_text("utf-8"))


WHOLES = {"map.json": "leak map", "tradeoff.json": "trade-off"}  # what records beside them make up
STATES = {
    "leaks": "leaks",
    "doubt": "in doubt",
    "quiet": "not shown to leak",
    "failed": "not finished",
    "broken": "cannot be read",
}
INDEX = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="gradleak">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>gradleak: runs in {{ title }}</title>
<style>{{ css }}</style>
</head>
<body>
<header>
<h1>{{ count }} in {{ title }}</h1>
<p class="soft small">Drawn {{ time(drawn) }} UTC, the latest run first.
  It shows no private data.</p>
</header>
<main>
<ul class="flags runs">
{% for run in runs %}
<li class="{{ run.state }}"><p><strong>
  {%- if run.report %}<a href="{{ quote(run.report) }}">{{ run.name }}</a>
  {%- else %}{{ run.name }}{% endif %}</strong>
  <span class="badge{{ " bad" if run.state in ("leaks", "broken") }}">{{ states[run.state] }}</span>
  <span class="soft small">
  {{- [time(run.created), records(run), run.folder]|select|join(" · ") }}</span></p>
<p>{{ run.sentence }}</p>
{% for note in run.notes %}
<p class="bad">{{ note }}</p>
{% endfor %}
{% if not run.report %}
<p class="soft small">No page yet: <code>gradleak report {{ run.folder }}</code></p>
{% endif %}
</li>
{% endfor %}
</ul>
</main>
</body>
</html>
"""


@dataclass(frozen=True)
class RunLine:
    """One study, or one audit by itself, as a line of the index."""

    name: str
    folder: str  # below the indexed one
    created: str  # of its last record
    records: int
    sentence: str
    state: str  # leaks, doubt, quiet, failed or broken
    notes: tuple[str, ...]  # failed cells, records that cannot be read
    report: str | None  # address of its page, where there is one


def read_runs(root: Path) -> list[RunLine]:
    """Reads all runs at and below a folder, the latest first.

    A record that cannot be read is named, and hides no other.
    """
    if not root.is_dir():
        raise RecordError(f"{root} is not a folder. Name the folder that was given as --out.")
    folders = sorted({path.parent for path in root.rglob(RECORD)} - set(root.rglob(TRAININGS)))
    if not folders:
        raise RecordError(f"{root} holds no records. Name the folder that was given as --out.")
    found = (run for folder in folders for run in _read_runs_of(folder, root))
    return sorted(found, key=lambda run: run.created, reverse=True)


def write_runs_page(title: str, runs: Sequence[RunLine]) -> str:
    """Writes the page over runs."""
    page = render(
        INDEX,
        title=title,
        runs=runs,
        count=write_count(len(runs), "run", "runs"),
        css=_read_template("report.css"),
        time=lambda created: created[:16].replace("T", " "),
        drawn=now(),
        quote=quote,
        records=lambda run: write_count(run.records, "record", "records"),
        states=STATES,
    )
    return str(page) + "\n"


def _read_runs_of(folder: Path, root: Path) -> Iterator[RunLine]:
    """Reads a study, a leak map or a trade-off as one run, and audits by themselves as one each."""
    summaries, broken = [], []
    for path in sorted(folder.glob(RECORD)):
        try:
            summaries.append(read_summary(path))
        except RecordError:
            broken.append(f"{path.name} cannot be read: delete it and run its audit again.")
    failed = len(list(folder.glob(f"*{FAILED_SUFFIX}")))
    notes = [*([f"{write_count(failed, 'cell', 'cells')} failed."] if failed else []), *broken]
    study = _read_study_name(folder)
    if study is not None and summaries:
        missing = len(read_run(folder).coverage.of(MISSING))
        if missing:
            cells = write_count(missing, "cell has", "cells have")
            notes.insert(0, f"{cells} no record: run the study to its end.")
        yield _describe_run(study, summaries, root, notes)
        return
    whole = next((what for file, what in WHOLES.items() if (folder / file).is_file()), None)
    if whole is not None and summaries:
        first = summaries[0].record
        name = f"{whole} of {first.target.name} on {write_component(first.spec.get('data'))}"
        yield _describe_run(name, summaries, root, notes)
        return
    yield from (_describe_run(name_audit(one.record), [one], root, []) for one in summaries)
    if notes or not summaries:
        yield RunLine(
            name=folder.name or str(folder),
            folder=str(folder),
            created="",
            records=0,
            sentence="Not all of this folder could be read."
            if broken
            else "Not every cell of this folder has a record.",
            state="broken" if broken else "failed",
            notes=tuple(notes),
            report=None,
        )


def _describe_run(
    name: str, summaries: Sequence[Summary], root: Path, notes: Sequence[str]
) -> RunLine:
    run = JudgedRun(summaries, Coverage(None, len(summaries)))
    verdict = reach_verdict(run)
    page = summaries[0].path.with_name("report.html")
    return RunLine(
        name=name,
        folder=str(page.parent),
        created=max(record.created for record in run.records),
        records=len(summaries),
        sentence=tell_story(run).happened,
        state="leaks" if verdict.leaks else "doubt" if verdict.in_doubt else "quiet",
        notes=tuple(notes),
        report=str(page.relative_to(root)) if page.is_file() else None,
    )


def name_audit(record: Record) -> str:
    """Names an audit as a person would: `minilm on canaries, no defense, by portfolio`."""
    view = write_component(record.spec.get("view", "everything"))
    seen = "" if view == "everything" else f" seen through {view}"
    return (
        f"{record.target.name}{seen} on {write_component(record.spec.get('data'))}, "
        f"{write_defenses(record.spec.get('defenses'))}, by {', '.join(record.attacks)}"
    )


def _read_study_name(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / "study.json").read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
