"""Cells shared out over a Ray cluster: workers compute, this process keeps the records."""

import contextlib
import io
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from gradleak.audit.ready import Opened, open_all
from gradleak.audit.runner import Finished, Inputs, run_audits
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Display, Progress, Silent
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.core.plugins import VARIABLE
from gradleak.records.files import RecordError
from gradleak.records.schema import Record
from gradleak.records.store import SecretKey, check_writable, open_key, write_record
from gradleak.study.cells import Cell
from gradleak.study.grid import (
    Answer,
    CellResult,
    Clock,
    Failure,
    Grid,
    audit_in_one_call,
    groups_of,
    number_cells,
    run_cells,
)

RETRIES = 3  # of cells whose worker was lost


@dataclass(frozen=True)
class Cluster:
    """Where to compute: a cluster that is there, or one of this machine's own."""

    address: str | None = None
    # cpu: a core each; cuda: a GPU each; auto: a GPU where the cluster has any
    device: str = "auto"
    workers: int | None = None  # that work at once; as many as the cluster has room for
    memory: int | None = None  # bytes that each may hold


def run_on_ray(
    cells: Sequence[Cell], folder: Path, cluster: Cluster, display: Display, *, retry: bool
) -> list[CellResult]:
    """Runs the cells that have no record yet on a cluster; the records are those of a local run,
    but for time and cost.

    Targets and priors are opened here, once, and lie in the cluster's object store; data are read
    by name and must be there on every node, or be had from the hub.
    """
    _import_ray()  # named here where it is not installed
    if cluster.device not in ("auto", "cpu", "cuda"):
        raise GradleakError(
            "On Ray every worker has a device of its own: use --device cpu, cuda or auto, not"
            f" {cluster.device!r}."
        )
    check_writable(folder)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    driver = context.Process(
        target=_drive, args=(theirs, list(cells), folder, cluster, retry), daemon=True
    )
    driver.start()
    theirs.close()
    hear_out(driver, ours, display)
    return run_cells(cells, folder, "cpu", display, retry=False)  # reads them back


def _drive(
    parent: Connection, cells: Sequence[Cell], folder: Path, cluster: Cluster, retry: bool
) -> None:
    """The process that talks to the cluster. Ray ends it without a word where the cluster's head
    is lost."""
    mine = {"num_cpus": cluster.workers} if cluster.address is None and cluster.workers else {}
    try:
        ray = _import_ray()
        ray.init(
            address=cluster.address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": {VARIABLE: os.environ.get(VARIABLE, "")}},
            **mine,
        )
        try:
            grid = Grid(folder, Relay(parent), number_cells(cells), Inputs(folder))
            share_out(ray, find_left(cells, grid, retry=retry), grid, cluster)
        finally:
            ray.shutdown()
    except (GradleakError, RecordError) as error:
        parent.send(error)
    except Exception as error:
        parent.send(
            RunFailed(f"Ray ended with {type(error).__name__}: {' '.join(str(error).split())}")
        )
    except KeyboardInterrupt:
        return  # the parent has been told too


class Relay:
    """A display in another process: what is said there is said here."""

    def __init__(self, parent: Connection) -> None:
        self.parent = parent

    def say(self, sentence: str) -> None:
        self.parent.send(sentence)

    def watch(self, title: str, progress: Progress) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def hear_out(driver: BaseProcess, said: Connection, display: Display) -> None:
    """Passes on what a driver says until it ends; what it ended with is raised here."""
    error: Exception | None = None
    try:
        with contextlib.suppress(EOFError):
            while True:
                news = said.recv()
                if isinstance(news, Exception):
                    error = news
                else:
                    display.say(news)
        driver.join()
    finally:
        driver.terminate()  # one that came to its end is not harmed
        driver.join()
    if error is not None:
        raise error
    if driver.exitcode:
        raise RunFailed(
            "The Ray cluster was lost. Records of finished cells are in the folder: run the same"
            " command again when it is back, or without --engine ray."
        )


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise GradleakError(
            '--engine ray needs Ray, which is not installed: pip install "gradleak[ray]".'
        ) from error
    return ray


def find_left(cells: Sequence[Cell], grid: Grid, *, retry: bool) -> list[list[Cell]]:
    """Returns what is not answered, by the question that a local run asks and in its groups."""
    answered = grid.find_answers(cells, retry=retry)
    groups = [
        [cell for cell in group if cell.spec.id not in answered] for group in groups_of(cells)
    ]
    return [group for group in groups if group]


