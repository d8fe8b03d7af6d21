"""Cells spread over processes, each on a device of its own. They share a folder, and the claims
in it share out the work."""

import contextlib
import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from gradleak.core.attack import Display, Progress, Silent
from gradleak.core.memory import limit_by_default
from gradleak.records.files import make_private_folder
from gradleak.study.cells import Cell
from gradleak.study.grid import CellResult, Clock, failure_file, run_cells

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
                failure_file(folder, cell).unlink(missing_ok=True)
        watch = CellWatch(cells, folder)
        work_together(devices, workers, display, memory, _work, (list(cells), folder), watch)
        retry = False  # what failed in a worker has just been tried
        if watch.count_done() == len(cells):
            display = Silent()  # all that is left is to read the records
    return run_cells(cells, folder, devices[0], display, retry=retry, memory=memory)


class ProcessWatch(ABC):
    """How far processes are that work together, read off what they write."""

    counted: str  # what progress counts
    rest: str  # what becomes of what a process that died leaves
    pause = LOOK  # seconds from one look to the next
    progress: Progress

    @abstractmethod
    def look(self) -> str | None:
        """Brings progress up to date; returns news, if there are any."""

    def is_over(self) -> bool:
        """Whether processes that are still at work are to be ended."""
        return False


def work_together(
    devices: Sequence[str],
    workers: int,
    display: Display,
    memory: int | None,
    work: Callable[..., None],
    given: tuple[object, ...],
    watch: ProcessWatch,
) -> None:
    """Starts processes that work on what is `given`, each with its device and memory, and ends
    those that outlive the watch."""
    context = multiprocessing.get_context("spawn")  # CUDA cannot be forked
    threads = max(1, (os.cpu_count() or 1) // workers)
    places = [devices[number % len(devices)] for number in range(workers)]
    shares = [memory or _share(place, places.count(place)) for place in places]
    # Daemons, so that an error here leaves none of them at work
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
        follow(started, watch, display)
    finally:
        for process in started:
            process.terminate()  # those that came to their end are not harmed
            process.join()


def follow(started: Sequence[BaseProcess], watch: ProcessWatch, display: Display) -> None:
    """Looks at processes and says what is new, until none is left or the watch is over."""
    with display.watch(f"{len(started)} processes, {watch.counted}", watch.progress):
        while any(process.is_alive() for process in started) and not watch.is_over():
            time.sleep(watch.pause)
            if news := watch.look():
                display.say(news)
    if died := sum(bool(process.exitcode) for process in started):
        display.say(f"{died} of {len(started)} processes died; what they left {watch.rest}.")


class CellWatch(ProcessWatch):
    """Counts cells that are finished or have failed."""

    counted, rest = "cells", "is run here"

    def __init__(self, cells: Sequence[Cell], folder: Path) -> None:
        self.cells, self.folder = cells, folder
        self.before = self.count_done()
        self.clock = Clock(len(cells) - self.before)
        self.progress = Progress(done=self.before, total=len(cells))

    def look(self) -> str | None:
        done = self.count_done()
        if done <= self.progress.done:
            return None
        self.progress.done, self.clock.finished = done, done - self.before
        rest = self.clock.describe_rest() if done < len(self.cells) else ""
        return f"{done} of {len(self.cells)} cells are done{rest}."

    def count_done(self) -> int:
        return sum(
            path.exists()
            for cell in self.cells
            for path in (self.folder / f"{cell.spec.id}.json", failure_file(self.folder, cell))
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
