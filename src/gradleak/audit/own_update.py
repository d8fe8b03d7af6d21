"""What an attack is given of an update of one's own: named tensors, and what is known of them.

An audit plays the client; here the client has been: somebody trained, and an update is what they
have. `observe` makes an observation of it; `own_guesses` attacks that and scores the guesses.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gradleak.audit.spec import read
from gradleak.captures import Capture, CaptureHeader, match_names, read_capture
from gradleak.core.defense import Defense, refuse_wrong_order
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Knowledge, Observation, Round, check_update
from gradleak.core.protocol import Protocol
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.targets.in_memory import (
    hash_vocabulary,
    hash_weights,
    open_in_memory,
    refuse_strange,
    unwrap,
)
from gradleak.targets.opened import LossOver, OpenedTransformer

Gradients = Mapping[str, Tensor] | Sequence[Tensor]
HALF = {torch.bfloat16: "rounding:dtype=bf16", torch.float16: "rounding:dtype=fp16"}


def observe(
    model: Any,
    tokenizer: Any,
    gradients: Gradients,
    *,
    batch_size: int | None = None,
    lengths: Sequence[int] | None = None,
    labels: Sequence[int] | None = None,
    defense: str | Sequence[str] = (),
    protocol: str = "fedsgd",
    scale: float = 1.0,
    loss_over: LossOver = "tokens",
    device: str = "cpu",
) -> Observation:
    """Makes an observation of tensors that a client sent for this model, at the weights it has.

    `gradients` are tensors by the model's own names, wrapped or not, or a list in its order; what
    is not there is not seen. With `protocol="fedavg:…"` they are weights before training minus
    weights after it. What an attacker is to know beside it is said by the other arguments, and
    nothing else is known: `batch_size`, the `lengths` of the texts in tokens, their `labels`, what
    `defense` was applied. `scale` is what the mean gradient was multiplied by, such as the number
    of batches that were summed. Where tokens have labels, the loss is taken to be one mean over the
    tokens of the batch, as in transformers, or with `loss_over="texts"` a mean over texts of such
    means.
    """
    facts = Facts(batch_size, _tuple(lengths), _tuple(labels), list_lines(defense), protocol, scale)
    target = _open(model, tokenizer, gradients, device, loss_over)
    return observe_tensors(target, gradients, facts)


def observe_capture(
    capture: Capture | str | Path,
    model: Any = None,
    tokenizer: Any = None,
    device: str = "cpu",
    target: Target | None = None,
) -> Observation:
    """Makes an observation of a capture, or of the file that holds it.

    It is of the `model` with its `tokenizer`, or of a `target` that is open already.
    """
    held = capture if isinstance(capture, Capture) else read_capture(Path(capture))
    header, tensors = held.header, held.tensors
    if header.kind == "weights":
        raise GradleakError(
            "This capture holds weights and no update: gradleak federated audit FOLDER takes those"
            " that came down off it."
        )
    if target is None and (model is None or tokenizer is None):
        raise GradleakError(
            "A capture does not hold the model: pass model= and tokenizer=, as they were where the"
            " update was computed."
        )
    _refuse_other_weights(header, model if target is None else target.module)
    if isinstance(target, OpenedTransformer):
        tokenizer = target.tokenizer
    if tokenizer is not None:
        _refuse_other_words(header, tokenizer)
    if header.kind == "difference":  # as files hold it: after minus before
        tensors = {name: -tensor for name, tensor in tensors.items()}
    if target is None:
        target = _open(model, tokenizer, tensors, device, "tokens")
    if isinstance(target, OpenedTransformer):
        target = target.with_loss_over(cast(LossOver, header.protocol.loss_over))
    return observe_tensors(
        target, tensors, read_facts(header, header.defenses, describe_protocol(header))
    )


@dataclass(frozen=True)
class Facts:
    """What is known of an update beside its numbers."""

    batch_size: int | None
    lengths: tuple[int, ...] | None
    labels: tuple[int, ...] | None
    defenses: tuple[str, ...]
    protocol: str
    scale: float

    def __post_init__(self) -> None:
        counts = {"lengths": self.lengths, "labels": self.labels}
        given = {name: len(values) for name, values in counts.items() if values is not None}
        if self.batch_size is not None:
            given["batch_size"] = self.batch_size
        if len(set(given.values())) > 1:
            told = ", ".join(f"{name} of {count}" for name, count in given.items())
            raise GradleakError(f"These speak of different batches: {told}.")
        if any(count < 1 for count in given.values()):
            raise GradleakError("A batch has at least one text.")
        if not self.scale > 0:
            raise GradleakError(f"scale must be a number above 0, not {self.scale}.")

    @property
    def size(self) -> int | None:
        """How many texts there are, if anything says so."""
        told = self.labels if self.lengths is None else self.lengths
        return self.batch_size if told is None else len(told)


def read_facts(
    header: CaptureHeader, defenses: tuple[str, ...], protocol: str, batch_size: int | None = None
) -> Facts:
    """Returns what a capture grants of an update, sent through these defenses by this protocol.

    `batch_size` is what is known where the capture does not say.
    """
    told, scale = header.granted, header.protocol.scale
    size = told.batch_size or batch_size
    return Facts(size, told.lengths, told.labels, defenses, protocol, scale)


def grant(observation: Observation, know: Mapping[str, Any] | Sequence[str]) -> Observation:
    """Tells an attacker something else: of what was granted the facts that are named, or beside it
    facts with their values."""
    names = (know,) if isinstance(know, str) else tuple(know)
    if strange := [name for name in names if name not in list(Fact)]:
        raise GradleakError(f"know names {', '.join(Fact)}, not {strange[0]!r}.")
    knows = observation.knows
    if not isinstance(know, Mapping):
        if lacking := [name for name in names if Fact(name) not in knows.facts]:
            raise GradleakError(
                f"know names {lacking[0]}, which was not granted where the update was captured or"
                f" observed: give its value too, know={{{lacking[0]!r}: …}}."
            )
        return replace(observation, knows=knows.limit_to(map(Fact, names)))
    lengths, labels = _tuple(know.get("lengths")), _tuple(know.get("labels"))
    told = Facts(
        know.get("batch_size", knows.batch_size),
        knows.lengths if lengths is None else lengths,
        labels if labels is not None or knows.labels is None else tuple(knows.labels.tolist()),
        list_lines(know.get("defense", ())),
        observation.protocol.name,
        1.0,
    )
    stated = tuple(read("defense", line, Defense) for line in told.defenses)
    refuse_wrong_order(stated)
    return replace(
        observation,
        knows=Knowledge(
            knows.labels if labels is None else _classes(observation.target, labels),
            told.lengths,
            told.size,
            stated if "defense" in know else knows.defenses,
        ),
    )


def observe_tensors(target: Target, gradients: Gradients, facts: Facts) -> Observation:
    """Makes an observation of tensors at the weights that an opened target has."""
    tensors = _name_tensors(target, gradients)
    defenses = tuple(_read_defenses(facts, tensors))
    seen = {
        name: tensor.detach().to(target.device, target.dtype)[None].clone() / facts.scale
        for name, tensor in tensors.items()
    }
    update = Update(seen).cut(part for part in target.parts if part.parameter in seen)
    check_update(target, update)
    labels = None if facts.labels is None else _classes(target, facts.labels)
    knows = Knowledge(labels, facts.lengths, facts.size, defenses)
    protocol: Protocol = read("protocol", facts.protocol, Protocol)
    return Observation(0, (Round(target, update),), knows, protocol)


def _open(
    model: Any, tokenizer: Any, gradients: Gradients, device: str, loss_over: LossOver
) -> Target:
    """Opens a copy of the model in which all trains that trains in it, or that was sent."""
    inner = unwrap(model)
    refuse_strange(inner, type(inner).__name__)
    named = dict(inner.named_parameters()) if isinstance(inner, torch.nn.Module) else {}
    trained = {name for name, value in named.items() if value.requires_grad}
    if isinstance(gradients, Mapping) and named:
        shapes = {name: tuple(tensor.shape) for name, tensor in gradients.items()}
        expected = {name: tuple(value.shape) for name, value in named.items()}
        trained |= set(match_names(shapes, expected).values())
    opened = torch.device(device)
    return open_in_memory(model, tokenizer, opened, frozenset(trained), loss_over)


def _name_tensors(target: Target, gradients: Gradients) -> dict[str, Tensor]:
    """Returns the tensors by the names that the target has for them."""
    named = (
        dict(gradients)
        if isinstance(gradients, Mapping)
        else {str(place): tensor for place, tensor in enumerate(gradients)}
    )
    if not named:
        raise GradleakError("There is no tensor in this update: nothing was sent.")
    expected = {name: tuple(value.shape) for name, value in target.module.named_parameters()}
    names = match_names({name: tuple(one.shape) for name, one in named.items()}, expected)
    return {names[name]: tensor for name, tensor in named.items() if name in names}


def _read_defenses(facts: Facts, tensors: Mapping[str, Tensor]) -> Iterator[Defense]:
    """Yields the defenses that are known, and the rounding of tensors sent in 16 bits."""
    stated = [read("defense", one, Defense) for one in facts.defenses]
    refuse_wrong_order(stated)
    yield from stated
    if not any(one.name == "rounding" for one in stated):
        halves = dict.fromkeys(tensor.dtype for tensor in tensors.values() if tensor.dtype in HALF)
        yield from (read("defense", HALF[dtype], Defense) for dtype in halves)


def _classes(target: Target, labels: Sequence[int]) -> Tensor | None:
    if target.labels_are_tokens or target.labels_are_open:
        return None  # of a language model they are the text, and others are never told
    return torch.tensor([target.class_of(label) for label in labels], device=target.device)


def describe_protocol(header: CaptureHeader) -> str:
    facts = header.protocol
    if header.kind != "difference" and facts.name == "fedsgd":
        return "fedsgd"
    if facts.learning_rate is None:
        raise GradleakError(
            "This capture holds a difference of weights and does not say with which learning rate"
            " they were trained: give learning_rate= when it is captured."
        )
    steps = facts.steps or 1
    return f"fedavg:steps={steps},learning_rate={facts.learning_rate},optimiser={facts.optimiser}"


def _refuse_other_weights(header: CaptureHeader, model: Any) -> None:
    stated, found = header.model.weights_hash, hash_weights(model)
    if stated and stated != found:
        raise GradleakError(
            "This update was computed at other weights than the model has now"
            f" ({stated[:8]}…, not {found[:8]}…): load the weights of before the optimiser's step,"
            " or those that the server sent out."
        )


def _refuse_other_words(header: CaptureHeader, tokenizer: Any) -> None:
    stated = header.model.tokenizer_hash
    if stated and stated != hash_vocabulary(tokenizer):
        raise GradleakError(
            "This update was computed on texts of another tokenizer, whose words have other ids:"
            " pass the one that the capture was made with."
        )


def _tuple(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(int(value) for value in values)


def list_lines(given: str | Sequence[str]) -> tuple[str, ...]:
    """Returns component lines as they are given to functions: one, or several."""
    return (given,) if isinstance(given, str) else tuple(given)
