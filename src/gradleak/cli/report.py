"""`gradleak report`: a run as one page that people read."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gradleak.cli.command import RecordPath, open_terminal, option
from gradleak.core.errors import GradleakError
from gradleak.report.numbers import write_count

if TYPE_CHECKING:
    from gradleak.report.page.section import Report
    from gradleak.report.shown_guesses import SecretsOf

SUFFIXES = {"html": ".html", "pdf": ".pdf", "markdown": ".md", "json": ".json"}


def report(
    run: RecordPath,
    out: Annotated[
        Path | None, option("File to write. [report.html, .pdf, .md or .json in the run's folder]")
    ] = None,
    form: Annotated[
        str,
        option(
            "html (one file, no network), pdf (printed by Chromium), markdown, or json"
            " (docs/report.schema.json). [html]",
            "--format",
        ),
    ] = "html",
    show_secrets: Annotated[
        bool,
        option(
            "Show private texts and guesses; otherwise none of them is in the file.",
            "--show-secrets",
        ),
    ] = False,
    index: Annotated[
        bool,
        option(
            "Write index.html instead: every run at and below the folder, with a sentence and a"
            " link.",
            "--index",
        ),
    ] = False,
) -> None:
    """Draws a run: what happened, verdict, threat model, attacks × defenses, trade-off, leak map,
    searches, guesses, cost.

    Secrets come from the records (--keep-secrets), or are read again from the data and checked
    against their hashes.
    """
    from gradleak.records.files import write_whole_bytes
    from gradleak.report.page import build_report
    from gradleak.report.page.opening import Opening

    if form not in SUFFIXES:
        raise GradleakError(f"Unknown format {form!r}. Use --format {', '.join(SUFFIXES)}.")
    if index:
        if show_secrets or form != "html":
            raise GradleakError(
                "An index is an HTML page without private texts: leave --show-secrets and --format"
                " out."
            )
        write_index(run, out)
        return
    if form == "pdf":
        from gradleak.report.page.forms import find_browser

        find_browser()  # said before records are read
    found = build_report(run, secrets_of(run, show_secrets), show_secrets=show_secrets)
    path = out or (run if run.is_dir() else run.parent) / f"report{SUFFIXES[form]}"
    write_whole_bytes(path, write_form(found, form))
    console, opening = open_terminal(), found.find(Opening)
    console.print(opening.story.happened)
    console.print(opening.verdict.headline)
    console.print(
        f"Report: {path}" + (" (holds private texts)" if show_secrets else ""), soft_wrap=True
    )


def write_index(folder: Path, out: Path | None) -> None:
    """A page over all runs of a folder; links are relative to it."""
    from gradleak.records.files import write_whole
    from gradleak.report.page.forms import read_runs, write_runs_page
    from gradleak.report.terminal.console import print_indented

    if out is not None and out.parent.resolve() != folder.resolve():
        raise GradleakError(
            f"Links of an index start from its folder: write it into {folder}, or leave --out out."
        )
    runs = read_runs(folder)
    path = out or folder / "index.html"
    write_whole(path, write_runs_page(str(folder), runs))
    console = open_terminal()
    for run in runs:
        print_indented(console, "- ", f"{run.name}: {run.sentence}")
    console.print(f"Index of {write_count(len(runs), 'run', 'runs')}: {path}", soft_wrap=True)


def secrets_of(run: Path, show_secrets: bool) -> "SecretsOf":
    """Where private texts come from. Without them guesses cannot be compared word by word,
    though none is shown."""
    folder = run if run.is_dir() else run.parent
    if not any(folder.glob("**/keys/*.key")):
        return lambda record: {}  # nothing could be checked against its hash
    from gradleak.study.private_data import SecretFinder

    return SecretFinder(run, network=show_secrets).texts


def write_form(found: "Report", form: str) -> bytes:
    """The report in one of its forms."""
    from gradleak.report.page.forms import write_html, write_json, write_markdown, write_pdf

    if form == "pdf":
        return write_pdf(found)
    write = {"html": write_html, "markdown": write_markdown, "json": write_json}[form]
    return write(found).encode()
