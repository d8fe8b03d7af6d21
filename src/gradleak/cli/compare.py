"""`gradleak compare`: two runs over the same client batches, pair by pair."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.command import open_terminal, option, print_json

if TYPE_CHECKING:
    from gradleak.records.schema import Record
    from gradleak.report.terminal.comparison import ContentsOf, Identities


def compare(
    first: Annotated[
        Path, typer.Argument(metavar="A", help="A record, or a folder of records: what there was.")
    ],
    second: Annotated[
        Path,
        typer.Argument(metavar="B", help="A record, or a folder of records: what it is to be now."),
    ],
    as_json: Annotated[
        bool, option("Print the comparison as JSON and nothing else.", "--json")
    ] = False,
) -> None:
    """Says whether less leaks in B than in A: the mean difference with its 95 % interval, for each
    metric and attack.

    Only examples that both runs attacked in the same client batches count, and each is compared
    with itself. Runs that share none are refused. Settings of folders are paired by what they have
    in common.
    """
    from gradleak.records.plain import to_plain
    from gradleak.records.settings import settings_of
    from gradleak.records.store import read_summaries
    from gradleak.report.terminal import comparison

    settings = [settings_of(read_summaries(run)) for run in (first, second)]
    found = comparison.compare(settings[0], settings[1], (contents_of(first), contents_of(second)))
    if not as_json:
        comparison.print_comparison(open_terminal(), found, (str(first), str(second)))
        return
    plain = {"schema": comparison.SCHEMA, "a": str(first), "b": str(second), **to_plain(found)}
    for setting, told in zip(found.settings, plain["settings"], strict=True):
        for one, line in zip(setting.differences, told["differences"], strict=True):
            line["reading"] = one.reading
    print_json({**plain, "says": list(comparison.conclude_comparison(found))})


def contents_of(run: Path) -> "ContentsOf":
    """Reads a run's examples again, believed only where their hash is the record's; none without
    the run's key."""
    finder = None

    def contents(record: "Record") -> "Identities | None":
        nonlocal finder
        # Opens data sets: slow to import, and rarely needed
        from gradleak.study.private_data import SecretFinder

        finder = finder or SecretFinder(run, network=False)
        if not finder.keys:
            return None
        return {place: (one.label, one.as_text) for place, one in finder.examples(record).items()}

    return contents
