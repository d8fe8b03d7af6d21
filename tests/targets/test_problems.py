"""What heads learn: losses are those of transformers, labels are read as they are written."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gradleak.core.batch import Batch, Example, Label
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.protocols.fedsgd import FedSGD
from gradleak.targets.tiny import Tiny, TinyCausal, tiny_tokenizer
from gradleak.targets.token_classifier import NO_CLASS, TokenClassifier

CPU = torch.device("cpu")
SHORT, LONG = "the cat is red .", "my phone number is five five zero one ."
SINGLE = 1e-5  # of losses that transformers takes in single precision, whatever the model's
SETTINGS: list[tuple[str, int, Sequence[Label]]] = [
    ("single_label_classification", 2, (1, 0)),
    ("multi_label_classification", 3, ((0, 1, 1), 2)),
    ("regression", 1, (0.25, -2.0)),
    ("regression", 2, ((0.25, 1.0), (-2.0, 0.5))),
    ("token_classification", 3, ((0, 1, 2, 0, 0), (1, 1, 1, 2, 0, 0, 0, 0, 1))),
]


def open_tiny(problem: Any, classes: int) -> Target:
    return Tiny(problem_type=problem, classes=classes).open(CPU, torch.float64)


def private(target: Target, labels: Sequence[Label] = (None, None)) -> Batch:  # type: ignore[assignment]
    pairs = zip((SHORT, LONG), labels, strict=True)
    return target.private_batch([Example(text, label) for text, label in pairs]).batch


def hold_to_transformers(
    target: Target, batch: Batch, rounding: float = 1e-9, **inputs: torch.Tensor
) -> None:
    """Our update of a batch is the gradient of the loss that the model itself returns."""
    copies = {name: one.detach().requires_grad_() for name, one in target.parameters.items()}
    loss = torch.func.functional_call(target.module, copies, (), inputs, tie_weights=True).loss
    theirs = torch.autograd.grad(loss, list(copies.values()), materialize_grads=True)
    ours = FedSGD().update(target, batch[None]).tensors
    for name, gradient in zip(copies, theirs, strict=True):
        torch.testing.assert_close(ours[name][0], gradient, msg=name, rtol=1e-6, atol=rounding)


@pytest.mark.parametrize(("problem", "classes", "labels"), SETTINGS)
def test_the_loss_is_that_of_transformers(
    problem: str, classes: int, labels: Sequence[Label]
) -> None:
    target = open_tiny(problem, classes)
    batch = private(target, labels)
    given = batch.labels.double() if batch.labels.is_floating_point() else batch.labels
    assert batch.ids is not None
    hold_to_transformers(
        target,
        batch,
        input_ids=batch.ids,
        attention_mask=batch.mask.long(),
        labels=given[:, 0] if problem == "regression" and classes == 1 else given,
    )


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_mean_over_tokens_is_that_of_transformers_padded_and_packed(
    shape: Any, packed: bool
) -> None:
    target = TinyCausal(shape=shape, loss_over="tokens").open(CPU, torch.float64)
    batch = private(target)
    assert batch.ids is not None
    if not packed:
        labels = batch.ids.masked_fill(~batch.mask, NO_CLASS)
        mask = batch.mask.long()
        given = {"input_ids": batch.ids, "attention_mask": mask, "labels": labels}
        hold_to_transformers(target, batch, SINGLE, **given)
        return
    # As TRL packs: one row, whose positions begin anew, and no text predicts the first of the next
    ids = batch.ids[batch.mask][None]
    places = torch.cat([torch.arange(length) for length in batch.mask.sum(1).tolist()])[None]
    labels = ids.masked_fill(places == 0, NO_CLASS)
    given = {"input_ids": ids, "position_ids": places, "labels": labels}
    hold_to_transformers(target, batch, SINGLE, **given)


def test_texts_of_one_length_count_alike_whatever_the_mean_is_over() -> None:
    spec = TinyCausal()
    for one in (spec, TinyCausal(loss_over="tokens")):
        target = one.open(CPU)
        batch = private(target)[:1]
        torch.testing.assert_close(
            target.losses(batch), spec.open(CPU).losses(batch), rtol=1e-6, atol=0
        )


def test_the_first_token_of_each_word_has_its_class() -> None:
    target = open_tiny("token_classification", 3)
    words = Example("mike sold the red car", (1, 0, 0, 2, 0))
    (row,) = target.private_batch([words]).batch.labels.tolist()
    (ids,) = target.encode([words.text])
    pieces = len(target.encode(["mike"])[0]) - 2
    assert row == [NO_CLASS, 1, *[NO_CLASS] * (pieces - 1), 0, 0, 2, 0, NO_CLASS]
    assert len(row) == len(ids)


def test_words_of_marked_secrets_are_a_class_of_their_own() -> None:
    target = open_tiny("token_classification", 2)
    marked = Example("my pin is four two .", 1, ((10, 18),))
    (row,) = target.private_batch([marked]).batch.labels.tolist()
    assert [one for one in row if one != NO_CLASS] == [0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("problem", "classes", "label", "message"),
    [
        ("token_classification", 2, (0, 1), "it has 5 words, cut at spaces, and 2 labels"),
        ("token_classification", 2, (0, 1, 0, 0, 7), "label 7 is outside the 2 classes"),
        ("multi_label_classification", 3, (0, 5), "label 5 is outside the 3 classes"),
        ("regression", 1, "much", "label 'much' is no number"),
        ("regression", 2, 0.5, "has 1 numbers, and this regression model learns 2"),
        ("single_label_classification", 2, (0, 1), "there are 2 labels, and tiny learns one"),
        ("single_label_classification", 1, 0, "has one output and is to tell classes apart"),
        ("token_classification", 1, 0, "tells 1 class of token: it needs two"),
    ],
)
def test_what_is_no_label_is_refused(
    problem: str, classes: int, label: Label, message: str
) -> None:
    with pytest.raises(GradleakError, match=message):
        open_tiny(problem, classes).private_batch([Example(SHORT, label)])


def test_a_slow_tokenizer_cannot_say_where_words_are() -> None:
    target = open_tiny("token_classification", 2)
    assert isinstance(target, TokenClassifier)

    class Slow:
        is_fast = False

        def __getattr__(self, name: str) -> Any:
            return getattr(tiny_tokenizer(), name)

        def __call__(self, *given: Any, **named: Any) -> Any:
            return tiny_tokenizer()(*given, **named)

    target.tokenizer = Slow()
    with pytest.raises(GradleakError, match="needs a fast one"):
        target.private_batch([Example(SHORT, 0)])
