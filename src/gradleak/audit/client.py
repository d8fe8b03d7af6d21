"""The client's side of an audit: private batches, and what the server gets to see of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack
from gradleak.core.batch import Example, Label, PrivateBatch
from gradleak.core.defense import protect_in_turn
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Knowledge, Observation, Round, check_update
from gradleak.core.parts import Part
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.datasets.selection import read_numbers

PROBLEMS = 10  # that are listed where more are wrong


@dataclass(frozen=True, eq=False)
class AuditInput:
    """What goes into one audit of a group: its settings and its secrets, once for each draw."""

    spec: AuditSpec
    private: Sequence[PrivateBatch]
    remarks: tuple[str, ...] = ()  # how its data was read
    # Why it cannot be attacked, where that is known beforehand
    refusal: GradleakError | None = None

    def visible(self, target: Target) -> tuple[Part, ...]:
        """Returns the parts of the model that its view shows."""
        return tuple(target.part(name) for name in self.spec.view.visible(target))


def private_examples(spec: AuditSpec) -> list[Example]:
    """The secrets, in whole batches."""
    examples = spec.data.load(spec.limit * spec.batch_size)
    if len(examples) < spec.batch_size:
        raise GradleakError(
            f"The data holds {len(examples)} examples, fewer than one batch of {spec.batch_size}."
        )
    return examples[: len(examples) // spec.batch_size * spec.batch_size]


def private_batches(
    spec: AuditSpec, target: Target, examples: Sequence[Example] | None = None
) -> list[PrivateBatch]:
    """The secrets, tokenised; everything unfit is refused here, all at once, before any attack
    runs."""
    chosen = private_examples(spec) if examples is None else examples
    batches = [
        chosen[start : start + spec.batch_size] for start in range(0, len(chosen), spec.batch_size)
    ]
    _refuse_labels(target, chosen)
    private, problems = [], []
    for index, batch in enumerate(batches):
        try:
            private.append(target.private_batch(batch))
            if not spec.truncate:
                _refuse_truncated(private[-1])
        except GradleakError as error:
            problems.append(f"Batch {index}: {error}")
    if len(problems) == 1:
        raise GradleakError(problems[0])
    if problems:
        more = [f"and {len(problems) - PROBLEMS} more"] if len(problems) > PROBLEMS else []
        listed = "\n".join(f"  {problem}" for problem in [*problems[:PROBLEMS], *more])
        raise GradleakError(
            f"{len(problems)} of {len(batches)} batches cannot be attacked.\n{listed}"
        )
    return private


def _refuse_labels(target: Target, examples: Sequence[Example]) -> None:
    """Says of all labels at once which the model does not know."""
    if target.labels_are_tokens or target.labels_are_open or target.medium != "text":
        return
    counts = Counter(example.label for example in examples if example.label is not None)
    unknown: dict[Label, GradleakError] = {}
    for label in counts:
        try:
            target.class_of(label)
        except GradleakError as error:
            unknown[label] = error
    if not unknown:
        return
    first = next(example for example in examples if example.label in unknown)
    assert first.label is not None
    shown = [f"{str(label)[:40]!r} ({counts[label]})" for label in unknown]
    more = f" and {len(shown) - PROBLEMS} more" if len(shown) > PROBLEMS else ""
    others = (
        " All that it does not know, and how often they are there:"
        f" {', '.join(shown[:PROBLEMS])}{more}."
    )
    where = f"{first.where}: " if first.where else ""
    raise GradleakError(f"{where}{unknown[first.label]}{others if len(shown) > 1 else ''}")


def _refuse_truncated(private: PrivateBatch) -> None:
    for place, dropped in enumerate(private.dropped):
        if dropped:
            where, read = (
                private.examples[place].where or f"Text {place + 1} of the batch",
                private.lengths[place],
            )
            raise GradleakError(
                f"{where} has {read + dropped} tokens and the model reads {read}: shorten it, or"
                " have it cut as the model's tokenizer does (truncate: on)."
            )


def remarks_on(spec: AuditSpec, private: Sequence[PrivateBatch]) -> tuple[str, ...]:
    """How the data was read, where that is not plain: what was guessed of a file, rows left out,
    texts truncated."""
    texts = [
        (read, cut)
        for batch in private
        for read, cut in zip(batch.lengths, batch.dropped, strict=False)
        if cut
    ]
    if not texts:
        return spec.data.remarks()
    of = sum(len(batch.examples) for batch in private)
    return (
        *spec.data.remarks(),
        (
            f"Truncated, as the model's tokenizer does: {len(texts)} of {of} texts, which have more"
            f" than the {max(read for read, _ in texts)} tokens that it reads;"
            f" {sum(cut for _, cut in texts)} tokens were cut off (--truncate off refuses such"
            " texts)."
        ),
    )


def observe(spec: AuditSpec, target: Target, private: PrivateBatch, index: int) -> Observation:
    """Runs the client on one secret and keeps what the server sees of what leaves it."""
    sent = protect(spec, compute(spec, target, private, index), index)
    return look(spec, target, private, sent, index)


def compute(spec: AuditSpec, target: Target, private: PrivateBatch, index: int) -> Update:
    """What the client computes, before any defense."""
    return spec.protocol.update(
        target,
        private.batch[None],
        per_example=bool(spec.defenses) and spec.defenses[0].wants_per_example,
        rngs=[stream_of(spec, index)],
    )


def protect(spec: AuditSpec, computed: Update, index: int) -> Update:
    """The same after the defenses."""
    return protect_in_turn(spec.defenses, computed, [stream_of(spec, index)])


def look(
    spec: AuditSpec, target: Target, private: PrivateBatch, sent: Update, index: int
) -> Observation:
    """What the server has of it: detached clones of the visible tensors, and the granted facts."""
    seen = spec.view.show(target, sent).detached_clone()
    check_update(target, seen, f"The update of batch {index}")
    untold = target.labels_are_tokens or target.labels_are_open
    knows = Knowledge(
        labels=None if untold else private.batch.labels.detach().clone(),
        lengths=private.lengths,
        batch_size=len(private.examples),
        defenses=spec.defenses,
    )
    return Observation(index, (Round(target, seen),), knows.limit_to(spec.granted), spec.protocol)


def hand_over(spec: AuditSpec, attack: Attack, observation: Observation) -> Observation:
    """What an attack gets of an observation: the facts it requires or uses, and the defense."""
    return observation.limit_to(spec.facts_for(attack) | {Fact.DEFENSE})


def update_norm(observation: Observation) -> float:
    """The norm of all that is seen."""
    return float(torch.stack(list(observation.update.norms().values())).norm())


def stream_of(spec: AuditSpec, index: int) -> Streams:
    """The client's randomness for one batch."""
    return Streams.root("client", spec.seed).child("batch", *batch_name(spec, index))


def batch_name(spec: AuditSpec, index: int) -> tuple[str | int, ...]:
    """What a batch's random streams are called, the client's and the attacker's: its number in the
    whole selection.

    So a stretch of rows draws what a run of all rows would draw for them, and two stretches share
    no noise. Attacks are given streams and never these numbers.
    """
    draw, batch = divmod(index, spec.limit)
    name = _place(spec, batch) if spec.data.rows else (batch,)
    return name if draw == 0 else (*name, "draw", draw)


def _place(spec: AuditSpec, batch: int) -> tuple[str | int, ...]:
    """The number that a batch of chosen rows has among all; where it is none of those, its rows."""
    size = spec.batch_size
    rows = _numbers(spec.data.rows)[batch * size : (batch + 1) * size]
    number = rows[0] // size
    return (
        (number,) if rows == tuple(range(number * size, (number + 1) * size)) else ("rows", *rows)
    )


@cache
def _numbers(rows: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(read_numbers(rows))
