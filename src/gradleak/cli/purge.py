"""`gradleak purge`: private contents of a run removed from disk."""

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.options import option

if TYPE_CHECKING:
    from gradleak.study.purge import Purge

NAMED = 5  # files of a kind that are named


def purge(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run, of captures or of several; or a capture.")
    ],
    yes: Annotated[bool, option("Do not ask first.", "--yes", "-y")] = False,
    everything: Annotated[
        bool, option("Remove scores too: records whole, tables, plans. [scores stay]", "--all")
    ] = False,
) -> None:
    """Removes what holds private text: guesses, kept texts, parts, fits, keys, failure files,
    pictures, reports, captures.

    Records stay, without guesses and texts: scores, intervals, flags and cost can still be shown,
    compared and gated (with --spec only by --accept other_data: their keyed hashes can no longer be
    tested against any text). The same study would run again. Files that gradleak did not write are
    not touched.
    Copies elsewhere are not reached: reports written with --out, backups, the data itself.
    """
    from gradleak.core.errors import GradleakError, RunFailed
    from gradleak.report.terminal.console import open_console
    from gradleak.study.purge import plan_purge
    from gradleak.study.purge import purge as carry_out

    plan = plan_purge(folder, everything=everything)
    console = open_console()
    if not plan.remove and not plan.records:
        console.print(f"Nothing private is left in {folder}.", soft_wrap=True)
        return
    if not yes:
        if not sys.stdin.isatty():
            raise GradleakError(
                "Nobody is there to be asked, and nothing was removed. Add --yes if you are sure."
            )
        for line in what_goes(plan, folder):
            console.print(line, soft_wrap=True)
        if not typer.confirm("Remove all this for good?"):
            console.print("Nothing was removed.")
            return
    left = carry_out(plan)
    console.print(f"Removed from {folder}:", soft_wrap=True)
    for line in what_goes(plan, folder):
        console.print(f"  {line}", soft_wrap=True)
    for line in what_stays(plan, folder):
        console.print(line, soft_wrap=True)
    if left:
        names = ", ".join(str(path) for path in left)
        raise RunFailed(
            "These files still hold a guess or text of the records, and were not written by"
            f" gradleak: {names}."
        )


def what_goes(plan: "Purge", folder: Path) -> list[str]:
    """A line for each kind of thing that is removed."""
    from gradleak.report.numbers import write_count

    lines = (
        [f"guesses and texts in {write_count(len(plan.records), 'record', 'records')}"]
        if plan.records
        else []
    )
    return lines + [f"{kind}: {named(paths, folder)}" for kind, paths in plan.remove.items()]


def what_stays(plan: "Purge", folder: Path) -> list[str]:
    """What is left behind, and what it is."""
    from gradleak.report.numbers import write_count

    bare = len(plan.records) + len(plan.bare)
    ours = (
        [f"{write_count(bare, 'record', 'records')} without texts (scores, flags, cost)"]
        if bare
        else []
    )
    ours += [named(plan.keep, folder)] if plan.keep else []
    lines = [f"Stays: {'; '.join(ours)}." if ours else "Nothing of the run stays."]
    return lines + (
        [f"Not written by gradleak, not touched: {named(plan.foreign, folder)}."]
        if plan.foreign
        else []
    )


def named(paths: "list[Path]", folder: Path) -> str:
    """Names below the folder; of many the first."""
    rest = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    names = (path.name if path == folder else str(path.relative_to(folder)) for path in paths)
    return ", ".join(itertools.islice(names, NAMED)) + rest
