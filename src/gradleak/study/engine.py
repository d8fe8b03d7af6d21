"""Cells spread over processes, each on a device of its own. They share a folder, and the claims
in it share out the work."""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from gradleak.audit.display import Display, Silent
from gradleak.core.attack import Progress
from gradleak.core.memory import limit_by_default
from gradleak.records.files import make_private_folder
from gradleak.study.cells import Cell
from gradleak.study.grid import CellResult, Clock, run_cells
from gradleak.study.plan import FAILED

LOOK = 1.0  # seconds between looks at the folder


def run_on(
    devices: Sequence[str],
    workers: int,
    cells: Sequence[Cell],
    folder: Path,
    display: Display,
    *,
    retry: bool,
    memory: int | None = None,
) -> list[CellResult]:
    """Runs the cells in so many processes, devices in turn; a process that dies loses its cell to
    the others or to the end.

    The records are those of one process, but for time and cost. Memory is what each process may
    hold; where nothing is said, those that share a device share what is free of it.
    """
    if workers > 1:
        make_private_folder(folder)
        if retry:
            for cell in cells:
                (folder / f"{cell.spec.id}{FAILED}").unlink(missing_ok=True)
        given = (list(cells), folder)
        work_together(
            devices,
            workers,
            display,
            memory,
            _work,
            given,
            lambda started: _watch(started, cells, folder, display),
        )
        retry = False  # what failed in a worker has just been tried
        if _done(cells, folder) == len(cells):
            display = Silent()  # all that is left is to read the records
    return run_cells(cells, folder, devices[0], display, retry=retry, memory=memory)


def work_together(
    devices: Sequence[str],
    workers: int,
    display: Display,
    memory: int | None,
    work: Callable[..., None],
    given: tuple[object, ...],
    watch: Callable[[Sequence[BaseProcess]], None],
) -> None:
    """Starts processes that work on what is `given`, each with its device and memory, and ends
    those that outlive the watch."""
    context = multiprocessing.get_context("spawn")  # CUDA cannot be forked
    threads = max(1, (os.cpu_count() or 1) // workers)
    places = [devices[number % len(devices)] for number in range(workers)]
    shares = [memory or _share(place, places.count(place)) for place in places]
    started = [
        context.Process(
            target=_with_threads, args=(threads, work, *given, place, share), daemon=True
        )
        for place, share in zip(places, shares, strict=True)
    ]
    display.say(f"{workers} processes on {', '.join(dict.fromkeys(devices))}.")
    for process in started:
        process.start()
    try:
        watch(started)
    finally:
        for process in started:
            process.terminate()  # those that came to their end are not harmed
            process.join()


def _watch(
    started: Sequence[BaseProcess], cells: Sequence[Cell], folder: Path, display: Display
) -> None:
    """Says when cells are finished, until no process is left."""
    before = _done(cells, folder)
    clock, shown = Clock(len(cells) - before), before
    progress = Progress(done=before, total=len(cells))
    with display.watch(f"{len(started)} processes, cells", progress):
        while any(process.is_alive() for process in started):
            time.sleep(LOOK)
            now = _done(cells, folder)
            if now > shown:
                shown, progress.done, clock.finished = now, now, now - before
                display.say(
                    f"{now} of {len(cells)} cells are"
                    f" done{clock.left() if now < len(cells) else ''}."
                )
    died = [process for process in started if process.exitcode]
    if died:
        display.say(f"{len(died)} of {len(started)} processes died; what they left is run here.")


def _done(cells: Sequence[Cell], folder: Path) -> int:
    return sum(
        (folder / f"{cell.spec.id}{suffix}").exists()
        for cell in cells
        for suffix in (".json", FAILED)
    )


def _share(device: str, processes: int) -> int | None:
    """What each of some processes may hold of what is free on a device; one by itself finds out
    when it starts."""
    if processes == 1:
        return None
    import torch

    most = limit_by_default(torch.device(device))
    return None if most is None else most // processes


def _with_threads(threads: int, work: Callable[..., None], *given: object) -> None:
    """One process."""
    import torch

    torch.set_num_threads(threads)
    work(*given)


def _work(cells: Sequence[Cell], folder: Path, device: str, memory: int | None) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        run_cells(cells, folder, device, Silent(), retry=False, memory=memory)
