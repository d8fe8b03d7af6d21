"""Captures at the optimiser's step: plain PyTorch, accelerate, the Trainer."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradleak
from gradleak.captures import index_folder, read_capture
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.integrations.steps import capture_steps

TEXTS = ["the cat is red .", "call me on monday !", "the dog was bad .", "my house is blue ."]
LABELS = [0, 1, 0, 1]


@pytest.fixture
def model(tiny: Target) -> Any:
    return copy.deepcopy(tiny.module).requires_grad_(True)


def run(model: Any, tiny: Target, texts: list[str]) -> Any:
    read = tiny.tokenizer(texts, padding=True, return_tensors="pt")
    return model(**read, labels=torch.zeros(len(texts), dtype=torch.int64)).loss


def test_a_step_is_captured_as_it_is_applied(tiny: Target, model: Any, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = {}
    with capture_steps(model, optimizer, tmp_path, every=2, know=["batch_size"], client="a"):
        for number in range(3):
            for text in TEXTS[number : number + 2]:
                run(model, tiny, [text]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            before[number] = {name: one.clone() for name, one in model.state_dict().items()}
            optimizer.step()
            optimizer.zero_grad()
    run(model, tiny, TEXTS).backward()
    optimizer.step()  # after the block nothing is captured
    held = index_folder(tmp_path)
    assert [header.round for _, header in held] == [0, 2]
    for path, header in held:
        assert (header.client, header.protocol.scale) == ("a", 2.0)
        assert header.granted.batch_size == 2  # of its own step
        tensors = read_capture(path).tensors
        norm = torch.stack([one.norm() for one in tensors.values()]).norm()
        assert float(norm) == pytest.approx(0.1, rel=1e-3)
    moved = before[0]["classifier.weight"] - before[1]["classifier.weight"]
    torch.testing.assert_close(moved, 0.5 * read_capture(held[0][0]).tensors["classifier.weight"])


def test_a_step_that_overflowed_is_left_out_and_training_goes_on(
    tiny: Target, model: Any, tmp_path: Path
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with capture_steps(model, optimizer, tmp_path), pytest.warns(UserWarning, match="Step 0"):
        run(model, tiny, TEXTS).backward()
        model.classifier.bias.grad[0] = torch.nan
        optimizer.step()
    assert not index_folder(tmp_path)


def test_what_has_no_step_to_capture_is_refused(tiny: Target, model: Any, tmp_path: Path) -> None:
    def refused(message: str, optimizer: Any, **told: Any) -> None:
        with (
            pytest.raises(GradleakError, match=message),
            capture_steps(model, optimizer, tmp_path, **told),
        ):
            optimizer.step(lambda: run(model, tiny, TEXTS))

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    refused("wants a torch optimiser, not a str", "sgd")
    refused("every counts steps from 1, not 0", sgd, every=0)
    refused("know names batch_size", sgd, know=["texts"])
    refused("within its step", torch.optim.LBFGS(model.parameters()))
    assert not sgd._optimizer_step_pre_hooks


def test_accelerate_is_captured_where_it_synchronises(
    tiny: Target, model: Any, tmp_path: Path
) -> None:
    accelerate = pytest.importorskip("accelerate")
    given = copy.deepcopy(model)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with capture_steps(model, optimizer, tmp_path, know=["batch_size"]):
        for text in TEXTS:
            with accelerator.accumulate(model):
                accelerator.backward(run(model, tiny, [text]))
                optimizer.step()
                optimizer.zero_grad()
    (first, header), (_, second) = index_folder(tmp_path)
    assert (header.protocol.scale, header.granted.batch_size) == (1.0, 2)
    assert second.round == 1
    run(given, tiny, TEXTS[:2]).backward()
    torch.testing.assert_close(
        read_capture(first).tensors["classifier.weight"], given.classifier.weight.grad
    )


def train(tiny: Target, folder: Path, hooks: list[Any], **options: Any) -> Any:
    """Trains the tiny model for three steps of two accumulated batches of two, with dropout."""
    pytest.importorskip("accelerate")
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder / "trainer"),
        max_steps=3,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    rows = [
        {**tiny.tokenizer(text), "labels": label} for text, label in zip(TEXTS, LABELS, strict=True)
    ]
    model = copy.deepcopy(tiny.module).requires_grad_(True)
    data = DataCollatorWithPadding(tiny.tokenizer)
    Trainer(model, arguments, train_dataset=rows, data_collator=data, callbacks=hooks).train()
    return model


def test_the_trainer_is_captured_after_accumulation_and_trains_as_without(
    tiny: Target, tmp_path: Path
) -> None:
    from gradleak.integrations.trainer import CaptureCallback

    class Weights(CaptureCallback):  # type: ignore[misc]
        """Keeps the weights around the first step."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            super().on_pre_optimizer_step(args, state, control, **given)
            kept.setdefault("before", given["model"].classifier.weight.detach().clone())

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            kept.setdefault("after", given["model"].classifier.weight.detach().clone())

    kept: dict[str, torch.Tensor] = {}
    captures = tmp_path / "captures"
    hook = Weights(captures, every=2, know=["batch_size", "lengths", "labels"])
    watched = train(tiny, tmp_path, [hook], max_grad_norm=0.5)
    alone = train(tiny, tmp_path, [], max_grad_norm=0.5)
    for name, value in alone.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name])
    assert not watched._forward_hooks and not watched._forward_pre_hooks
    (first, header), (_, last) = index_folder(captures)
    assert (header.round, last.round) == (0, 2)
    # The sum of two batches' means, clipped after it: of their mean at half the norm
    assert header.protocol.scale == pytest.approx(2.0)
    assert header.defenses == ("clipping:clip=0.25",)
    assert header.granted.batch_size == 4
    assert sorted(header.granted.labels or ()) == LABELS[::2] + LABELS[1::2]
    sent = read_capture(first).tensors
    norm = torch.stack([one.norm() for one in sent.values()]).norm()
    assert float(norm) == pytest.approx(0.5, rel=1e-3)
    torch.testing.assert_close(
        kept["before"] - kept["after"], 0.1 * sent["classifier.weight"], atol=1e-6, rtol=1e-3
    )
    # Of the mean gradient, as an attacker sees it
    seen = gradleak.observe(tiny.module, tiny.tokenizer, sent, scale=2.0)
    assert float(next(iter(seen.update.whole_norms()))) == pytest.approx(0.25, rel=1e-3)


def test_the_callback_refuses_what_it_could_not_tell(tmp_path: Path, tiny: Target) -> None:
    from gradleak.integrations.trainer import CaptureCallback

    with pytest.raises(GradleakError, match="every counts steps from 1"):
        CaptureCallback(tmp_path, every=0)
    with pytest.raises(GradleakError, match="know names"):
        CaptureCallback(tmp_path, know=["texts"])

    class Arguments:
        fp16, max_grad_norm = True, 1.0

    class State:
        is_world_process_zero, global_step = True, 0

    with pytest.raises(GradleakError, match="train in bf16, or state scale="):
        CaptureCallback(tmp_path).on_step_begin(Arguments, State, None, model=tiny.module)
