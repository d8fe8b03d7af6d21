"""`gradleak tables` and `gradleak publish`: the papers' tables, ours beside theirs, with a study's
results as pages; and what these need of a run, in a small file that can be kept for good."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradleak.cli.command import open_terminal, option
from gradleak.core.errors import GradleakError, refuse_unknown
from gradleak.report.numbers import write_count

if TYPE_CHECKING:
    from gradleak.audit.spec import AuditSpec
    from gradleak.records.store import Summary
    from gradleak.report.papers.paper_tables import Filled, PaperTable

PUBLISHED = "published.xz"


def tables(
    run: Annotated[
        list[Path],
        typer.Argument(
            help=(
                "Folders of records, or of studies, or files that gradleak publish wrote; one or"
                " more."
            )
        ),
    ],
    out: Annotated[Path | None, option("Folder for what is written. [the first run's]")] = None,
    table: Annotated[
        list[str] | None,
        option("Only this table, run or not: --table lamp_table1. Repeat for several."),
    ] = None,
    spec: Annotated[
        Path | None,
        option("YAML of a study: lists its cells, run or not, in results.md and results.csv."),
    ] = None,
    change: Annotated[
        list[str] | None, option("Replace a field of the study: --set limit=10.", "--set")
    ] = None,
    examples: Annotated[
        bool,
        typer.Option(
            "--examples",
            help="With --spec: examples.csv too, each secret by its keyed hash and its scores.",
        ),
    ] = False,
) -> None:
    """Writes the tables of LAMP, of partial gradients and of Learning to Invert, ours beside theirs
    with intervals.

    A table appears once one of its places was run; places that were not say so. Attacks that a
    table does not have stand below its rows. The papers attack BERT-base; each line names our
    target. With --spec, every cell of a study is listed and of the tables only those that it is
    for. Of an attack whose answers have changed the newest version stands in its place and older
    ones beside it, named so. Nothing written holds a guess or a secret, but of the canaries, so
    that it can be published.
    """
    from gradleak.records.files import write_to_publish
    from gradleak.records.published import SUFFIX
    from gradleak.records.published_summaries import read_sources
    from gradleak.report.papers.paper_tables import (
        fill_table,
        write_csv,
        write_latex,
        write_tables_markdown,
    )

    if (change or examples) and spec is None:
        raise GradleakError("--set and --examples are about a study: name its YAML with --spec.")
    if examples and any(one.suffix == SUFFIX for one in run):
        raise GradleakError(
            "--examples is about records: published files hold no hashes. Name folders of records."
        )
    chosen = [
        one for one in _choose_tables(table) if table or spec is None or spec.stem in one.studies
    ]
    summaries = read_sources(run)
    shown = [one for one in (fill_table(paper, summaries) for paper in chosen) if table or one.run]
    texts: dict[str, str] = {}
    if spec is not None:
        texts = _study_texts(spec, change or (), run, summaries, shown, examples=examples)
    elif not shown:
        raise GradleakError(
            f"{run[0]} holds no cell of a table we know ({', '.join(one.name for one in chosen)})."
            " Name one with --table to see it empty."
        )
    else:
        texts["tables.md"] = write_tables_markdown(
            shown, f"gradleak tables {' '.join(map(str, run))}"
        )
    if shown:
        texts |= {"tables.csv": write_csv(shown), "tables.tex": write_latex(shown)}
    folder = out or (run[0] if run[0].is_dir() else run[0].parent)
    for name, text in texts.items():
        write_to_publish(folder / name, text.encode())
    console = open_terminal()
    for one in shown:
        console.print(f"{one.table.name}: {one.run} of {one.places} places run.")
    console.print(f"Tables: {folder}: {', '.join(sorted(texts))}", soft_wrap=True)


def _choose_tables(names: Sequence[str] | None) -> "list[PaperTable]":
    from gradleak.report.papers.paper_tables import read_paper_tables

    known = {one.name: one for one in read_paper_tables()}
    for name in names or ():
        refuse_unknown("Unknown table", name, known, "Tables")
    return [one for one in known.values() if not names or one.name in names]


def _study_texts(
    spec: Path,
    changes: Sequence[str],
    runs: Sequence[Path],
    summaries: "Sequence[Summary]",
    shown: "Sequence[Filled]",
    *,
    examples: bool,
) -> dict[str, str]:
    """The cells of a study with what the records say of them."""
    from gradleak.report.papers.paper_tables import write_sections
    from gradleak.report.papers.study_results import (
        StudyCell,
        find_answers,
        write_examples_csv,
        write_guesses,
        write_results_csv,
        write_results_markdown,
    )
    from gradleak.study.cells import read_study
    from gradleak.study.private_data import SecretFinder

    planned = [
        StudyCell(
            cell.axes,
            cell.spec.to_dict(),
            _usual(cell.spec),
            {one.name: one.version for one in cell.spec.attacks},
        )
        for cell in read_study(spec, changes).cells
    ]
    answered = find_answers(planned, summaries)
    finders = [SecretFinder(one, network=False) for one in runs]
    named = [f"studies/{spec.name}", *(word for change in changes for word in ("--set", change))]
    page = [
        *write_results_markdown(
            named,
            answered,
            f"gradleak tables RUN --spec {shlex.join(named)}",
            [line.record for one in shown for line in one.lines if line.record],
        ),
        *write_guesses(
            answered,
            lambda record: {
                place: text for one in finders for place, text in one.texts(record).items()
            },
        ),
        *write_sections(shown),
    ]
    texts = {
        "results.md": "\n".join(page).rstrip() + "\n",
        "results.csv": write_results_csv(named, answered),
    }
    return texts | ({"examples.csv": write_examples_csv(answered)} if examples else {})


def _usual(spec: "AuditSpec") -> dict[str, dict[str, Any]]:
    """What the fields stand for that an older record of this cell does not have, by component."""
    from gradleak.core.defense import channel_of
    from gradleak.core.specs import defaults

    channel = channel_of(spec.defenses)
    attacks = {one.name: {**defaults(one), **one.before(channel)} for one in spec.attacks}
    return {spec.target.name: defaults(spec.target), **attacks}


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
    from gradleak.study import publish_runs

    parts = [
        part
        for one in run
        for part in ([read_published(one)] if one.suffix == SUFFIX else publish_runs(one))
    ]
    whole = add_up(parts)
    path = (out or Path("docs/results") / whole.study) / PUBLISHED
    if path.exists():
        whole = add_up([read_published(path), whole])
    content = pack(whole)
    write_to_publish(path, content)
    examples = sum(cell.examples for cell in whole.cells)
    open_terminal().print(
        f"Published: {path}: {write_count(len(whole.cells), 'cell', 'cells')},"
        f" {write_count(examples, 'example', 'examples')}, {len(content):,} bytes",
        soft_wrap=True,
    )
