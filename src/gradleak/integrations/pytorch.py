"""Captures what any PyTorch loop would send: gradients as they stand, or how weights have moved."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
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
    subtract_states,
    write_capture,
)
from gradleak.core.errors import GradleakError
from gradleak.targets.in_memory import hash_vocabulary, hash_weights, unwrap
from gradleak.targets.loading import is_language_model

Kind = Literal["gradients", "difference"]
FACTS = ("batch_size", "lengths", "labels")
LARGEST_SCALE = 1000.0  # above it the loss was multiplied by a gradient scaler, of fp16


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
    scale: float | None = None,
    round: int | None = None,
    client: str = "",
) -> Iterator[None]:
    """Writes what the block leaves of an update into a file, and changes nothing of the model.

    With `kind="gradients"` it is what `.grad` holds when the block ends: after one `backward()` or
    several, before or after clipping, as the block has it. With `kind="difference"` it is by how
    much the weights moved within the block, which `learning_rate`, `steps` and `optimiser` explain.
    `know` names what an attacker may be told of the batches that the model was called with inside
    the block: batch_size, lengths, labels; without it nothing of them is kept. `defense` says what
    the block did to the update. `scale` is what the mean gradient was multiplied by: the number of
    batches, where their losses were added up. Without it, it is read off the loss that the model
    itself returns, where that was used. Where the block raises, nothing is written. Of the
    `tokenizer` the file holds a hash, by which `gradleak.reconstruct` refuses another one.
    """
    refuse_strange(model, know)
    if kind not in ("gradients", "difference"):
        raise GradleakError(f"kind is gradients or difference, not {kind!r}.")
    inner = unwrap(model)
    state = _copy_state(inner) if kind == "difference" else {}
    facts = describe_model(inner, tokenizer)
    notes = Notes(model, know)
    with notes.watch():
        yield
    if kind == "gradients":
        tensors, when = take_gradients(inner), "as .grad held it at the end of the block"
        sent = "fedsgd", learning_rate, steps, optimiser, notes.scale(scale)
    else:
        tensors, when = _take_difference(inner, state), "weights after the block less before"
        sent = "fedavg", learning_rate, steps, optimiser, scale or 1.0
    protocol = ProtocolFacts(*sent, notes.loss_over(steps))
    stated = (defense,) if isinstance(defense, str) else tuple(defense)
    header = CaptureHeader(
        kind, facts, protocol, notes.list_granted(), stated, when, round=round, client=client
    )
    write_capture(Path(path), Capture(header, tensors))


class Notes:
    """What the model was called with, of which only what is granted is kept."""

    def __init__(self, model: nn.Module, know: Sequence[str]) -> None:
        self.model, self.know = model, tuple(know)
        self.clear()

    def clear(self) -> None:
        """Forgets what was noted: the next update begins."""
        self.size = 0
        self.lengths: list[int] = []
        self.labels: list[int] = []
        self.labels_are_open = False
        self.calls = 0  # of the model, that are learnt from
        self.slopes: list[float] = []  # of what was differentiated, by each loss of the model
        self.shares_tokens = False  # each loss was divided by the tokens of all batches

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Listens to calls of the model while the block runs."""
        # Of the model as it is called: hooks put inside a compiled one would not run.
        before = self.model.register_forward_pre_hook(self._note_batch, with_kwargs=True)
        after = self.model.register_forward_hook(self._note_loss, with_kwargs=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _note_batch(
        self, _: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        ids = named.get("input_ids", arguments[0] if arguments else None)
        if not torch.is_grad_enabled():  # nothing of an evaluation is sent
            return
        self.calls += 1
        if not self.know or not isinstance(ids, Tensor) or ids.ndim != 2:
            return
        lengths = list_lengths(ids, named.get("attention_mask"), named.get("position_ids"))
        self.size += len(lengths)
        self.lengths += lengths
        labels = named.get("labels")
        if isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point():
            self.labels += labels.tolist()
        elif isinstance(labels, Tensor):
            self.labels_are_open = True

    def _note_loss(
        self, _: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], output: Any
    ) -> None:
        loss, labels = getattr(output, "loss", None), named.get("labels")
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            return
        # Hugging Face's language models divide by this number, its classifiers ignore it
        if isinstance(labels, Tensor) and is_language_model((type(unwrap(self.model)).__name__,)):
            self.shares_tokens = named.get("num_items_in_batch") is not None
        note: Any = loss.register_hook  # untyped in torch
        note(lambda slope: self.slopes.append(float(slope)))

    def scale(self, stated: float | None = None) -> float:
        """Returns what the mean gradient was multiplied by, as stated or as the losses show."""
        if stated is not None:
            return stated
        if not self.slopes:
            return 1.0
        found = sum(self.slopes) / (len(self.slopes) if self.shares_tokens else 1)
        if not 0 < found < LARGEST_SCALE:
            raise GradleakError(
                f"The loss was multiplied by {found:g} before backward(), as gradient scalers for"
                " fp16 do: unscale the gradients first and say scale=1."
            )
        return found

    def loss_over(self, steps: int | None = None) -> str:
        """Returns what the loss is a mean over, where tokens have labels.

        Of one batch a step it is its tokens; of several that are added up, and not divided by the
        tokens of all, it is taken to be texts, as if each were one.
        """
        return "texts" if self.calls > (steps or 1) and not self.shares_tokens else "tokens"

    def list_granted(self) -> Granted:
        """Returns what the attacker may be told; refuses what the calls did not show."""
        if not self.know:
            return Granted()
        if not self.size:
            raise GradleakError(
                "know= asks for facts of the batch, and the model was not called inside the block:"
                " move the forward pass into it, or leave know= out."
            )
        if "labels" in self.know and self.labels_are_open:
            raise GradleakError(
                "know= asks for labels, and those of this model are several at once, numbers or one"
                " a token, which attackers are never told: leave labels out of know=."
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


def list_lengths(ids: Tensor, mask: Any, positions: Any) -> list[int]:
    """Returns the tokens of each text of a batch; of texts that are packed into rows, whose
    positions begin anew with each, of each text."""
    if isinstance(mask, Tensor):
        return [int(count) for count in mask.sum(-1).tolist()]
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        return [ids.shape[1]] * len(ids)
    lengths = list[int]()
    for row in positions.expand(len(ids), -1).tolist():
        starts = [place for place, position in enumerate(row) if not place or position == 0]
        lengths += [end - start for start, end in pairwise([*starts, len(row)])]
    return lengths


def refuse_strange(model: Any, know: Sequence[str]) -> None:
    """Refuses what is no model, and facts of a batch that nobody notes."""
    if not isinstance(model, nn.Module):
        raise GradleakError(f"capture() wants a torch module, not a {type(model).__name__}.")
    refuse_unknown_facts(know)


def refuse_unknown_facts(know: Sequence[str]) -> None:
    """Refuses facts of a batch that nobody notes."""
    if strange := [fact for fact in know if fact not in FACTS]:
        raise GradleakError(f"know names {', '.join(FACTS)}, not {strange[0]!r}.")


def take_gradients(model: nn.Module, private: bool = False) -> dict[str, Tensor]:
    """Returns copies of `.grad`, by name; `private` says that clipping and noise are in it."""
    every = list(model.parameters())
    if not private and any(getattr(one, "grad_sample", None) is not None for one in every):
        raise GradleakError(
            "These parameters have a gradient for each example (Opacus), and .grad is not what"
            " leaves the client: use gradleak.integrations.opacus.capture_private_steps, which"
            " captures after clipping and noise."
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


def describe_model(model: Any, tokenizer: Any = None) -> ModelFacts:
    """Returns what a capture says of its model, at the weights that it has now."""
    words = "" if tokenizer is None else hash_vocabulary(tokenizer)
    config = getattr(model, "config", None)
    plain = {} if config is None else config.to_dict()
    plain = {name: value for name, value in plain.items() if _is_plain(value)}
    names = tuple(name for name, _ in model.named_parameters())
    return ModelFacts(type(model).__name__, plain, hash_weights(model), names, words)


def _copy_state(model: nn.Module) -> dict[str, Tensor]:
    trained = ((name, one) for name, one in model.named_parameters() if one.requires_grad)
    return {name: value.detach().cpu().clone() for name, value in trained}


def _take_difference(model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    after = dict(model.named_parameters())
    return subtract_states(before, {name: after[name].detach() for name in before})


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))
