"""The labels of a guess, where nobody can try them one by one: solved from what was seen.

Several labels at once, numbers and classes of tokens are too many to be tried, and need not be. The
gradient of the head's last layer, y = W h + b, is Σ_r δ_r (h_r, 1)ᵀ over its rows r, which are the
sentences of a guess or their tokens. A guess says what h_r are, so that the slopes δ_r follow, and
from them the labels: δ is the model's answer minus the label, times a known number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.core.attack import Sentences
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.matching.linear_algebra import decompose
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.token_classifier import NO_CLASS, TokenClassifier

INDEPENDENT = 1e-6  # of the largest: rows of the head's inputs below it tell nothing apart
ALIKE = 0.05  # of one: how far what was solved for may be from a label


@dataclass(frozen=True, eq=False)
class Answers:
    """What a guess's sentences are learnt with, and how much each counts beside the others."""

    labels: Tensor | None = None  # rows of a batch's; none where they are tried, or are the text
    weights: Float[Tensor, "sentences"] | None = None  # one on average; none where all are one
    obstacle: str = ""  # why there are none


def find_answers(observation: Observation, sentences: Sentences) -> Answers:
    """Returns the answers of a guess, each sentence of which is there once."""
    target = observation.target
    labels = None
    if target.labels_are_open:
        size = observation.knows.batch_size
        if size != len(sentences):
            return Answers(
                obstacle="Labels of this kind show only where every sentence of the batch is known"
                " and differs from the others, and the batch size too."
            )
        if observation.channel.clip is not None:
            return Answers(obstacle="Labels of this kind do not show in an update of unknown size.")
        labels = solve_labels(observation, sentences)
        if labels is None:
            return Answers(
                obstacle="No labels with which the guess gives the head's gradient were found."
            )
    weights = target.weigh(target.batch_of(sentences, labels)) if _counts(target) else None
    if weights is None:
        return Answers(labels)
    if not bool((weights > 0).all()):
        return Answers(obstacle="A sentence of the guess has no label that counts.")
    return Answers(labels, (weights / weights.mean()).double())


def join_answers(target: Target, answers: Sequence[Answers], counts: Sequence[int]) -> Answers:
    """Returns the answers of several guesses as one batch has them."""
    labels, weights = [one.labels for one in answers], [one.weights for one in answers]
    joined = None
    if target.labels_are_open:
        rows = [row for one in labels if one is not None for row in one]
        widest = max(row.shape[0] for row in rows)
        joined = torch.stack([_widen(row, widest) for row in rows])
    if not _counts(target):
        return Answers(joined)
    ones = (torch.ones(count, dtype=torch.float64) for count in counts)
    each = [one if one is not None else other for one, other in zip(weights, ones, strict=True)]
    return Answers(joined, torch.cat([one.to(target.device) for one in each]))


@torch.no_grad()
def solve_labels(observation: Observation, sentences: Sentences) -> Tensor | None:
    """Returns the labels with which sentences, each there once, give the head's gradient; none
    where there are none, or the head's gradient was not seen."""
    target = observation.target
    head = _find_head(observation)
    if head is None or not isinstance(target, (TextClassifier, TokenClassifier)):
        return None
    name, module = head
    fed, logits = _feed_head(target, module, sentences)
    seen = [observation.update.tensors[f"{name}.weight"][0]]
    if module.bias is not None:
        bias = observation.update.tensors.get(f"{name}.bias")
        if bias is None:
            return None
        seen.append(bias[0][:, None])
        fed = torch.cat([fed, torch.ones_like(fed[:, :1])], dim=1)
    gradient = torch.cat(seen, dim=1).double() / observation.gradient_scale
    # G = Δᵀ H with H the rows that are fed: Δ = (Hᵀ)⁺ Gᵀ
    found = decompose(fed)
    if float(found.values[-1]) < INDEPENDENT * float(found.values[0]) or len(fed) > fed.shape[1]:
        return None
    slopes = (found.left / found.values) @ (found.right[: len(found.values)] @ gradient.mT)
    if isinstance(target, TextClassifier):
        labels = target.problem.solve(logits, slopes * len(sentences))
        return None if labels is None else labels.to(target.device)
    # Of a mean over texts each text's tokens have a number of their own that they are divided by.
    lengths = [len(one) for one in sentences]
    alike = lengths if target.loss_over == "texts" else [len(logits)]
    pieces = zip(torch.split(logits, alike), torch.split(slopes, alike), strict=True)
    solved = [_solve_tokens(*piece) for piece in pieces]
    if any(one is None for one in solved):
        return None
    rows = torch.split(torch.cat([one for one in solved if one is not None]), lengths)
    return torch.stack([_widen(row, max(lengths)) for row in rows])


def _solve_tokens(
    logits: Float[Tensor, "tokens classes"], slopes: Float[Tensor, "tokens classes"]
) -> Int[Tensor, "tokens"] | None:
    """Returns the class of each token, whose slopes are its probabilities less one at its class,
    all divided by one number."""
    expected = logits.softmax(-1)
    others = torch.ones_like(slopes).scatter(1, slopes.argmin(1, keepdim=True), 0.0)
    count = (expected * slopes * others).sum() / (slopes.square() * others).sum().clamp_min(1e-300)
    own = slopes * count.round()
    classes = (expected - own).argmax(1)
    apart = (expected - own - nn.functional.one_hot(classes, own.shape[1])).abs().amax(1)
    nothing = own.abs().amax(1)
    if float(torch.minimum(apart, nothing).max()) > ALIKE:
        return None
    return torch.where(nothing < apart, torch.full_like(classes, NO_CLASS), classes)


def _find_head(observation: Observation) -> tuple[str, nn.Linear] | None:
    """Finds the linear layer that makes the model's outputs, where its gradient was seen."""
    target, seen = observation.target, observation.update.tensors
    for name in reversed(target.groups["head"]):
        path, _, attribute = name.rpartition(".")
        module = target.in_double.module.get_submodule(path)
        if attribute == "weight" and isinstance(module, nn.Linear):
            return (path, module) if name in seen and len(module.weight) == target.classes else None
    return None


def _feed_head(
    target: Target, head: nn.Linear, sentences: Sentences
) -> tuple[Float[Tensor, "rows width"], Float[Tensor, "rows outputs"]]:
    """Returns what the head is fed, and what it makes of it, in double precision: a row for each
    sentence, or for each token."""
    fed = list[tuple[Tensor, Tensor]]()
    hook = head.register_forward_hook(
        lambda _, given, made: fed.append((given[0].detach(), made.detach()))
    )
    try:
        target.in_double.losses(target.batch_of(sentences, None))
    finally:
        hook.remove()
    ((inputs, outputs),) = fed
    if inputs.ndim == 2:
        return inputs, outputs
    rows = [slice(0, len(sentence)) for sentence in sentences]
    return tuple(  # type: ignore[return-value]
        torch.cat([one[place, row] for place, row in enumerate(rows)]) for one in (inputs, outputs)
    )


def _counts(target: Target) -> bool:
    """Whether sentences of a batch count differently."""
    return type(target).weigh is not Target.weigh


def _widen(row: Tensor, width: int) -> Tensor:
    """Returns classes of tokens with none behind them; labels of a text as they are."""
    if row.dtype != torch.int64 or row.ndim != 1:
        return row
    return nn.functional.pad(row, (0, max(0, width - len(row))), value=NO_CLASS)
