"""Captures what clients of Flower really send: a mod on the client, a grid around the server's.

    app = ClientApp(mods=[CaptureMod("captures"), LocalDpMod(...)])   # first: called last
    strategy.start(grid=CaptureGrid(grid, "captures"), ...)

Either alone is enough. Nothing of a message is changed, and no random number is drawn.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.client.mod.utils import make_ffn
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import Grid
from torch import Tensor

from gradleak.integrations.messages import LocalTraining, MessageRecorder, Reply

SECURE = "secaggplus_configs"  # the record of Flower's secure aggregation, SecAgg and SecAgg+
MASKED = "masked_params"
CLIP = "clipping_norm"  # sent by the server to clients that clip
ROUND = "server-round"
TRAIN = ("train", "train.default")
CallNext = Callable[[Message, Context], Message]


class CaptureMod:
    """Writes what leaves a client, after all other mods: let it be the first of them.

    Clients are called by their node's id. The learning rate is read off what the server sends
    (`lr`), where it is not given here; `steps` and `optimiser` are those of the local training.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        learning_rate: float | None = None,
        steps: int | None = None,
        optimiser: str = "sgd",
    ) -> None:
        training = LocalTraining(learning_rate, steps, optimiser)
        self.recorder = MessageRecorder(folder, training, "flwr")

    def __call__(self, message: Message, context: Context, call_next: CallNext) -> Message:
        """Lets the client answer, and writes down what it says."""
        came = read_arrays(message.content)  # now: a client may change it in place
        told = read_others(message.content)
        node = str(context.node_id)
        mods = list_mods(call_next)
        platform = {"seen_by": "client", "mods": [describe_mod(mod) for mod in mods]}
        if (partition := context.node_config.get("partition-id")) is not None:
            platform["partition"] = str(partition)
        defenses = tuple(state_defenses(mods, told))
        observed = Exchange(self.recorder, node, message, came, told, platform, defenses)
        try:
            reply = call_next(message, context)
        except Exception as error:
            # As Flower will send it: the name of the exception and its text
            observed.write_error(f"{type(error).__name__}: {error}")
            raise
        observed.write(reply)
        return reply


def attach(
    app: ClientApp,
    folder: str | Path,
    *,
    learning_rate: float | None = None,
    steps: int | None = None,
    optimiser: str = "sgd",
) -> ClientApp:
    """Puts a `CaptureMod` around an app that is built already, and returns the app."""
    mod = CaptureMod(folder, learning_rate=learning_rate, steps=steps, optimiser=optimiser)
    if app._call is not None:
        app._call = make_ffn(app._call, [mod])
    for name, function in app._registered_funcs.items():
        app._registered_funcs[name] = make_ffn(function, [mod])
    app._mods.insert(0, mod)  # functions that are registered later
    return app


