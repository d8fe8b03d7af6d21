"""`gradleak run`: grids of audits from YAML files."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.check import check_names
from gradleak.cli.command import (
    Memory,
    Out,
    open_display,
    open_terminal,
    option,
    refuse_failures,
    resolve_device,
    resolve_memory,
)
from gradleak.core.errors import GradleakError
from gradleak.report.numbers import write_count, write_duration

ENGINES = ("local", "ray")
SHOWN = 10  # cells that did not fit

if TYPE_CHECKING:
    from rich.console import Console

    from gradleak.core.attack import Display
    from gradleak.study.cells import Job
    from gradleak.study.grid import CellResult
    from gradleak.study.minutes import TimedRun, Waiting


def run(
    spec: Annotated[
        list[Path],
        typer.Argument(help="YAML with the fields of an audit; a list is an axis of the grid."),
    ],
    out: Out = Path("runs"),
    device: Annotated[
        str,
        option(
            "cpu, cuda, cuda:N, or auto: a GPU where there is one; with commas, one for each"
            " worker. [auto]"
        ),
    ] = "auto",
    memory: Memory = None,
    workers: Annotated[
        int | None,
        option(
            "Processes that share the cells, each on its own device. [one for each device]",
            minimum=1,
        ),
    ] = None,
    change: Annotated[
        list[str] | None,
        option("Replace a field of the file: --set limit=10. Repeat for several.", "--set"),
    ] = None,
    only: Annotated[
        list[str] | None,
        option(
            "Run the cells on this value of an axis: --only 'attacks=lamp*'. Repeat for several."
        ),
    ] = None,
    limit_cells: Annotated[
        int | None, option("Run the first cells of each grid only.", minimum=1)
    ] = None,
    engine: Annotated[
        str, option("local, or ray: the cells are shared out over a Ray cluster. [local]")
    ] = "local",
    address: Annotated[
        str | None,
        option(
            "Of the Ray cluster: auto, or host:port. [a cluster of this machine's own, ended with"
            " the run]"
        ),
    ] = None,
    retry_failed: Annotated[
        bool, option("Run cells again that failed before.", "--retry-failed")
    ] = False,
    time_given: Annotated[
        str | None,
        option(
            "Run as many cells as fit in this time, from now on: 9m, 90s, 1h30m. [no limit]",
            "--for",
        ),
    ] = None,
    priority: Annotated[
        Path | None,
        option(
            "With --for: YAML list that says which cells come first. [the order of the studies, or"
            " a list among them]"
        ),
    ] = None,
    full: Annotated[
        bool, option("Print the scores of every cell too, above the verdict.", "--full")
    ] = False,
) -> None:
    """Audits every cell of a grid, one record each. Cells that have a record already are skipped,
    and cells that failed.

    A flat list under attacks is an axis; under metrics, know and defenses it is one value, and a
    list of lists an axis. Under cases stand names and the fields each one changes; every case is
    crossed with the axes.

    Several studies run one after another, each in the folder of its name. With --for, cells that
    would not fit in the time left are not begun, smaller ones further down the list are, and one
    that takes longer than foretold is cut when the time is over. The same command goes on from
    there. That cells did not fit is no failure: the exit code is 0.
    """
    began = time.monotonic()
    if time_given is None:  # with a time, studies that cannot be read are left out
        check_names(spec, change or ())  # a typo is told before the libraries below are loaded
    from gradleak.study.cells import read_priority, share_by_priority
    from gradleak.study.engine import run_on
    from gradleak.study.minutes import Allowance, fill_minutes, read_time
    from gradleak.study.ray_engine import Cluster, run_on_ray

    seconds = None if time_given is None else read_time(time_given)
    _refuse_engine(engine, address, is_timed=seconds is not None)
    files, ordering = _studies_and_list(spec, priority, is_timed=seconds is not None)
    entries = read_priority(ordering) if ordering else []
    console, display = open_terminal(), open_display()
    jobs, left_out = _jobs(
        files, out, change or (), only or (), limit_cells, display, forgiving=seconds is not None
    )
    display.show_guesses = all(cell.spec.data.made_up for job in jobs for cell in job.cells)
    most = resolve_memory(memory)
    devices = (
        [] if engine == "ray" else [resolve_device(word.strip()) for word in device.split(",")]
    )
    if seconds is not None:
        shares, unused = share_by_priority(jobs, entries)
        for sentence in unused:
            display.say(f"{ordering}: {sentence}")
        summary = fill_minutes(
            shares,
            out,
            devices,
            workers or len(devices),
            Allowance(began, seconds),
            display,
            retry=retry_failed,
            memory=most,
        )
        print_summary(console, summary, seconds, left_out, full=full)
        return
    results: list[CellResult] = []
    for job in jobs:
        before = sum((job.folder / f"{cell.spec.id}.json").exists() for cell in job.cells)
        if engine == "ray":
            cluster = Cluster(address, device, workers, most)
            found = run_on_ray(job.cells, job.folder, cluster, display, retry=retry_failed)
        else:
            found = run_on(
                devices,
                workers or len(devices),
                job.cells,
                job.folder,
                display,
                retry=retry_failed,
                memory=most,
            )
        print_results(console, found, job.folder, before, full=full)
        results += found
    failures = [result.failure for result in results if result.failure]
    refuse_failures(f"of {len(results)} cells", failures)


def _refuse_engine(engine: str, address: str | None, *, is_timed: bool) -> None:
    """Refuses an engine that is none, and what does not go with the one that was chosen."""
    if engine not in ENGINES:
        raise GradleakError(f"Unknown engine {engine!r}. Use --engine {' or '.join(ENGINES)}.")
    if address is not None and engine != "ray":
        raise GradleakError("--address is of a Ray cluster: add --engine ray, or leave it out.")
    if is_timed and engine == "ray":
        raise GradleakError(
            "--for counts the time of this machine's own processes: leave --engine ray out, or"
            " --for."
        )


def _studies_and_list(
    named: Sequence[Path], priority: Path | None, *, is_timed: bool
) -> tuple[list[Path], Path | None]:
    """The studies among the files that are named, and the priority list: the one asked for, or
    the one among them."""
    from gradleak.study.cells import is_priority_list

    lists = list(filter(is_priority_list, named))
    files = [path for path in named if path not in lists]
    lists = [priority] if priority else lists
    if lists and not is_timed:
        raise GradleakError(
            f"{lists[0]} is a priority list, which says what a given time is used for: add --for"
            " 9m, or leave it out."
        )
    if len(lists) > 1:
        raise GradleakError(f"{' and '.join(map(str, lists))} are priority lists: name one.")
    if not files:
        raise GradleakError("No study is named: add the YAML files of studies to run.")
    return files, lists[0] if lists else None


def _jobs(
    files: Sequence[Path],
    out: Path,
    changes: Sequence[str],
    only: Sequence[str],
    limit_cells: int | None,
    display: "Display",
    *,
    forgiving: bool,
) -> "tuple[list[Job], list[str]]":
    """The studies in files, with the cells that were chosen; what they set out to do is written
    into their folders.

    All that is wrong with any of them is one error. A run that fills a time goes on with the others
    (`forgiving`) and returns the names of those it left out, since what lacks its data here may be
    run elsewhere.
    """
    from gradleak.records.store import check_writable
    from gradleak.study.cells import Job, choose_cells, read_study, write_plan

    jobs: list[Job] = []
    studies, problems = [], dict[Path, str]()
    for path in files:
        try:
            study = read_study(path, changes)
            cells = choose_cells(study.cells, only)[:limit_cells]
        except GradleakError as error:
            is_named = len(files) == 1 or str(path) in str(error)
            problems[path] = str(error) if is_named else f"{path}: {error}"
            continue
        if any(job.name == study.name for job in jobs):
            raise GradleakError(
                f"{path} is called {study.name}, as another of these studies is: their records"
                " would mix. Change name."
            )
        studies.append(study)
        jobs.append(Job(study.name, out / study.name, tuple(cells)))
    if problems and (not forgiving or not jobs):
        raise GradleakError("\n".join(problems.values()))
    for text in problems.values():
        display.say(f"Left out: {text.replace('; nothing was run', '')}")
    for study, job in zip(studies, jobs, strict=True):
        check_writable(job.folder)
        write_plan(job.folder, study)
    return jobs, list(map(str, problems))


def print_results(
    console: "Console", results: "Sequence[CellResult]", folder: Path, before: int, *, full: bool
) -> None:
    """The verdict over a study's cells, last and short; above it, where asked for, the scores of
    each.

    So many cells had a record `before` the run.
    """
    if full:
        print_cells(console, results)
    there = [result for result in results if result.record is not None]
    counts = f"{len(there)} of {write_count(len(results), 'cell', 'cells')} have a record"
    earlier = f", {before} of them from before" if before else ""
    failed = f"; {len(results) - len(there)} failed" if len(there) < len(results) else ""
    console.print(f"{counts}{earlier}{failed}.", style="dim")
    for sentence in conclude_run(folder, there):
        console.print(sentence)
    console.print(f"Records: {folder}", soft_wrap=True)
    if not full:
        console.print("Scores of every cell: the same command with --full; none is run again.")
    console.print(f"All of it: gradleak report {folder}", soft_wrap=True)


def conclude_run(folder: Path, results: "Sequence[CellResult]") -> list[str]:
    """What may be concluded from cells that have a record, in the report's own words."""
    from gradleak.records.judgement import Coverage
    from gradleak.records.store import read_summary
    from gradleak.report.page.opening import reach_verdict
    from gradleak.report.page.section import JudgedRun

    summaries = [read_summary(folder / f"{result.cell.spec.id}.json") for result in results]
    if not summaries:
        return ["Could not be judged: no cell has a record."]
    run = JudgedRun(summaries, Coverage(None, len(summaries)))
    found, settings = reach_verdict(run), run.settings
    standing = {name for judgement in run.judgements.values() for name in judgement.doubts}
    doubts = [
        f"{flag.name} ({flag.settings} of {write_count(len(settings), 'setting', 'settings')})"
        for flag in found.flags
        if flag.name in standing
    ]
    exact = f", {found.exact} word for word" if found.exact else ""
    where = [f"Where most was rebuilt: {found.setting}{exact}."] if len(settings) > 1 else []
    return [
        found.headline,
        *where,
        *([f"In doubt, so that it may be more: {', '.join(doubts)}."] if doubts else []),
    ]


