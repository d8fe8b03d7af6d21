"""Cells shared out over a Ray cluster: workers compute, this process keeps the records."""

import contextlib
import io
import json
import multiprocessing
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from gradleak.audit import AuditSpec
from gradleak.audit.answered import Inputs, finished
from gradleak.audit.display import Display
from gradleak.audit.runner import run_audits
from gradleak.core.attack import Progress
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.core.prior import AnyPrior, PicturePrior, Prior
from gradleak.core.target import Target
from gradleak.records.errors import RecordError
from gradleak.records.files import write_whole
from gradleak.records.schema import Record
from gradleak.records.store import SecretKey, check_writable, open_key, write_record
from gradleak.study.cells import Cell
from gradleak.study.claims import claim
from gradleak.study.grid import CellResult, Clock, failure_file, groups_of, run_cells
from gradleak.study.plan import FAILED

RETRIES = 3  # of cells whose worker was lost
Answer = tuple[str, str]  # a record as JSON, or a traceback


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

    Targets and prior are opened here, once, and lie in the cluster's object store; data are read
    by name and must be there on every node, or be had from the hub.
    """
    _ray()  # named here where it is not installed
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
        ray = _ray()
        ray.init(
            address=cluster.address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            **mine,
        )
        try:
            _share_out(ray, _left(cells, folder, retry), folder, cluster, Relay(parent))
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


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise GradleakError(
            '--engine ray needs Ray, which is not installed: pip install "gradleak[ray]".'
        ) from error
    return ray


def _left(cells: Sequence[Cell], folder: Path, retry: bool) -> list[list[Cell]]:
    """What is not answered, by the question that a local run asks and in its groups."""
    inputs = Inputs(folder)
    groups = [
        [
            cell
            for cell in group
            if finished(folder, cell.spec, inputs) is None
            and (retry or not failure_file(folder, cell).exists())
        ]
        for group in groups_of(cells)
    ]
    return [group for group in groups if group]


def _share_out(
    ray: Any, groups: Sequence[Sequence[Cell]], folder: Path, cluster: Cluster, display: Display
) -> None:
    gpus = int(ray.cluster_resources().get("GPU", 0))
    device = cluster.device if cluster.device != "auto" else "cuda" if gpus else "cpu"
    room = gpus if device == "cuda" else int(ray.cluster_resources().get("CPU", 1))
    if not room:
        raise GradleakError("This Ray cluster has no GPU: use --device cpu.")
    workers = min(cluster.workers or room, room)
    needs = {"num_gpus": 1} if device == "cuda" else {"num_cpus": 1}
    task = ray.remote(max_retries=RETRIES, **needs)(audit_cells)
    key = ray.put(open_key(folder).value)
    count = sum(map(len, groups))
    display.say(
        f"{count} cells on Ray, {workers} workers, a {'GPU' if device == 'cuda' else 'core'} each."
    )
    began, clock = time.monotonic(), Clock(count)
    for cells, answers in _answers(
        ray, task, groups, folder, (Stored(ray), key, device, cluster.memory), workers
    ):
        for cell, answer in zip(cells, answers, strict=True):
            _keep(cell, answer, folder, display)
        clock.finished += len(cells)
        display.say(f"{clock.finished} of {count} cells are done{clock.left()}.")
    if clock.finished:
        display.say(f"{3600 * clock.finished / (time.monotonic() - began):.0f} cells an hour.")


def _answers(
    ray: Any,
    task: Any,
    groups: Sequence[Sequence[Cell]],
    folder: Path,
    rest: "tuple[Stored, Any, str, int | None]",
    workers: int,
) -> Iterator[tuple[list[Cell], list[Answer]]]:
    """What became of the cells, as workers come back; a cell is claimed while it is out."""
    stored, key, device, memory = rest
    waiting = list(reversed(groups))
    out: dict[Any, tuple[list[Cell], contextlib.ExitStack]] = {}
    while waiting or out:
        while waiting and len(out) < workers:
            group, held = waiting.pop(), contextlib.ExitStack()
            ours = [cell for cell in group if held.enter_context(claim(folder, cell.spec.id))]
            if ours:
                out[
                    task.remote(
                        [cell.spec for cell in ours], stored.of(ours[0].spec), key, device, memory
                    )
                ] = (ours, held)
            else:
                held.close()  # another run has them
        if not out:
            return
        (ready,), _ = ray.wait(list(out), num_returns=1)
        cells, held = out.pop(ready)
        with held:
            yield cells, _answer(ray, ready, len(cells))


class Stored:
    """Targets and prior in the object store, each put there when the first cell needs it."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.references: dict[tuple[object, ...], Any] = {}

    def of(self, spec: AuditSpec) -> Any:
        """Where those of an audit lie; none where they cannot be opened, which its worker will
        find out and say."""
        name = (spec.target, spec.dtype, spec.prior)
        if name not in self.references:
            try:
                self.references[name] = self.ray.put(pack(spec))
            except GradleakError:
                self.references[name] = None
        return self.references[name]


def _answer(ray: Any, ready: Any, cells: int) -> list[Answer]:
    try:
        return ray.get(ready)  # type: ignore[no-any-return]
    except ray.exceptions.RayError as error:  # lost more often than it is tried again
        return [("", f"{type(error).__name__}: {error}")] * cells


def _keep(cell: Cell, answer: Answer, folder: Path, display: Display) -> None:
    record, failure = answer
    path = folder / f"{cell.spec.id}{FAILED}"
    if record:
        write_record(folder, Record.from_json(json.loads(record)))
        path.unlink(missing_ok=True)
    else:
        write_whole(path, f"{cell.title}\n{cell.spec.to_dict()}\n\n{failure}")
        display.say(f"Failed; the traceback is in {path}.")


def audit_cells(
    specs: Sequence[AuditSpec],
    opened: bytes | None,
    key: bytes,
    device: str,
    memory: int | None = None,
) -> list[Answer]:
    """Audits of one group key on a worker: records, or else tracebacks: a failure is an answer,
    which Ray does not try again."""
    try:
        target, prior = (None, None) if opened is None else unpack(opened, device)
        found = run_audits(
            specs, device=device, key=SecretKey(key), target=target, prior=prior, memory=memory
        )
    except Exception:
        if len(specs) == 1:
            return [("", traceback.format_exc())]
        # The one at fault fails alone
        each = [audit_cells([spec], opened, key, device, memory) for spec in specs]
        return [answer for answers in each for answer in answers]
    return [
        (
            ("", f"{type(one).__name__}: {one}")
            if isinstance(one, GradleakError)
            else (json.dumps(one.record.to_json(), allow_nan=False), "")
        )
        for one in found
    ]


def pack(spec: AuditSpec) -> bytes:
    """Opens the target and the prior of an audit on the CPU and returns them as bytes."""
    target = spec.target.open(torch.device("cpu"), getattr(torch, spec.dtype))
    buffer = io.BytesIO()
    torch.save((target, spec.prior.open(target)), buffer)
    return buffer.getvalue()


def unpack(data: bytes, device: str) -> tuple[Target, AnyPrior]:
    """Returns both on a device; what they shared they still share.

    Only ever of bytes that this program packed itself: they are code.
    """
    target, prior = torch.load(io.BytesIO(data), map_location=device, weights_only=False)
    assert isinstance(target, Target)
    assert isinstance(prior, Prior | PicturePrior)
    return target, prior
