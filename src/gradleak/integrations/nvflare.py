"""Captures what clients of NVFlare really send: observers of a job, or filters in it.

    attach(recipe, "captures")   # before recipe.execute(...); a FedJob is taken too

An observer is told of events and cannot stand in the wrong order; a filter writes what reaches its
own place among the others. Neither changes a message or draws a random number.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe
from torch import Tensor

from gradleak.core.errors import GradleakError
from gradleak.integrations.messages import LocalTraining, MessageRecorder, Reply

ROUND = "current_round"
KINDS = {DataKind.WEIGHTS: "weights", DataKind.WEIGHT_DIFF: "difference"}
# Of a message's headers those that say something of the client; the others address it
TOLD = ("current_round", "num_rounds", "lr", "learning_rate")
Side = Literal["clients", "server"]


def attach(
    job: Recipe | FedJob,
    folder: str | Path,
    *,
    side: Side = "clients",
    learning_rate: float | None = None,
    steps: int | None = None,
    optimiser: str = "sgd",
) -> None:
    """Puts observers into a job: at the output of its clients, or at the input of its server."""
    if side not in ("clients", "server"):
        raise GradleakError(f"side is clients or server, not {side!r}.")
    if not isinstance(job, (Recipe, FedJob)):
        raise GradleakError(f"attach() wants a Recipe or a FedJob, not a {type(job).__name__}.")
    observer = CaptureObserver(
        str(Path(folder).absolute()), learning_rate=learning_rate, steps=steps, optimiser=optimiser
    )
    if side == "server":
        (job._job if isinstance(job, Recipe) else job).to_server(observer, id="gradleak_capture")
    elif isinstance(job, Recipe):
        job._add_to_client_apps(observer, id="gradleak_capture")
    else:
        job.to_clients(observer, id="gradleak_capture")


class CaptureObserver(FLComponent):  # type: ignore[misc]
    """Writes what leaves a client after its filters, or what a server receives before its own.

    Which of both it is it sees by where it runs. Rounds are those of the messages, or counted.
    """

    def __init__(
        self,
        folder: str,
        learning_rate: float | None = None,
        steps: int | None = None,
        optimiser: str = "sgd",
    ) -> None:
        super().__init__()
        self.folder, self.learning_rate = folder, learning_rate
        self.steps, self.optimiser = steps, optimiser
        LocalTraining(learning_rate, steps, optimiser)  # refused here, before processes start
        self._watched: Watch | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Notes what comes down and writes what leaves."""
        on_server = _is_server(fl_ctx)
        result = (
            EventType.BEFORE_TASK_RESULT_FILTER if on_server else EventType.AFTER_TASK_RESULT_FILTER
        )
        # What a client is given lies there before its training, which may change it in place
        if event_type == EventType.AFTER_TASK_DATA_FILTER:
            self._watch().note_sent(fl_ctx.get_prop(FLContextKey.TASK_DATA), fl_ctx, on_server)
        elif event_type == result:
            self._watch().write(fl_ctx.get_prop(FLContextKey.TASK_RESULT), fl_ctx, on_server)

    def _watch(self) -> "Watch":
        if self._watched is None:  # in the process that sees messages, not in the one that starts
            training = LocalTraining(self.learning_rate, self.steps, self.optimiser)
            self._watched = Watch(MessageRecorder(self.folder, training, "nvflare"))
        return self._watched


