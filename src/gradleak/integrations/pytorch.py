"""Captures what any PyTorch loop would send: gradients as they stand, or how weights have moved."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradleak.captures import (
    Capture,
    CaptureHeader,
    Granted,
    ModelFacts,
    ProtocolFacts,
    write_capture,
)
from gradleak.core.errors import GradleakError
from gradleak.targets.in_memory import hash_weights, unwrap

Kind = Literal["gradients", "difference"]
FACTS = ("batch_size", "lengths", "labels")
PACKAGES = ("gradleak", "torch", "transformers")


@contextmanager
def capture(
    model: Any,
    path: str | Path,
    *,
    tokenizer: Any = None,
    kind: Kind = "gradients",
    know: Sequence[str] = (),
    defense: str | Sequence[str] = (),
    learning_rate: float | None = None,
    steps: int | None = None,
    optimiser: str = "sgd",
    scale: float = 1.0,
    round: int | None = None,
    client: str = "",
) -> Iterator[None]:
    """Writes what the block leaves of an update into a file, and changes nothing of the model.

    With `kind="gradients"` it is what `.grad` holds when the block ends: after one `backward()` or
    several, before or after clipping, as the block has it. With `kind="difference"` it is by how
    much the weights moved within the block, which `learning_rate`, `steps` and `optimiser` explain.
    `know` names what an attacker may be told of the batches that the model was called with inside
    the block: batch_size, lengths, labels; without it nothing of them is kept. `defense` says what
    the block did to the update, `scale` what the mean gradient was multiplied by (the number of
    batches, where their losses were added up). Where the block raises, nothing is written. The
    `tokenizer` is asked for by `gradleak.reconstruct`, and nothing of it is in the file.
    """
    inner = unwrap(model)
    _refuse_strange(inner, kind, know)
    state = _copy_state(inner) if kind == "difference" else {}
    facts = _describe_model(inner)
    notes = Notes(inner, know)
    with notes.watch():
        yield
    if kind == "gradients":
        tensors, when = _take_gradients(inner), "as .grad held it at the end of the block"
    else:
        tensors, when = _take_difference(inner, state), "weights after the block less before"
    name = "fedavg" if kind == "difference" else "fedsgd"
    header = CaptureHeader(
        kind=kind,
        model=facts,
        protocol=ProtocolFacts(name, learning_rate, steps, optimiser, scale),
        granted=notes.granted(),
        defenses=(defense,) if isinstance(defense, str) else tuple(defense),
        when=when,
        round=round,
        client=client,
        other_records={},
        versions=_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_capture(Path(path), Capture(header, tensors))


class Notes:
    """What the model was called with inside a block, of which only what is granted is kept."""

    def __init__(self, model: nn.Module, know: Sequence[str]) -> None:
        self.model, self.know = model, know
        self.lengths: list[int] = []
        self.labels: list[int] = []
        self.size = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Listens to calls of the model while the block runs, if anything is to be kept of them."""
        if not self.know:
            yield
            return
        handle = self.model.register_forward_pre_hook(self._note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, _: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        ids = named.get("input_ids", arguments[0] if arguments else None)
        mask = named.get("attention_mask")
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            return
        self.size += len(ids)
        whole = [ids.shape[1]] * len(ids)
        self.lengths += whole if mask is None else mask.sum(-1).long().tolist()
        labels = named.get("labels")
        if isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point():
            self.labels += labels.tolist()

    def granted(self) -> Granted:
        """Returns what the attacker may be told; refuses what the calls did not show."""
        if not self.know:
            return Granted()
        if not self.size:
            raise GradleakError(
                "know= asks for facts of the batch, and the model was not called inside the block:"
                " move the forward pass into it, or leave know= out."
            )
        if "labels" in self.know and len(self.labels) != self.size:
            raise GradleakError(
                "know= asks for labels, and the model was not given any as labels=: leave them out"
                " of know=, and pass them to gradleak.score() later."
            )
        return Granted(
            self.size if "batch_size" in self.know else None,
            tuple(self.lengths) if "lengths" in self.know else None,
            tuple(self.labels) if "labels" in self.know else None,
        )


def _refuse_strange(model: Any, kind: str, know: Sequence[str]) -> None:
    if not isinstance(model, nn.Module):
        raise GradleakError(f"capture() wants a torch module, not a {type(model).__name__}.")
    if kind not in ("gradients", "difference"):
        raise GradleakError(f"kind is gradients or difference, not {kind!r}.")
    if strange := [fact for fact in know if fact not in FACTS]:
        raise GradleakError(f"know names {', '.join(FACTS)}, not {strange[0]!r}.")


def _take_gradients(model: nn.Module) -> dict[str, Tensor]:
    if any(getattr(one, "grad_sample", None) is not None for one in model.parameters()):
        raise GradleakError(
            "These parameters have a gradient for each example (Opacus), and .grad is not what"
            " leaves the client: capture at the optimiser's step, after clipping and noise."
        )
    found = {
        name: value.grad.detach().cpu().clone()
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    if not found:
        raise GradleakError(
            "No parameter has a gradient at the end of the block: call backward() inside it, and"
            " zero_grad() after it."
        )
    return found


def _copy_state(model: nn.Module) -> dict[str, Tensor]:
    trained = ((name, one) for name, one in model.named_parameters() if one.requires_grad)
    return {name: value.detach().cpu().clone() for name, value in trained}


def _take_difference(model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    after = dict(model.named_parameters())
    return {name: after[name].detach().cpu() - value for name, value in before.items()}


def _describe_model(model: Any) -> ModelFacts:
    config = model.config.to_dict() if hasattr(model, "config") else {}
    plain = {name: value for name, value in config.items() if _is_plain(value)}
    names = tuple(name for name, _ in model.named_parameters())
    return ModelFacts(type(model).__name__, plain, hash_weights(model), names)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
