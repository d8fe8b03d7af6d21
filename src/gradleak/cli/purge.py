"""`gradleak purge`: private contents of a run removed from disk."""

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.command import open_terminal, option
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.report.numbers import write_count

if TYPE_CHECKING:
    from gradleak.study import Purge

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
    from gradleak.study import plan_purge
    from gradleak.study import purge as carry_out

    plan = plan_purge(folder, everything=everything)
    console = open_terminal()
    if not plan.remove and not plan.records:
        console.print(f"Nothing private is left in {folder}.", soft_wrap=True)
        return
    if not yes:
        if not sys.stdin.isatty():
            raise GradleakError(
                "Nobody is there to be asked, and nothing was removed. Add --yes if you are sure."
            )
        for line in list_removals(plan, folder):
            console.print(line, soft_wrap=True)
        if not typer.confirm("Remove all this for good?"):
            console.print("Nothing was removed.")
            return
    left = carry_out(plan)
    console.print(f"Removed from {folder}:", soft_wrap=True)
    for line in list_removals(plan, folder):
        console.print(f"  {line}", soft_wrap=True)
    for line in list_remains(plan, folder):
        console.print(line, soft_wrap=True)
    if left:
        raise RunFailed(
            "These files still hold a guess or text of the records, and were not written by"
            f" gradleak: {', '.join(str(path) for path in left)}."
        )


def list_removals(plan: "Purge", folder: Path) -> list[str]:
    """A line for each kind of thing that is removed."""
    lines = (
        [f"guesses and texts in {write_count(len(plan.records), 'record', 'records')}"]
        if plan.records
        else []
    )
    return lines + [f"{kind}: {list_names(paths, folder)}" for kind, paths in plan.remove.items()]


def list_remains(plan: "Purge", folder: Path) -> list[str]:
    """What is left behind, and what it is."""
    bare = len(plan.records) + len(plan.bare)
    ours = (
        [f"{write_count(bare, 'record', 'records')} without texts (scores, flags, cost)"]
        if bare
        else []
    )
    ours += [list_names(plan.keep, folder)] if plan.keep else []
    lines = [f"Stays: {'; '.join(ours)}." if ours else "Nothing of the run stays."]
    return lines + (
        [f"Not written by gradleak, not touched: {list_names(plan.foreign, folder)}."]
        if plan.foreign
        else []
    )


def list_names(paths: "list[Path]", folder: Path) -> str:
    """Names below the folder; of many the first."""
    rest = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    names = (path.name if path == folder else str(path.relative_to(folder)) for path in paths)
    return ", ".join(itertools.islice(names, NAMED)) + rest
