"""Fine-tunes a target as LAMP does before it attacks it (Balunović et al. 2022, section 5; their
train.py)."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gradleak.core.batch import Example
from gradleak.core.defense import Defense, Guarantee
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.core.protocol import Protocol
from gradleak.core.streams import Streams
from gradleak.protocols.fedsgd import FedSGD
from gradleak.targets.text_classifier import TextClassifier
from gradleak.training.defended import (
    chosen_by_chance,
    gradient_of_all,
    gradients_of_each,
    per_example,
    refuse_unfit,
    run_guarantees,
    step_with,
)
from gradleak.training.federated import dealt, mean_update, refuse_unfit_federation, take_round
from gradleak.training.kept import refuse_foreign, resume, save_checkpoint, save_model
from gradleak.training.scores import Counts, Scores, count_pairs, score_counts

CHECKED_AT_ONCE = 64  # sentences
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

    @property
    def federated(self) -> bool:
        """Whether a step is a round of clients, not a step of one who has all."""
        return self.clients > 1 or not self.protocol.one_gradient

    @property
    def streams(self) -> Streams:
        return Streams.root("fine-tuning", self.seed)


@dataclass(frozen=True)
class Lesson:
    """A sentence in tokens, with its class."""

    ids: tuple[int, ...]
    label: int
    dropped: int = field(default=0, repr=False, compare=False)  # tokens that were cut off


@dataclass(frozen=True)
class Material:
    """What is learnt, what it is judged on, and what both are called: `described` is kept with
    the model."""

    training: tuple[Lesson, ...]
    evaluation: tuple[Lesson, ...]
    described: Mapping[str, str]

    def content(self) -> str:
        """A hash of all tokens and classes, so that a checkpoint of other data is not gone on
        from."""
        return hashlib.sha256(repr((self.training, self.evaluation)).encode()).hexdigest()


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
    progress = _Progress(settings, len(material.training), first, watch)
    with _trainable(target):
        for epoch in range(first, settings.epochs):
            _train_epoch(settings, target, material.training, optimiser, epoch, progress)
            save_checkpoint(out, settings, target, material, optimiser, epoch + 1)


def guarantees(settings: FineTuning, examples: int) -> tuple[Guarantee, ...]:
    """What training on so many examples proves of any one of them, by every accountant."""
    steps = -(-examples // settings.batch_size) * settings.epochs
    return run_guarantees(settings.defenses, examples, settings.batch_size, steps)


def lessons(target: TextClassifier, examples: Sequence[Example], called: str) -> tuple[Lesson, ...]:
    """Tokenises and truncates; what the target refuses in an audit (empty, no or unknown label)
    it refuses here."""
    made: list[Lesson] = []
    # Sentences of different lengths may not share a private batch
    size = CHECKED_AT_ONCE if target.padding_is_free else 1
    for start in range(0, len(examples), size):
        group = examples[start : start + size]
        try:
            private = target.private_batch(group)
        except GradleakError as error:
            raise GradleakError(
                f"Batch of examples {start + 1} to {start + len(group)} of the {called} data:"
                f" {error}"
            ) from error
        assert private.batch.ids is not None
        rows = zip(
            private.batch.ids.tolist(), private.lengths, private.batch.labels.tolist(), strict=True
        )
        cut = private.dropped or (0,) * len(group)
        made += [
            Lesson(tuple(row[:length]), label, lost)
            for (row, length, label), lost in zip(rows, cut, strict=True)
        ]
    if not made:
        raise GradleakError(f"There are no examples in the {called} data.")
    return tuple(made)


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


class _Progress:
    """Counts steps and tells who watches."""

    def __init__(
        self, settings: FineTuning, examples: int, epochs_done: int, watch: Callable[[News], None]
    ) -> None:
        an_epoch = -(-examples // settings.batch_size)
        self.step = self._began_at = an_epoch * epochs_done
        self.steps = an_epoch * settings.epochs
        self._began = time.monotonic()
        self._watch = watch

    def advance(self, epoch: int, loss: Tensor) -> None:
        self.step += 1
        seconds_a_step = (time.monotonic() - self._began) / (self.step - self._began_at)
        self._watch(
            News(epoch + 1, self.step, self.steps, loss, seconds_a_step * (self.steps - self.step))
        )


def _train_epoch(
    settings: FineTuning,
    target: TextClassifier,
    training: Sequence[Lesson],
    optimiser: torch.optim.Optimizer,
    epoch: int,
    progress: _Progress,
) -> None:
    total, seen = torch.zeros((), device=target.device), 0
    for places in _epoch_batches(settings, len(training), epoch, progress.step):
        batch = [training[place] for place in places]
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * (1 - progress.step / progress.steps)
        # One stream a step: a resumed run draws what an undisturbed one does
        loss = _descend(
            settings, target, batch, optimiser, settings.streams.child("step", progress.step)
        )
        total, seen = total + loss * len(batch), seen + len(batch)
        progress.advance(epoch, total / max(1, seen))
    if not bool(torch.isfinite(total)):
        raise RunFailed(
            f"The loss of epoch {epoch + 1} is not finite: lower --learning-rate or"
            " --gradient-noise."
        )


def _epoch_batches(
    settings: FineTuning, examples: int, epoch: int, first_step: int
) -> list[list[int]]:
    """The examples of each step: in a random order, or each drawn by chance where that is what
    the accountants assume."""
    starts = range(0, examples, settings.batch_size)
    if per_example(settings.defenses):
        steps = [settings.streams.child("step", first_step + place) for place in range(len(starts))]
        return [chosen_by_chance(examples, settings.batch_size, stream) for stream in steps]
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
        if per_example(settings.defenses):
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
        target, dealt(whole, settings.clients), settings.protocol, settings.defenses, streams
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
    lengths = torch.tensor([len(lesson.ids) for lesson in batch])
    width = int(lengths.max())
    ids = torch.tensor(
        [[*lesson.ids, *[target.vocabulary.pad] * (width - len(lesson.ids))] for lesson in batch]
    )
    mask = (torch.arange(width) < lengths[:, None]).long()
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
