"""Fine-tunes a target as LAMP does before it attacks it (Balunović et al. 2022, section 5; their
train.py).

A checkpoint an epoch is kept on disk, and at the end the model with the facts of its training.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradleak.core.batch import pad_rows
from gradleak.core.defense import Defense, Guarantee, want_each_example
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.core.protocol import Protocol
from gradleak.core.specs import to_string
from gradleak.core.streams import Streams
from gradleak.protocols.fedsgd import FedSGD
from gradleak.records.files import make_private_folder, write_whole, written_aside
from gradleak.records.plain import to_plain
from gradleak.targets.text_classifier import TextClassifier
from gradleak.training.client_steps import (
    choose_by_chance,
    deal_out,
    gradient_of_all,
    gradients_of_each,
    mean_update,
    refuse_unfit,
    refuse_unfit_federation,
    run_guarantees,
    step_with,
    take_round,
)
from gradleak.training.material import Counts, Lesson, Material, Scores, count_pairs, score_counts

EVALUATED_AT_ONCE = 64


@dataclass(frozen=True)
class FineTuning:
    """Schedule of a fine-tuning; the defaults are LAMP's."""

    epochs: int = 2
    batch_size: int = 32
    learning_rate: float = 5e-5  # falls linearly to zero over all steps
    # Standard deviation of what is added to every gradient entry before a step (LAMP, Table 5)
    gradient_noise: float = 0.0
    seed: int = 0  # of order, dropout, noise and held-out examples; the head is the target's own
    defenses: tuple[Defense, ...] = ()  # on every step's gradient, as if a client had sent it
    protocol: Protocol = field(
        default_factory=FedSGD
    )  # what clients do in a step; weight differences (FedAvg) are averaged, not optimised
    clients: int = 1  # among whom the examples of a step are dealt out

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise GradleakError(
                f"epochs and batch_size count from 1; they are {self.epochs} and {self.batch_size}."
            )
        if not 0 < self.learning_rate < float("inf"):
            raise GradleakError(
                f"The learning rate must be a number above 0, not {self.learning_rate}."
            )
        if not 0 <= self.gradient_noise < float("inf"):
            raise GradleakError(
                f"The gradient noise is a standard deviation, 0 or more, not {self.gradient_noise}."
            )
        refuse_unfit(self.defenses)
        refuse_unfit_federation(self.protocol, self.clients, self.defenses, self.gradient_noise)

    def steps_an_epoch(self, examples: int) -> int:
        """How many batches so many examples make."""
        return -(-examples // self.batch_size)

    @property
    def federated(self) -> bool:
        """Whether a step is a round of clients, not a step of one who has all."""
        return self.clients > 1 or not self.protocol.one_gradient

    @property
    def streams(self) -> Streams:
        return Streams.root("fine-tuning", self.seed)


@dataclass(frozen=True, eq=False)
class News:
    """How far it has come. `loss` is the epoch's mean so far, left on the device: reading it
    waits for the device."""

    epoch: int
    step: int
    steps: int
    loss: Tensor
    seconds_left: float


def fine_tune(
    settings: FineTuning,
    target: TextClassifier,
    material: Material,
    out: Path,
    watch: Callable[[News], None],
) -> Scores:
    """Trains the target's own weights in place and saves them in `out`; a checkpoint an epoch
    lets a second call go on."""
    train(settings, target, material, out, watch)
    scores = evaluate(target, material.evaluation)
    save_model(
        out, settings, target, material, scores, guarantees(settings, len(material.training))
    )
    return scores


def train(
    settings: FineTuning,
    target: TextClassifier,
    material: Material,
    out: Path,
    watch: Callable[[News], None],
) -> None:
    """Trains the target's own weights in place; all it leaves in `out` is the checkpoint of the
    last epoch."""
    refuse_foreign(out)
    # As transformers' AdamW, which LAMP uses; PyTorch's own defaults decay weights by 0.01
    optimiser = torch.optim.AdamW(
        list(target.parameters.values()), lr=settings.learning_rate, weight_decay=0.0, eps=1e-6
    )
    first = resume(out, settings, target, material, optimiser)
    an_epoch, began = settings.steps_an_epoch(len(material.training)), time.monotonic()

    def tell(epoch: int, done: int, loss: Tensor) -> None:
        """Tells who watches how many steps are done."""
        steps = an_epoch * settings.epochs
        seconds_a_step = (time.monotonic() - began) / (done - an_epoch * first)
        watch(News(epoch + 1, done, steps, loss, seconds_a_step * (steps - done)))

    with _trainable(target):
        for epoch in range(first, settings.epochs):
            _train_epoch(settings, target, material.training, optimiser, epoch, tell)
            save_checkpoint(out, settings, target, material, optimiser, epoch + 1)


def guarantees(settings: FineTuning, examples: int) -> tuple[Guarantee, ...]:
    """What training on so many examples proves of any one of them, by every accountant."""
    steps = settings.steps_an_epoch(examples) * settings.epochs
    return run_guarantees(settings.defenses, examples, settings.batch_size, steps)


@torch.no_grad()
def count(target: TextClassifier, evaluation: Sequence[Lesson]) -> Counts:
    """How often each class is taken for each, without dropout."""
    groups = [
        evaluation[start : start + EVALUATED_AT_ONCE]
        for start in range(0, len(evaluation), EVALUATED_AT_ONCE)
    ]
    predictions = torch.cat([_logits(target, group).argmax(-1) for group in groups])
    return count_pairs(
        torch.tensor([lesson.label for lesson in evaluation]), predictions.cpu(), target.classes
    )


def evaluate(target: TextClassifier, evaluation: Sequence[Lesson]) -> Scores:
    """The likeliest class of each sentence against its own, without dropout."""
    return score_counts(count(target, evaluation))


def _train_epoch(
    settings: FineTuning,
    target: TextClassifier,
    training: Sequence[Lesson],
    optimiser: torch.optim.Optimizer,
    epoch: int,
    tell: Callable[[int, int, Tensor], None],
) -> None:
    total, seen = torch.zeros((), device=target.device), 0
    an_epoch = settings.steps_an_epoch(len(training))
    drawn = _epoch_batches(settings, len(training), epoch)
    for step, places in enumerate(drawn, start=an_epoch * epoch):
        batch = [training[place] for place in places]
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * (1 - step / (an_epoch * settings.epochs))
        # One stream a step: a resumed run draws what an undisturbed one does
        loss = _descend(settings, target, batch, optimiser, settings.streams.child("step", step))
        total, seen = total + loss * len(batch), seen + len(batch)
        tell(epoch, step + 1, total / max(1, seen))
    if not bool(torch.isfinite(total)):
        raise RunFailed(
            f"The loss of epoch {epoch + 1} is not finite: lower --learning-rate or"
            " --gradient-noise."
        )


def _epoch_batches(settings: FineTuning, examples: int, epoch: int) -> list[list[int]]:
    """The examples of each step: in a random order, or each drawn by chance where that is what
    the accountants assume."""
    starts = range(0, examples, settings.batch_size)
    if want_each_example(settings.defenses):
        first = len(starts) * epoch
        steps = [settings.streams.child("step", first + place) for place in range(len(starts))]
        return [choose_by_chance(examples, settings.batch_size, stream) for stream in steps]
    order = torch.randperm(
        examples, generator=settings.streams.child("order", epoch).generator()
    ).tolist()
    return [order[start : start + settings.batch_size] for start in starts]


def _descend(
    settings: FineTuning,
    target: TextClassifier,
    batch: Sequence[Lesson],
    optimiser: torch.optim.Optimizer,
    streams: Streams,
) -> Tensor:
    """One step of the optimiser; returns the mean loss of the batch before it."""
    optimiser.zero_grad(set_to_none=True)
    if not batch:  # drawn by chance, none was: as good as never at ordinary sizes
        return torch.zeros((), device=target.device)
    with _dropout_from(streams.child("dropout"), target.device):
        if settings.federated:
            return _round(settings, target, batch, optimiser, streams)
        if want_each_example(settings.defenses):
            update, loss = gradients_of_each(
                target.parameters, (_loss(target, [lesson]) for lesson in batch)
            )
            # The mean of however many were drawn, as a share of how many were expected (Opacus
            # divides by these too)
            share = len(batch) / settings.batch_size
            step_with(target.parameters, update, settings.defenses, streams.child("client"), share)
        else:
            loss = _loss(target, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            if settings.defenses:
                step_with(
                    target.parameters,
                    gradient_of_all(target.parameters),
                    settings.defenses,
                    streams.child("client"),
                )
    if settings.gradient_noise > 0:
        _add_noise(target, settings.gradient_noise, streams.child("noise"))
    optimiser.step()
    return loss.detach()


def _round(
    settings: FineTuning,
    target: TextClassifier,
    batch: Sequence[Lesson],
    optimiser: torch.optim.Optimizer,
    streams: Streams,
) -> Tensor:
    """One round of clients; returns the mean loss of their examples before it."""
    whole = target.batch_of([lesson.ids for lesson in batch], [lesson.label for lesson in batch])
    with torch.no_grad():
        loss = target.losses(whole).mean()
    update = mean_update(
        target, deal_out(whole, settings.clients), settings.protocol, settings.defenses, streams
    )
    take_round(target, update, settings.protocol)
    if settings.protocol.one_gradient:
        optimiser.step()
    return loss


def _add_noise(target: TextClassifier, std: float, streams: Streams) -> None:
    # Drawn where the gradients are: numbers for 22 million entries from the CPU would take longer
    # than the step
    generator = torch.Generator(target.device).manual_seed(_seed(streams))
    for parameter in target.parameters.values():
        if parameter.grad is not None:  # a module the loss does not reach has none
            noise = torch.randn(
                parameter.shape, generator=generator, device=target.device, dtype=parameter.dtype
            )
            parameter.grad.add_(noise, alpha=std)


def _loss(target: TextClassifier, batch: Sequence[Lesson]) -> Tensor:
    labels = torch.tensor([lesson.label for lesson in batch], device=target.device)
    return F.cross_entropy(_logits(target, batch), labels)


def _logits(target: TextClassifier, batch: Sequence[Lesson]) -> Tensor:
    """Padded to the longest of the batch, padding masked, whatever the target's clients do."""
    ids = pad_rows([lesson.ids for lesson in batch], target.vocabulary.pad)
    lengths = torch.tensor([len(lesson.ids) for lesson in batch])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    logits: Tensor = target.module(
        input_ids=ids.to(target.device), attention_mask=mask.to(target.device)
    ).logits
    return logits


@contextmanager
def _trainable(target: TextClassifier) -> Iterator[None]:
    """Dropout and gradients are on inside; after it the target is as it was opened, but for its
    weights."""
    target.module.train()
    for parameter in target.parameters.values():
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        target.module.eval().requires_grad_(False)
        target.module.zero_grad(set_to_none=True)


@contextmanager
def _dropout_from(streams: Streams, device: torch.device) -> Iterator[None]:
    """Dropout takes no generator: it draws from the global one, which is lent to the stream and
    then put back."""
    places = (
        [torch.cuda.current_device() if device.index is None else device.index]
        if device.type == "cuda"
        else []
    )
    with torch.random.fork_rng(devices=places):
        for generator in (
            torch.default_generator,
            *(torch.cuda.default_generators[place] for place in places),
        ):
            generator.manual_seed(_seed(streams))
        yield


def _seed(streams: Streams) -> int:
    return int(torch.randint(2**62, (), generator=streams.generator()))


def facts_of(settings: FineTuning, material: Material) -> dict[str, Any]:
    """The settings and sizes of a training, as plain values."""
    sizes = {"examples": len(material.training), "eval_examples": len(material.evaluation)}
    defenses = (
        {"defenses": [to_string(defense) for defense in settings.defenses]}
        if settings.defenses
        else {}
    )
    federation = (
        {"protocol": to_string(settings.protocol), "clients": settings.clients}
        if settings.federated
        else {}
    )
    kept = {
        name: value
        for name, value in vars(settings).items()
        if name not in ("defenses", "protocol", "clients")
    }
    return {**kept, **material.described, **sizes, **defenses, **federation}


def refuse_foreign(out: Path) -> None:
    """Before anything is computed: a model that is there already is never written over."""
    if out.exists() and not out.is_dir():
        raise GradleakError(f"{out} is a file: choose a folder for --out.")
    if (out / "config.json").exists() and not (out / "checkpoint.pt").is_file():
        raise GradleakError(f"{out} already holds a model: choose another --out.")
    make_private_folder(out)  # a model remembers some of what it learnt from


def save_checkpoint(
    out: Path,
    settings: FineTuning,
    target: TextClassifier,
    material: Material,
    optimiser: torch.optim.Optimizer,
    epochs_done: int,
) -> None:
    """Writes all that is needed to go on after an epoch, whole or not at all."""
    state = {
        "facts": facts_of(settings, material),
        "content": material.content(),
        "model": target.module.state_dict(),
        "optimiser": optimiser.state_dict(),
        "epochs_done": epochs_done,
    }
    with written_aside(out / "checkpoint.pt") as aside:
        torch.save(state, aside)


def resume(
    out: Path,
    settings: FineTuning,
    target: TextClassifier,
    material: Material,
    optimiser: torch.optim.Optimizer,
) -> int:
    """Loads the checkpoint, if there is one; returns the epochs done."""
    if not (out / "checkpoint.pt").is_file():
        return 0
    state = torch.load(out / "checkpoint.pt", map_location="cpu", weights_only=True)
    there, here = state["facts"], facts_of(settings, material)
    differs = [
        f"{name} was {there.get(name)!r} and is {value!r}"
        for name, value in here.items()
        if there.get(name) != value
    ]
    if not differs and state["content"] != material.content():
        differs = ["the examples have changed"]
    if differs:
        raise GradleakError(
            f"{out} holds a checkpoint of other settings ({'; '.join(differs)}): choose another"
            " --out, or remove it."
        )
    target.module.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["epochs_done"])


def save_model(
    out: Path,
    settings: FineTuning,
    target: TextClassifier,
    material: Material,
    scores: Scores,
    proven_of_run: Sequence[Guarantee],
) -> None:
    """The model in Hugging Face format, and how it was trained beside it."""
    model: Any = target.module
    model.save_pretrained(out)
    target.tokenizer.save_pretrained(out)
    proven = {"guarantees": [to_plain(one) for one in proven_of_run]} if settings.defenses else {}
    facts = {**facts_of(settings, material), "scores": asdict(scores), **proven}
    write_whole(out / "training.json", json.dumps(facts, indent=1) + "\n")
