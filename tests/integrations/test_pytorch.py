"""What `capture` writes: gradients as the block leaves them, what is told, and its scale."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gradleak
from gradleak.captures import CaptureError, read_capture
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target

TEXTS = ["the cat is red .", "call me on monday !"]
FACTS = ("batch_size", "lengths", "labels")


@pytest.fixture
def model(tiny: Target) -> Any:
    return copy.deepcopy(tiny.module).requires_grad_(True)


def run(model: Any, tiny: Target, texts: list[str], share: float = 1.0) -> None:
    read = tiny.tokenizer(texts, padding=True, return_tensors="pt")
    (model(**read, labels=torch.zeros(len(texts), dtype=torch.int64)).loss * share).backward()


@pytest.mark.parametrize(("share", "scale"), [(1.0, 2.0), (0.5, 1.0)])
def test_the_scale_of_accumulated_batches_is_read_off_their_losses(
    share: float, scale: float, tiny: Target, model: Any, tmp_path: Path
) -> None:
    update = tmp_path / "update.safetensors"
    with gradleak.capture(model, update, know=FACTS):
        for text in TEXTS:
            run(model, tiny, [text], share)
    found = read_capture(update)
    assert found.header.protocol.scale == pytest.approx(scale)
    assert found.header.granted.batch_size == 2
    assert found.header.granted.lengths == (7, 7)
    assert found.header.granted.labels == (0, 0)
    # Whatever it was, the observation has the gradient of the mean
    seen = gradleak.observe(model, tiny.tokenizer, found.tensors, scale=found.header.protocol.scale)
    model.zero_grad()
    run(model, tiny, TEXTS)
    torch.testing.assert_close(
        seen.update.tensors["classifier.weight"][0], model.classifier.weight.grad
    )


def test_a_capture_holds_what_clipping_left_and_nothing_that_was_not_granted(
    tiny: Target, model: Any, tmp_path: Path
) -> None:
    update = tmp_path / "update.safetensors"
    with gradleak.capture(model, update, defense="clipping:clip=0.01", client="7", round=3):
        run(model, tiny, TEXTS)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    found = read_capture(update)
    norm = torch.stack([one.norm() for one in found.tensors.values()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)
    told = found.header.granted
    assert (told.batch_size, told.lengths, told.labels) == (None, None, None)
    assert found.header.defenses == ("clipping:clip=0.01",)
    assert (found.header.client, found.header.round) == ("7", 3)


def test_another_tokenizer_than_that_of_the_capture_is_refused(
    tiny: Target, model: Any, tmp_path: Path
) -> None:
    update, given = tmp_path / "update.safetensors", copy.deepcopy(model)
    with gradleak.capture(model, update, tokenizer=tiny.tokenizer):
        run(model, tiny, TEXTS)
    assert len(read_capture(update).header.model.tokenizer_hash) == 64
    other = SimpleNamespace(get_vocab=lambda: {"a": 0})
    with pytest.raises(GradleakError, match="texts of another tokenizer, whose words"):
        gradleak.reconstruct(update, model=given, tokenizer=other)
    with (
        pytest.raises(GradleakError, match="wants a tokenizer of transformers, not a str"),
        gradleak.capture(model, update, tokenizer="bert"),
    ):
        pass


def test_a_difference_is_what_training_added_to_the_weights(
    tiny: Target, model: Any, tmp_path: Path
) -> None:
    update = tmp_path / "update.safetensors"
    given = copy.deepcopy(model)
    with gradleak.capture(model, update, kind="difference", learning_rate=1.0, steps=1):
        run(model, tiny, TEXTS)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    for name, tensor in read_capture(update).tensors.items():
        torch.testing.assert_close(tensor, -model.get_parameter(name).grad, atol=1e-6, rtol=1e-3)
    # At the weights that the server had sent, and at no others
    found = gradleak.reconstruct(update, model=given, tokenizer=tiny.tokenizer, attacks="span")
    assert "call me on monday!" in {guess.text for guess in found}
    with pytest.raises(GradleakError, match="load the weights of before the optimiser's step"):
        gradleak.reconstruct(update, model=model, tokenizer=tiny.tokenizer)


class Transparent(nn.Module):
    """A wrapper that answers for the model inside it, as torch.compile's and Opacus' do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def __getattr__(self, name: str) -> Any:
        return (
            super().__getattr__(name)
            if name == "_orig_mod"
            else getattr(super().__getattr__("_orig_mod"), name)
        )

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self._orig_mod(*arguments, **named)


@pytest.mark.parametrize("wrap", [nn.DataParallel, Transparent])
def test_names_are_those_of_the_model_inside_wrappers(
    wrap: Any, tiny: Target, model: Any, tmp_path: Path
) -> None:
    wrapped = wrap(wrap(model))
    with gradleak.capture(wrapped, tmp_path / "update.safetensors", know=FACTS):
        run(wrapped, tiny, TEXTS)
    found = read_capture(tmp_path / "update.safetensors")
    assert set(found.tensors) == {name for name, _ in model.named_parameters()}
    assert found.header.model.class_name == "BertForSequenceClassification"
    assert found.header.granted.batch_size == 2


def test_an_evaluation_inside_the_block_is_no_part_of_the_batch(
    tiny: Target, model: Any, tmp_path: Path
) -> None:
    with gradleak.capture(model, tmp_path / "update.safetensors", know=FACTS):
        run(model, tiny, TEXTS)
        with torch.no_grad():
            model(**tiny.tokenizer(TEXTS[:1], return_tensors="pt"))
    assert read_capture(tmp_path / "update.safetensors").header.granted.batch_size == 2


def test_bad_input_is_refused_by_what_is_wrong_and_nothing_is_written(
    tiny: Target, model: Any, tmp_path: Path
) -> None:
    update = tmp_path / "update.safetensors"

    def refused(message: str, given: Any = model, ran: bool = True, **told: Any) -> None:
        model.zero_grad()
        with pytest.raises(GradleakError, match=message), gradleak.capture(given, update, **told):
            if ran:
                run(model, tiny, TEXTS)

    refused("wants a torch module, not a str", given="model")
    refused("kind is gradients or difference, not 'weights'", kind="weights")
    refused("know names batch_size, lengths, labels, not 'texts'", know=["texts"])
    refused("No parameter has a gradient", ran=False)
    with (
        pytest.raises(GradleakError, match="the model was not called inside the block"),
        gradleak.capture(model, update, know=["lengths"]),
    ):
        model.classifier.bias.sum().backward()
    with (
        pytest.raises(GradleakError, match="the model was not given any as labels="),
        gradleak.capture(model, update, know=["labels"]),
    ):
        model(**tiny.tokenizer(TEXTS[:1], return_tensors="pt")).logits.sum().backward()
    with (
        pytest.raises(GradleakError, match=r"multiplied by 65536 .* say scale=1"),
        gradleak.capture(model, update),
    ):
        run(model, tiny, TEXTS, 65536.0)
    with pytest.raises(CaptureError, match="zero"), gradleak.capture(model, update):
        model.zero_grad(set_to_none=False)
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
    model.classifier.bias.grad_sample = torch.zeros(2, 2)
    refused("capture_private_steps")
    assert not list(tmp_path.iterdir())