def share_out(ray: Any, groups: Sequence[Sequence[Cell]], grid: Grid, cluster: Cluster) -> None:
    """Has the workers of a cluster audit cells, and keeps what they answer."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    device = cluster.device if cluster.device != "auto" else "cuda" if gpus else "cpu"
    room = gpus if device == "cuda" else int(ray.cluster_resources().get("CPU", 1))
    if not room:
        raise GradleakError("This Ray cluster has no GPU: use --device cpu.")
    workers = min(cluster.workers or room, room)
    needs = {"num_gpus": 1} if device == "cuda" else {"num_cpus": 1}
    task = ray.remote(max_retries=RETRIES, **needs)(audit_cells)
    key, stored = ray.put(open_key(grid.folder).value), Stored(ray)
    count = sum(map(len, groups))
    grid.display.say(
        f"{count} cells on Ray, {workers} workers, a {'GPU' if device == 'cuda' else 'core'} each."
    )

    def send(specs: Sequence[AuditSpec]) -> Any:
        return task.remote(specs, stored.find(specs[0]), key, device, cluster.memory)

    began, clock = time.monotonic(), Clock(count)
    for cells, answers in collect_answers(ray, groups, grid, send, workers):
        for cell, answer in zip(cells, answers, strict=True):
            if isinstance(answer, Record):
                write_record(grid.folder, answer)
            grid.keep(cell, answer)
        clock.finished += len(cells)
        grid.display.say(f"{clock.finished} of {count} cells are done{clock.describe_rest()}.")
    if clock.finished:
        rate = 3600 * clock.finished / (time.monotonic() - began)
        grid.display.say(f"{rate:.0f} cells an hour.")


def collect_answers(
    ray: Any,
    groups: Sequence[Sequence[Cell]],
    grid: Grid,
    send: Callable[[Sequence[AuditSpec]], Any],
    workers: int,
) -> Iterator[tuple[list[Cell], list[Answer]]]:
    """Yields what became of the cells, as workers come back; a cell is claimed while it is out."""
    waiting = list(reversed(groups))
    out: dict[Any, tuple[list[Cell], contextlib.ExitStack]] = {}
    while waiting or out:
        while waiting and len(out) < workers:
            held = contextlib.ExitStack()
            # Those that another run has, or has finished by now, are left to it
            free = held.enter_context(grid.hold(waiting.pop()))
            found = grid.find_answers(free, retry=True)
            ours = [cell for cell in free if cell.spec.id not in found]
            if ours:
                out[send([cell.spec for cell in ours])] = (ours, held)
            else:
                held.close()
        if not out:
            return
        (ready,), _ = ray.wait(list(out), num_returns=1)
        cells, held = out.pop(ready)
        with held:
            yield cells, _fetch(ray, ready, len(cells))


def _fetch(ray: Any, ready: Any, cells: int) -> list[Answer]:
    try:
        return ray.get(ready)  # type: ignore[no-any-return]
    except ray.exceptions.RayError as error:  # lost more often than it is tried again
        name = type(error).__name__
        return [Failure(name, f"{name}: {error}")] * cells


class Stored:
    """Targets and priors in the object store, each put there when the first cell needs it."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.references: dict[tuple[object, ...], Any] = {}

    def find(self, spec: AuditSpec) -> Any:
        """Where those of an audit lie; none where they cannot be opened, which its worker will
        find out and say."""
        name = (spec.target, spec.dtype, spec.prior)
        if name not in self.references:
            try:
                self.references[name] = self.ray.put(pack(spec))
            except GradleakError:
                self.references[name] = None
        return self.references[name]


def audit_cells(
    specs: Sequence[AuditSpec],
    packed: bytes | None,
    key: bytes,
    device: str,
    memory: int | None = None,
) -> list[Answer]:
    """Audits of one group key on a worker: records, or else why there are none: a failure is an
    answer, which Ray does not try again."""

    def run(some: Sequence[AuditSpec]) -> list[Finished | GradleakError]:
        opened = None if packed is None else unpack(packed, device)
        return run_audits(some, device=device, key=SecretKey(key), opened=opened, memory=memory)

    return list(audit_in_one_call(specs, run))


def pack(spec: AuditSpec) -> bytes:
    """Opens the target and the prior of an audit on the CPU and returns them as bytes."""
    buffer = io.BytesIO()
    torch.save(open_all(spec, "cpu", Silent()), buffer)
    return buffer.getvalue()


def unpack(data: bytes, device: str) -> Opened:
    """Returns both on a device; what they shared they still share.

    Only ever of bytes that this program packed itself: they are code.
    """
    opened = torch.load(io.BytesIO(data), map_location=device, weights_only=False)
    assert isinstance(opened, Opened)
    return opened
