"""A page over a folder of runs: what each was about, what came of it, and where its report is."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from gradleak.records.errors import RecordError
from gradleak.records.judgement import MISSING, Coverage
from gradleak.records.run_folder import FAILED_SUFFIX, read_run
from gradleak.records.schema import Record, now
from gradleak.records.store import RECORD, TRAININGS, Summary, read_summary
from gradleak.report.naming import write_component, write_defenses
from gradleak.report.numbers import write_count
from gradleak.report.page.forms import read_style, render
from gradleak.report.page.opening import reach_verdict
from gradleak.report.page.section import JudgedRun
from gradleak.report.page.story import tell_story

WHOLES = {"map.json": "leak map", "tradeoff.json": "trade-off"}  # what records beside them make up
STATES = {
    "leaks": "leaks",
    "doubt": "in doubt",
    "quiet": "not shown to leak",
    "failed": "not finished",
    "broken": "cannot be read",
}
TEMPLATE = """<!doctype html>
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
    found = [run for folder in folders for run in _read_runs_of(folder, root)]
    return sorted(found, key=lambda run: run.created, reverse=True)


def write_runs_page(title: str, runs: Sequence[RunLine]) -> str:
    """Writes the page."""
    return (
        render(
            TEMPLATE,
            title=title,
            runs=runs,
            count=write_count(len(runs), "run", "runs"),
            css=Markup(read_style()),
            time=lambda created: created[:16].replace("T", " "),
            drawn=now(),
            quote=quote,
            records=lambda run: write_count(run.records, "record", "records"),
            states=STATES,
        )
        + "\n"
    )


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
        yield _describe_run(study, summaries, folder, root, notes)
        return
    whole = next((what for file, what in WHOLES.items() if (folder / file).is_file()), None)
    if whole is not None and summaries:
        first = summaries[0].record
        name = f"{whole} of {first.target.name} on {write_component(first.spec.get('data'))}"
        yield _describe_run(name, summaries, folder, root, notes)
        return
    for summary in summaries:
        yield _describe_run(name_audit(summary.record), [summary], folder, root, [])
    if notes or not summaries:
        here = folder.name or str(folder)
        yield RunLine(
            here,
            _name_folder(folder, root),
            "",
            0,
            *(
                ("Not all of this folder could be read.", "broken")
                if broken
                else ("Not every cell of this folder has a record.", "failed")
            ),
            tuple(notes),
            None,
        )


def _describe_run(
    name: str, summaries: Sequence[Summary], folder: Path, root: Path, notes: Sequence[str]
) -> RunLine:
    records = [summary.record for summary in summaries]
    run = JudgedRun(summaries, Coverage(None, len(records)))
    verdict = reach_verdict(run)
    page = folder / "report.html"
    return RunLine(
        name=name,
        folder=_name_folder(folder, root),
        created=max(record.created for record in records),
        records=len(records),
        sentence=tell_story(run).happened,
        state="leaks" if verdict.leaks else "doubt" if verdict.in_doubt else "quiet",
        notes=tuple(notes),
        report=str(page.relative_to(root)) if page.is_file() else None,
    )


def name_audit(record: Record) -> str:
    """Names an audit as a person would: `minilm on canaries, no defense, by portfolio`."""
    kept = write_defenses(record.spec.get("defenses"))
    view = write_component(record.spec.get("view", "everything"))
    seen = "" if view == "everything" else f" seen through {view}"
    return (
        f"{record.target.name}{seen} on {write_component(record.spec.get('data'))}, {kept}, by "
        f"{', '.join(record.attacks)}"
    )


def _read_study_name(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / "study.json").read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _name_folder(folder: Path, root: Path) -> str:
    return str(root if folder == root else root / folder.relative_to(root))
