"""What goes between a server and its clients, written down as captures, whatever the framework."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from gradleak.captures import (
    CaptureError,
    CaptureHeader,
    Granted,
    ModelFacts,
    ProtocolFacts,
    write_reply,
    write_sent,
)
from gradleak.core.errors import GradleakError
from gradleak.records.files import make_private_folder

# What frameworks and their users call the learning rate among what the server sends to clients,
# and the number of examples among what clients send back
RATES = ("lr", "learning-rate", "learning_rate")
SIZES = ("num-examples", "num_examples")
STEPS = ("NUM_STEPS_CURRENT_ROUND",)  # as clients of NVFlare say how many they took
LONGEST = 500  # letters of a text, or entries of a list, that are kept of what left beside arrays


@dataclass(frozen=True)
class LocalTraining:
    """How clients train, as far as somebody says so; the server may send the rate."""

    learning_rate: float | None = None
    steps: int | None = None
    optimiser: str = "sgd"

    def __post_init__(self) -> None:
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise GradleakError(
                f"learning_rate must be a number above 0, not {self.learning_rate}."
            )
        if self.steps is not None and self.steps < 1:
            raise GradleakError(f"steps counts from 1, not {self.steps}.")


@dataclass(frozen=True)
class Reply:
    """What one client sent to the server in one round."""

    client: str
    round: int
    tensors: Mapping[str, Tensor]
    when: str
    kind: str = "weights"
    part: str = ""  # tells messages of one round apart
    beside: Mapping[str, Any] = field(default_factory=dict)
    platform: Mapping[str, Any] = field(default_factory=dict)
    defenses: tuple[str, ...] = ()


class MessageRecorder:
    """Writes what came down and what left, each once; a message that cannot be written is a
    warning, and training goes on."""

    def __init__(self, folder: str | Path, training: LocalTraining, framework: str) -> None:
        # Frameworks start processes elsewhere, from which a relative path would lead elsewhere
        self.folder, self.training = Path(folder).absolute(), training
        self.platform = {"framework": framework, "version": version(framework)}
        self.counted: dict[str, int] = {}  # rounds of each client, where nobody numbers them
        make_private_folder(self.folder)

    def write_sent(self, tensors: Mapping[str, Tensor]) -> str:
        """Writes the weights that came down to a client; returns their hash, if they are kept."""
        if not tensors:
            return ""
        try:
            return write_sent(self.folder, tensors, self.platform)
        except CaptureError as error:
            warnings.warn(f"What the server sent was not captured. {error}", stacklevel=2)
            return ""

    def write(self, reply: Reply, sent: str, told: Mapping[str, Any]) -> None:
        """Writes what left a client. `sent` is the hash of what came down to it, and `told` what
        else the server sent."""
        beside = make_plain(reply.beside)
        rate = self.training.learning_rate or _find_number(told, RATES)
        size = _find_count(beside, SIZES)
        steps = self.training.steps or _find_count(beside, STEPS)
        header = CaptureHeader(
            reply.kind,
            ModelFacts("", {}, sent, tuple(reply.tensors)),
            ProtocolFacts("fedavg", rate, steps, self.training.optimiser),
            Granted(batch_size=size),
            reply.defenses,
            reply.when,
            reply.round,
            reply.client,
            beside,
            platform=self.platform | make_plain({**reply.platform, "told": dict(told)}),
        )
        try:
            write_reply(self.folder, header, reply.tensors, reply.part)
        except CaptureError as error:
            warnings.warn(
                f"What client {reply.client} sent in round {reply.round} was not captured. {error}",
                stacklevel=2,
            )

    def count_round(self, client: str) -> int:
        """Returns how many messages that client was already seen to send, and counts this one."""
        self.counted[client] = self.counted.get(client, -1) + 1
        return self.counted[client]


def make_plain(value: Any) -> Any:
    """Returns what left beside the arrays as JSON has it; of bytes only how many there are."""
    if isinstance(value, Mapping):
        return {_cut(str(key)): make_plain(one) for key, one in value.items()}
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, (list, tuple)):
        left = [f"and {len(value) - LONGEST} more"] if len(value) > LONGEST else []
        return [make_plain(one) for one in value[:LONGEST]] + left
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # a number of numpy
        return make_plain(value.item())
    return _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _find_count(records: Any, names: tuple[str, ...]) -> int | None:
    found = _find_number(records, names)
    return int(found) if found is not None and found == int(found) else None


def _find_number(records: Any, names: tuple[str, ...]) -> float | None:
    """Returns a number above zero by its name, however deep it lies."""
    if not isinstance(records, Mapping):
        return None
    for name in names:
        value = records.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return value
    return next((found for one in records.values() if (found := _find_number(one, names))), None)
