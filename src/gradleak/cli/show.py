"""`gradleak show`: records read back."""

from pathlib import Path
from typing import Annotated

import typer

from gradleak.cli.audit import write_pictures
from gradleak.cli.command import RecordPath, open_terminal
from gradleak.records.files import RecordError


def show(
    record: RecordPath,
    trace: Annotated[
        bool, typer.Option("--trace", help="Show the guesses as the search went on.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Show every metric, legacy ones too.")
    ] = False,
    pictures: Annotated[
        bool,
        typer.Option(
            "--pictures",
            help="Draw guessed pictures, below their secrets where kept, into PNG files beside it.",
        ),
    ] = False,
) -> None:
    """Shows a record as its audit did, or lists the records of a folder.

    Secrets are shown only if the audit kept them (--keep-secrets); guesses always are, and a good
    guess is the private text.
    """
    from gradleak.records.store import read_record
    from gradleak.report.shown_guesses import find_kept_secrets
    from gradleak.report.terminal.record_screen import print_record

    if record.is_dir():
        list_folder(record)
        return
    read = read_record(record)
    secrets = find_kept_secrets(read)
    print_record(open_terminal(), read, secrets, with_trace=trace, full=full)
    written = write_pictures(read, secrets, record) if pictures else []
    for path in written:
        typer.echo(f"Pictures: {path}")
    if pictures and not written:
        raise RecordError(
            f"{record} holds no pictures: its guesses are texts. Leave --pictures out."
        )


def list_folder(folder: Path) -> None:
    """The records in a folder and in the folders of studies below it."""
    from gradleak.records.store import RECORD, read_summary
    from gradleak.report.terminal.listing import print_folder

    paths = [path for pattern in (RECORD, f"*/{RECORD}") for path in sorted(folder.glob(pattern))]
    if not paths:
        raise RecordError(f"{folder} holds no records. Name the folder that was given as --out.")
    records, broken = [], []
    for path in paths:
        try:
            records.append((str(path.relative_to(folder)), read_summary(path)))
        except RecordError as error:
            broken.append(str(error))
    if records:
        print_folder(open_terminal(), records)
    if broken:
        raise RecordError("\n".join(broken))