def print_cells(console: "Console", results: "Sequence[CellResult]") -> None:
    """One row a cell."""
    from gradleak.report.terminal.listing import CellRow, build_cell_tables

    rows = [
        CellRow(result.cell.axes, result.record, "" if result.record else "failed")
        for result in results
    ]
    for table in build_cell_tables(console, rows):
        console.print(table)
        console.print()
    console.print(
        "Worst case over the attacks of a cell, in %: mean [95 % interval], the blind attack"
        " below.",
        style="dim",
    )
    console.print()


def print_summary(
    console: "Console", summary: "TimedRun", seconds: float, left_out: Sequence[str], *, full: bool
) -> None:
    """What ran, study by study; what did not fit, with what it would take; and what failed,
    which alone is a failure."""
    over = (*summary.ran, *summary.failed)
    for folder in dict.fromkeys(job.folder for job, _ in over):
        print_results(
            console, [result for job, result in over if job.folder == folder], folder, 0, full=full
        )
    counts = [
        f"{write_count(len(summary.ran), 'cell', 'cells')} ran",
        f"{len(summary.failed)} failed",
        f"{len(summary.waiting)} wait",
    ]
    before = f"; {summary.before} were finished before" + (
        f", {summary.failed_before} had failed" if summary.failed_before else ""
    )
    console.print(
        f"{write_duration(summary.seconds)} of {write_duration(seconds)}:"
        f" {', '.join(counts)}{before}.",
        soft_wrap=True,
    )
    for one in summary.waiting[:SHOWN]:
        console.print(
            f"did not fit: {one.job.name}: {one.cell.title}: {_foretell(one)}", soft_wrap=True
        )
    if len(summary.waiting) > SHOWN:
        console.print(f"… and {len(summary.waiting) - SHOWN} more.")
    too_long = [one for one in summary.waiting if one.seconds is not None and one.seconds > seconds]
    if too_long:
        console.print(
            f"{len(too_long)} of these take longer than the whole time: give them more, or make"
            " them smaller (--set limit=N)."
        )
    if left_out:
        console.print(
            f"Left out, since they cannot be read here: {', '.join(left_out)}.", soft_wrap=True
        )
    if summary.waiting:
        console.print("The same command goes on from here.")
    refuse_failures("cells", [result.failure for _, result in summary.failed])


def _foretell(one: "Waiting") -> str:
    known = (
        "not known how long it takes"
        if one.seconds is None
        else f"about {write_duration(one.seconds)}"
    )
    return f"{known}, begun: finished parts are kept" if one.begun else known
