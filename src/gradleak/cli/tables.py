"""`gradleak tables`: the papers' tables, ours beside theirs."""

from pathlib import Path
from typing import Annotated

import typer

from gradleak.cli.options import option


def tables(
    run: Annotated[Path, typer.Argument(help="A folder of records, or a folder of studies.")],
    out: Annotated[Path | None, option("Folder for tables.md, tables.csv and tables.tex. [the run's]")] = None,
    table: Annotated[list[str] | None, option("Only this table, run or not: --table lamp_table1. Repeat for several.")] = None,
) -> None:
    """Writes the tables of LAMP, of partial gradients and of Learning to Invert, ours beside theirs with intervals.

    A table appears once one of its places was run; places that were not say so. Attacks that a table does not have stand
    below its rows. The papers attack BERT-base; each line names our target.
    """
    from gradleak.core.errors import GradleakError
    from gradleak.core.registry import did_you_mean
    from gradleak.records.summary import read_summaries
    from gradleak.report.layout import open_console
    from gradleak.report.paper_tables import fill, papers
    from gradleak.report.table_files import comma_separated, latex, markdown
    from gradleak.study.files import write_whole

    known = [one.name for one in papers()]
    for name in table or ():
        if name not in known:
            raise GradleakError(f"Unknown table {name!r}{did_you_mean(name, known)} Tables: {', '.join(known)}.")
    summaries = read_summaries(run)
    filled = [fill(one, summaries) for one in papers() if not table or one.name in table]
    shown = [one for one in filled if table or one.run]
    if not shown:
        raise GradleakError(
            f"{run} holds no cell of a table we know ({', '.join(known)}). Name one with --table to see it empty."
        )
    folder = out or (run if run.is_dir() else run.parent)
    command = f"gradleak tables {run}"
    texts = {"md": markdown(shown, command), "csv": comma_separated(shown), "tex": latex(shown)}
    for suffix, text in texts.items():
        write_whole(folder / f"tables.{suffix}", text)
    console = open_console()
    for one in shown:
        console.print(f"{one.table.name}: {one.run} of {one.places} places run.")
    console.print(f"Tables: {folder / 'tables.md'}, tables.csv, tables.tex", soft_wrap=True)
