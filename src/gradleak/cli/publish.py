"""`gradleak publish`: what tables need of a run, in a small file that can be kept for good."""

from pathlib import Path
from typing import Annotated

import typer

from gradleak.cli.options import option

FILE = "published.xz"


def publish(
    run: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of records of one study, or published files of it; one or more."
        ),
    ],
    out: Annotated[
        Path | None, option("Folder of the file. [docs/results/ and the study's name]")
    ] = None,
) -> None:
    """Writes what tables need of a study, and no text: rows of public data sets by their numbers,
    scores, flags, cost.

    What the file holds already is kept: batches of several runs and machines add up, those that are
    there twice count once, and those of an older version of an attack stay apart. `gradleak tables`
    reads such files as it reads runs.
    """
    from gradleak.records.files import write_to_publish
    from gradleak.records.published import SUFFIX, add_up, pack, read_published
    from gradleak.report.numbers import write_count
    from gradleak.report.terminal.console import open_console
    from gradleak.study import publish_runs

    parts = [
        part
        for one in run
        for part in ([read_published(one)] if one.suffix == SUFFIX else publish_runs(one))
    ]
    whole = add_up(parts)
    path = (out or Path("docs/results") / whole.study) / FILE
    if path.exists():
        whole = add_up([read_published(path), whole])
    content = pack(whole)
    write_to_publish(path, content)
    examples = sum(cell.examples for cell in whole.cells)
    cells = write_count(len(whole.cells), "cell", "cells")
    told = f"{cells}, {write_count(examples, 'example', 'examples')}, {len(content):,} bytes"
    open_console().print(f"Published: {path}: {told}", soft_wrap=True)