class CaptureFilter(Filter):  # type: ignore[misc]
    """Does the same as a filter: the last of a client's output, and the last of its input.

    One of it is told what came down and the other what leaves, so that both are needed, with the
    same folder.
    """

    watches: ClassVar[dict[str, "Watch"]] = {}  # of this process: both filters share one

    def __init__(
        self,
        folder: str,
        learning_rate: float | None = None,
        steps: int | None = None,
        optimiser: str = "sgd",
    ) -> None:
        super().__init__()
        self.folder, self.learning_rate = str(Path(folder).absolute()), learning_rate
        self.steps, self.optimiser = steps, optimiser
        LocalTraining(learning_rate, steps, optimiser)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Writes the message down and hands it on."""
        watch = self.watches.get(self.folder)
        if watch is None:
            training = LocalTraining(self.learning_rate, self.steps, self.optimiser)
            watch = Watch(MessageRecorder(self.folder, training, "nvflare"))
            self.watches[self.folder] = watch
        on_server = _is_server(fl_ctx)
        inward = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN
        if inward != on_server:
            watch.note_sent(shareable, fl_ctx, on_server)
        else:
            watch.write(shareable, fl_ctx, on_server)
        return shareable


class Watch:
    """What came down to clients, and what they answered."""

    def __init__(self, recorder: MessageRecorder) -> None:
        self.recorder = recorder
        self.sent: dict[str, tuple[str, int | None]] = {}  # by client and task: hash and round

    def note_sent(self, task: Any, fl_ctx: FLContext, on_server: bool) -> None:
        """Writes weights that come down."""
        if isinstance(task, Shareable):
            dxo = read_dxo(task)
            tensors = {} if dxo is None else read_tensors(dxo)
            digest = self.recorder.write_sent(tensors)
            self.sent[self._name(fl_ctx, on_server)] = (digest, find_round(task, dxo))

    def write(self, result: Any, fl_ctx: FLContext, on_server: bool) -> None:
        """Writes what a client answered."""
        if not isinstance(result, Shareable):
            return
        client, task = _find_client(fl_ctx, on_server), str(fl_ctx.get_prop(FLContextKey.TASK_NAME))
        dxo = read_dxo(result)
        encrypted = dxo is not None and dxo.get_meta_prop(MetaKey.PROCESSED_ALGORITHM) is not None
        sent, round = self.sent.get(self._name(fl_ctx, on_server), ("", None))
        if round is None:
            round = find_round(result, dxo)
        if round is None:
            round = self.recorder.count_round(f"{client} {task}")
        filters = [] if on_server else list_filters(fl_ctx, task)
        platform: dict[str, Any] = {
            "seen_by": "server" if on_server else "client",
            "filters": [describe_filter(one) for one in filters],
            "message": task,
            "budgets": {} if dxo is None else find_budgets(dxo.meta),
        }
        if encrypted:
            platform["secure_aggregation"] = True
        reply = Reply(
            client,
            round,
            {} if dxo is None or encrypted else read_tensors(dxo),
            "at the server" if on_server else "after the client's filters",
            KINDS.get(None if dxo is None else dxo.data_kind, "tensors"),
            "" if task == "train" else task,
            read_others(result, dxo),
            platform,
        )
        headers = {name: result.get_header(name) for name in TOLD}
        told = {name: value for name, value in headers.items() if value is not None}
        self.recorder.write(reply, sent, told)

    def _name(self, fl_ctx: FLContext, on_server: bool) -> str:
        return f"{_find_client(fl_ctx, on_server)} {fl_ctx.get_prop(FLContextKey.TASK_NAME)}"


def read_dxo(shareable: Shareable) -> DXO | None:
    """Returns what a message carries, if it is data of NVFlare's own form."""
    try:
        return from_shareable(shareable)
    except (ValueError, TypeError, KeyError):
        return None


def read_tensors(dxo: DXO) -> dict[str, Tensor]:
    """Returns copies of the arrays of a message, by name; scalars that are no arrays are left
    out."""
    if dxo.data_kind not in KINDS:
        return {}
    found = {}
    for name, value in dxo.data.items():
        if isinstance(value, Tensor):
            found[str(name)] = value.detach().cpu().clone()
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            # A copy, also of what is read only or lies in another byte order
            found[str(name)] = torch.tensor(value)
    return found


def read_others(shareable: Shareable, dxo: DXO | None) -> dict[str, Any]:
    """Returns what stands beside the arrays: metrics, counts, and how the task ended."""
    beside: dict[str, Any] = {}
    if dxo is not None:
        meta = {name: value for name, value in dxo.meta.items() if value is not None}
        # What FedAvg weighs by is mostly the number of examples, and called so by FLModel
        beside = {"meta": meta} if meta else {}
        if dxo.data_kind == DataKind.METRICS:
            beside["metrics"] = dict(dxo.data)
    code = shareable.get_header(ReservedHeaderKey.RC, ReturnCode.OK)
    return beside if code == ReturnCode.OK else {**beside, "error": str(code)}


def find_round(shareable: Shareable, dxo: DXO | None) -> int | None:
    """Returns the round that a message says it is of; some learners say none."""
    found = shareable.get_header(ROUND)
    if found is None and dxo is not None:
        found = dxo.get_meta_prop(ROUND)
    return int(found) if isinstance(found, int) and found >= 0 else None


def find_budgets(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a filter wrote of its own privacy into a message."""
    return {
        name: dict(value)
        for name, value in meta.items()
        if isinstance(value, Mapping) and "epsilon_total" in value
    }


def list_filters(fl_ctx: FLContext, task: str) -> list[Any]:
    """Returns the filters of a client's output, in their order, but for ours."""
    runner = fl_ctx.get_prop(FLContextKey.RUNNER)
    table = getattr(runner, "task_result_filters", None) or {}
    found = table.get(task + FilterKey.DELIMITER + FilterKey.OUT) or []
    return [one for one in found if not isinstance(one, CaptureFilter)]


def describe_filter(filter: Any) -> dict[str, Any]:
    """Returns a filter's name and what it was built with."""
    given = inspect.signature(type(filter).__init__).parameters
    fields = {name: getattr(filter, name) for name in given if hasattr(filter, name)}
    plain = {name: one for name, one in fields.items() if isinstance(one, (int, float, str))}
    return {"name": type(filter).__name__, **plain}


def _is_server(fl_ctx: FLContext) -> bool:
    return type(fl_ctx.get_prop(FLContextKey.RUNNER)).__name__ == "ServerRunner"


def _find_client(fl_ctx: FLContext, on_server: bool) -> str:
    if not on_server:
        return str(fl_ctx.get_identity_name())
    peer = fl_ctx.get_peer_context()
    return str(peer.get_identity_name() if peer is not None else "unnamed")
