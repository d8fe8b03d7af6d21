"""`gradleak report`: a run as one page that people read."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.options import option

if TYPE_CHECKING:
    from gradleak.report.gallery import SecretsOf
    from gradleak.report.model import Report

SUFFIXES = {"html": ".html", "markdown": ".md", "json": ".json"}


def report(
    run: Annotated[Path, typer.Argument(help="A record, or a folder of records.")],
    out: Annotated[Path | None, option("File to write. [report.html, .md or .json in the run's folder]")] = None,
    form: Annotated[
        str, option("html (one file, no network), markdown, or json (docs/report.schema.json). [html]", "--format")
    ] = "html",
    show_secrets: Annotated[
        bool, option("Show private texts and guesses; otherwise none of them is in the file.", "--show-secrets")
    ] = False,
) -> None:
    """Draws a run: verdict first, then attacks × defenses, trade-off, leak map, searches, guesses, cost, provenance.

    Secrets come from the records (--keep-secrets), or are read again from the data and checked against their hashes.
    """
    from gradleak.core.errors import GradleakError
    from gradleak.records.files import write_whole
    from gradleak.report.layout import open_console
    from gradleak.report.run_report import build_report

    if form not in SUFFIXES:
        raise GradleakError(f"Unknown format {form!r}. Use --format {', '.join(SUFFIXES)}.")
    found = build_report(run, secrets_of(run, show_secrets), show_secrets=show_secrets)
    path = out or (run if run.is_dir() else run.parent) / f"report{SUFFIXES[form]}"
    write_whole(path, drawn(found, form))
    console = open_console()
    console.print(found.verdict.headline)
    console.print(f"Report: {path}" + (" (holds private texts)" if show_secrets else ""), soft_wrap=True)


def secrets_of(run: Path, show_secrets: bool) -> "SecretsOf":
    """Where private texts come from. Without them guesses cannot be compared word by word, though none is shown."""
    folder = run if run.is_dir() else run.parent
    if not any(folder.glob("**/keys/*.key")):
        return lambda record: {}  # nothing could be checked against its hash
    from gradleak.study.secrets import SecretFinder

    return SecretFinder(run, network=show_secrets).texts


def drawn(found: "Report", form: str) -> str:
    """The report in one of its forms."""
    import json

    from gradleak.records.plain import to_plain
    from gradleak.report.html import html
    from gradleak.report.markdown import markdown
    from gradleak.report.model import SCHEMA

    if form == "json":
        return json.dumps({"schema": SCHEMA, **to_plain(found)}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return html(found) if form == "html" else markdown(found)
