"""What leaks from the clients of a federated run: the updates of a round attacked together, at the
weights that came down to them.

Frameworks wrote down what left each client as it left. Here that becomes updates again, and with
the texts of the clients a record for each round.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gradleak.audit.own_guesses import Reconstructions, reconstruct
from gradleak.audit.own_score import hash_updates, score
from gradleak.audit.own_update import describe_protocol, observe_tensors, read_facts
from gradleak.audit.spec import read
from gradleak.captures import (
    CaptureHeader,
    ClientMessage,
    Federation,
    match_names,
    read_capture,
    subtract_states,
)
from gradleak.captures.header import write_printable
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.protocol import Protocol
from gradleak.core.target import Target, TargetSpec
from gradleak.datasets import ClientTexts, HeldTexts
from gradleak.protocols.fedavg import FedAvg
from gradleak.records.schema import Record
from gradleak.targets.causal_language_model import CausalLanguageModel
from gradleak.targets.in_memory import open_in_memory
from gradleak.targets.text_classifier import TextClassifier

SECURE = (
    "Client {client} sent masks in round {round} (secure aggregation): the server sees the sum of"
    " all clients only, and no single update can be attacked."
)
# What a framework says of its own privacy: Flower's LocalDpMod, NVFlare's filter SVTPrivacy
BUDGET = ("epsilon", "delta", "epsilon_total")


@dataclass(frozen=True)
class ClientRound:
    """Clients of one round that had the same weights, defenses and training."""

    round: int
    defenses: tuple[str, ...]
    protocol: str
    messages: tuple[ClientMessage, ...]

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(message.header.client for message in self.messages)


@dataclass(frozen=True)
class AttackedRound:
    """What attacks made of one round; with the truth beside it, a record."""

    of: ClientRound
    found: Reconstructions
    record: Record | None


def group_rounds(federation: Federation, protocol: str | None = None) -> list[ClientRound]:
    """Returns what can be attacked, by round. `protocol` says how clients train, where captures
    do not."""
    if protocol is not None and not isinstance(read("protocol", protocol, Protocol), FedAvg):
        raise GradleakError(
            f"Clients that send weights have trained, and {protocol} is one gradient: say how they"
            " trained, as in fedavg:steps=1,learning_rate=0.5."
        )
    found: dict[tuple[Any, ...], list[ClientMessage]] = {}
    for message in federation.messages:
        header = message.header
        if message.has_arrays and header.model.weights_hash and not is_secure(header):
            line = protocol or describe_protocol(header)
            key = (header.round or 0, header.model.weights_hash, header.defenses, line)
            found.setdefault(key, []).append(message)
    return [
        ClientRound(round, defenses, line, tuple(messages))
        for (round, _, defenses, line), messages in found.items()
    ]


def list_refusals(federation: Federation) -> list[str]:
    """Returns, in sentences, what clients sent that cannot be attacked, and why."""
    found = [f"{path}: {reason}" for path, reason in federation.unreadable]
    for message in federation.messages:
        header = message.header
        named = {"client": header.client, "round": header.round}
        if is_secure(header):
            found.append(SECURE.format(**named))
        elif reason := header.platform.get("not_captured"):
            found.append("Client {client}, round {round}: {reason}".format(**named, reason=reason))
        elif "error" in header.other_records:
            found.append(
                "Client {client} answered round {round} with an error, whose text left it"
                " too.".format(**named)
            )
        elif message.has_arrays and not header.model.weights_hash:
            found.append(
                "Client {client} sent arrays in round {round} for which no weights came"
                " down.".format(**named)
            )
    return list(dict.fromkeys(found))


def is_secure(header: CaptureHeader) -> bool:
    """Whether secure aggregation hid what a client sent."""
    return bool(header.platform.get("secure_aggregation"))


def list_beside(header: CaptureHeader) -> list[str]:
    """Returns the names of what left a client beside its arrays."""
    return [
        write_printable(name)
        for key, value in header.other_records.items()
        for name in (value if isinstance(value, Mapping) and value else (key,))
    ]


def list_budgets(header: CaptureHeader) -> list[str]:
    """Returns what the framework says of its own privacy, with its numbers."""
    found = []
    for name, part in _find_parts(header.platform):
        given = (key for key in BUDGET if isinstance(part.get(key), (int, float)))
        if told := ", ".join(f"{key} {part[key]:g}" for key in given):
            found.append(f"{write_printable(name)} has {told}")
    return found


def list_applied(header: CaptureHeader) -> list[str]:
    """Returns the names of the mods or filters that a client sent its update through."""
    lists = [header.platform.get(key) for key in ("mods", "filters")]
    every = [part for one in lists if isinstance(one, list) for part in one]
    named = [part.get("name") for part in every if isinstance(part, dict)]
    return [write_printable(name) for name in named if isinstance(name, str)]


def attack_round(
    federation: Federation,
    of: ClientRound,
    target: Target,
    spec: TargetSpec,
    truth: HeldTexts | None,
    *,
    attacks: Sequence[str] | None = None,
    prior: str = "auto",
    seed: int = 0,
    batch_size: int | None = None,
    time_limit: float | None = None,
    memory: int | None = None,
    out: Path | None = None,
    keep_secrets: bool = False,
) -> AttackedRound:
    """Attacks all clients of a round; with the texts that they held it is scored and kept."""
    examples = [] if truth is None else [find_texts(truth, message) for message in of.messages]
    found = reconstruct(
        observe_round(federation, of, target, batch_size),
        attacks=list(attacks) if attacks else None,
        prior=prior,
        seed=seed,
        time_limit=time_limit,
        memory=memory,
    )
    if truth is None:
        return AttackedRound(of, found, None)
    labels = [[one.label for one in held] for held in examples]
    record = score(
        found,
        [[one.text for one in held] for held in examples],
        labels=None if any(None in held for held in labels) else labels,
        out=out,
        keep_secrets=keep_secrets,
        target=spec,
        data=_describe_texts(of, found),
    )
    return AttackedRound(of, found, record)


def observe_round(
    federation: Federation, of: ClientRound, target: Target, batch_size: int | None = None
) -> list[Observation]:
    """Makes observations of a round: what clients sent, less what came down to them.

    `batch_size` is what an attacker knows of clients that did not say how many examples they have.
    """
    if not isinstance(target, (TextClassifier, CausalLanguageModel)):
        raise GradleakError(
            "Clients of text models can be audited, and this model reads no text: name a sequence"
            " classifier or a causal language model with --model."
        )
    sent = federation.read_sent(of.messages[0])
    module: Any = copy.deepcopy(target.module)
    state = {name: tuple(value.shape) for name, value in module.state_dict().items()}  # buffers too
    names = match_names({name: tuple(value.shape) for name, value in sent.items()}, state)
    module.load_state_dict({names[name]: tensor for name, tensor in sent.items()}, strict=False)
    parameters = {name for name, _ in module.named_parameters()}
    updates = [_read_update(message, sent, names, parameters) for message in of.messages]
    # What is frozen is sent as it came
    moved = {name for one in updates for name, tensor in one.items() if bool(tensor.any())}
    opened = open_in_memory(module, target.tokenizer, target.device, frozenset(moved))
    facts = (read_facts(one.header, of.defenses, of.protocol, batch_size) for one in of.messages)
    shown = ({name: one[name] for name in one if name in moved} for one in updates)
    return [observe_tensors(opened, *pair) for pair in zip(shown, facts, strict=True)]


def find_texts(truth: HeldTexts, message: ClientMessage) -> list[Any]:
    """Returns what a client trained on, by the name of its node or of its partition."""
    header = message.header
    partition = header.platform.get("partition")
    # A partition's name is a name only where it is no other client's
    names = [header.client] if partition is None else [header.client, f"partition-{partition}"]
    found = truth.find(names, header.round or 0)
    if not found:
        raise GradleakError(
            f"{truth.path} has no text of client {header.client}, round {header.round}: name it by"
            f" {' or '.join(names)}, or choose others with --client and --round."
        )
    return found


def _read_update(
    message: ClientMessage,
    sent: Mapping[str, Tensor],
    names: Mapping[str, str],
    parameters: set[str],
) -> dict[str, Tensor]:
    """Returns weights before training minus weights after it, by the model's names."""
    capture = read_capture(message.path)
    after = capture.tensors
    if capture.header.kind == "weights":
        if strange := sorted(after.keys() - sent.keys()):
            raise GradleakError(
                f"{message.path} holds {strange[0]!r}, which did not come down to the client: no"
                " difference can be taken."
            )
        differences = subtract_states({name: sent[name] for name in after}, after)
    else:
        differences = dict(after)
        names = names if after.keys() <= names.keys() else {name: name for name in after}
    return {
        names[name]: -tensor for name, tensor in differences.items() if names[name] in parameters
    }


def _describe_texts(of: ClientRound, found: Reconstructions) -> ClientTexts:
    headers = [message.header for message in of.messages]
    return ClientTexts(
        of.round,
        of.clients,
        hash_updates(found.observations),
        str(headers[0].platform.get("framework", "")),
        tuple(dict.fromkeys(name for header in headers for name in list_beside(header))),
        tuple(dict.fromkeys(one for header in headers for one in list_budgets(header))),
    )


def _find_parts(value: Any, name: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields every nested mapping with its name, or that under which it lies."""
    if isinstance(value, Mapping):
        yield str(value.get("name", name)), value
        for key, one in value.items():
            yield from _find_parts(one, str(key))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _find_parts(one, name)