class CaptureGrid(Grid):  # type: ignore[misc]
    """Writes what the server receives, in front of any strategy; all else is the grid's own."""

    def __init__(
        self,
        grid: Grid,
        folder: str | Path,
        *,
        learning_rate: float | None = None,
        steps: int | None = None,
        optimiser: str = "sgd",
    ) -> None:
        self.grid = grid
        training = LocalTraining(learning_rate, steps, optimiser)
        self.recorder = MessageRecorder(folder, training, "flwr")
        self.waiting: dict[tuple[int, str], Exchange] = {}  # by node and type of message

    def __getattr__(self, name: str) -> Any:
        if name == "grid":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.grid, name)

    def set_run(self, run: Any) -> None:
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        return self.grid.run

    def create_message(self, *given: Any, **named: Any) -> Message:
        return self.grid.create_message(*given, **named)

    def get_node_ids(self) -> Any:
        return self.grid.get_node_ids()

    def get_nodes(self) -> Any:
        return self.grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Any:
        return self.grid.push_messages(self._note(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._watch(self.grid.pull_messages(message_ids))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self._watch(self.grid.send_and_receive(self._note(messages), timeout=timeout))

    def _note(self, messages: Iterable[Message]) -> Sequence[Message]:
        """Notes what goes to which client; one state for all is read once."""
        every = list(messages)
        read: dict[int, Mapping[str, Mapping[str, Tensor]]] = {}
        for message in every:
            content, node = message.content, message.metadata.dst_node_id
            key = id(content)
            if key not in read:
                read[key] = read_arrays(content)
            self.waiting[node, message.metadata.message_type] = Exchange(
                self.recorder, str(node), message, read[key], read_others(content),
                {"seen_by": "server"}, (),
            )  # fmt: skip
        return every

    def _watch(self, replies: Iterable[Message]) -> Iterable[Message]:
        if isinstance(replies, list):
            for reply in replies:
                self._write(reply)
            return replies
        return self._write_in_passing(replies)

    def _write_in_passing(self, replies: Iterable[Message]) -> Iterator[Message]:
        for reply in replies:
            self._write(reply)
            yield reply

    def _write(self, reply: Message) -> None:
        facts = reply.metadata
        # Errors that a mod of Flower answers with are addressed to the node that they come from
        for node in (facts.src_node_id, facts.dst_node_id):
            if (observed := self.waiting.pop((node, facts.message_type), None)) is not None:
                observed.write(reply)
                return


class Exchange:
    """A message to a client, whose answer is awaited."""

    def __init__(
        self,
        recorder: MessageRecorder,
        node: str,
        message: Message,
        came: Mapping[str, Mapping[str, Tensor]],
        told: Mapping[str, Any],
        platform: Mapping[str, Any],
        defenses: tuple[str, ...],
    ) -> None:
        self.recorder, self.node, self.came, self.told = recorder, node, came, told
        self.platform, self.defenses = platform, defenses
        self.type = message.metadata.message_type
        found = find_round(message, told)
        self.round = recorder.count_round(f"{node} {self.type}") if found is None else found
        self.sent = (
            {name: recorder.write_sent(one) for name, one in came.items()} if self._trains else {}
        )

    @property
    def _trains(self) -> bool:
        return str(self.type).partition(".")[0] == "train"

    def write(self, reply: Message) -> None:
        """Writes an answer: its arrays, a file a record, and what stands beside them."""
        if reply.has_error():
            error = reply.error
            self.write_error(f"code {error.code}" + (f": {error.reason}" if error.reason else ""))
            return
        arrays, beside = read_arrays(reply.content), read_others(reply.content)
        secure = SECURE in reply.content.config_records
        for name in arrays or {"": {}}:
            part = name if len(arrays) > 1 else ""
            self._write(arrays.get(name, {}), beside, part, self._find_sent(name), secure)

    def write_error(self, text: str) -> None:
        """Writes that the client answered with an error, whose text leaves it too."""
        self._write({}, {"error": text}, "", "", False)

    def _write(
        self,
        tensors: Mapping[str, Tensor],
        beside: Mapping[str, Any],
        part: str,
        sent: str,
        secure: bool,
    ) -> None:
        kind = "" if self.type in TRAIN else self.type.replace(".", "-")
        platform = {**self.platform, "message": self.type}
        if secure:
            platform["secure_aggregation"] = True
        reply = Reply(
            self.node,
            self.round,
            tensors,
            "after the client's mods" if self.platform["seen_by"] == "client" else "at the server",
            part="-".join(filter(None, (kind, part))),
            beside=beside,
            platform=platform,
            defenses=self.defenses,
        )
        self.recorder.write(reply, sent, self.told)

    def _find_sent(self, name: str) -> str:
        """Returns the hash of what came down by the same name, or of all there was."""
        every = list(self.sent.values())
        return self.sent.get(name, every[0] if len(every) == 1 else "")


def read_arrays(content: RecordDict) -> dict[str, dict[str, Tensor]]:
    """Returns copies of the arrays of a message, by record and name; records without any are left
    out."""
    found = {
        record: {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}
        for record, arrays in content.array_records.items()
    }
    return {record: tensors for record, tensors in found.items() if tensors}


def read_others(content: RecordDict) -> dict[str, Any]:
    """Returns what stands in a message beside its arrays, by record."""
    records = {**content.metric_records, **content.config_records}
    return {name: dict(record) for name, record in records.items()}


def find_round(message: Message, told: Mapping[str, Any]) -> int | None:
    """Returns the round that a message says it is of."""
    for record in told.values():
        if isinstance(record, Mapping) and isinstance(record.get(ROUND), int):
            return int(record[ROUND])
    group = message.metadata.group_id
    return int(group) if group.isascii() and group.isdecimal() else None


def list_mods(call_next: Any) -> list[Any]:
    """Returns the mods within, the outermost first, as far as Flower's way of wrapping shows
    them."""
    found = []
    while inspect.isfunction(call_next):
        held = inspect.getclosurevars(call_next).nonlocals
        if "_mod" not in held or "_ffn" not in held:
            break
        found.append(held["_mod"])
        call_next = held["_ffn"]
    return found


def describe_mod(mod: Any) -> dict[str, Any]:
    """Returns a mod's name and what it was built with."""
    name = getattr(mod, "__name__", type(mod).__name__)
    fields = {} if inspect.isfunction(mod) else vars(mod)
    plain = {key: one for key, one in fields.items() if isinstance(one, (int, float, str))}
    return {"name": name, **plain}


def state_defenses(mods: Sequence[Any], told: Mapping[str, Any]) -> Iterator[str]:
    """Yields what Flower's own mods do to an update, as gradleak calls it, the innermost first."""
    clips = [one[CLIP] for one in told.values() if isinstance(one, Mapping) and CLIP in one]
    for mod in reversed(mods):
        if isinstance(mod, LocalDpMod) and mod.epsilon > 0 and 0 < mod.delta < 1:
            std = mod.sensitivity * math.sqrt(2 * math.log(1.25 / mod.delta)) / mod.epsilon
            noise = std / mod.clipping_norm
            yield (
                f"client_dp:clip={mod.clipping_norm},noise_multiplier={noise},sampling_rate=1.0,"
                f"steps=1,delta={mod.delta}"
            )
        elif mod in (fixedclipping_mod, adaptiveclipping_mod) and clips:
            yield f"clipping:clip={clips[0]}"
