"""Loops that people have, captured and attacked: heads of other kinds, packed texts, accumulation,
bf16 and frozen parts."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradleak
from gradleak.audit.own_guesses import Reconstructions
from gradleak.captures import read_header
from gradleak.core.batch import Batch, Example, Label
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.targets.tiny import Tiny, TinyCausal
from gradleak.targets.token_classifier import NO_CLASS

TEXTS = ["the cat is red .", "my phone number is five .", "she left"]
WORDS: list[Label] = [(0, 1, 2, 0, 0), (1, 1, 1, 2, 0, 0), (2, 0)]
CPU = torch.device("cpu")
Loop = Callable[[Any, Batch], None]


def open_tiny(problem: Any = "token_classification", classes: int = 3) -> Any:
    return Tiny(problem_type=problem, classes=classes, hidden=64, heads=4).open(CPU)


def attack(target: Any, path: Path, labels: Any, loop: Loop, **said: Any) -> Reconstructions:
    """Captures a loop over the texts, knowing how many there are, and attacks what it left."""
    model = copy.deepcopy(target.module).requires_grad_(True)
    for name in said.pop("frozen", ()):
        model.get_submodule(name).requires_grad_(False)
    pairs = zip(TEXTS, labels, strict=True)
    batch = target.private_batch([Example(text, label) for text, label in pairs]).batch
    with gradleak.capture(model, path, tokenizer=target.tokenizer, know=["batch_size"], **said):
        loop(model, batch)
    found = gradleak.reconstruct(path, model=model, tokenizer=target.tokenizer, attacks="span")
    assert all(one.explains == pytest.approx(1.0, abs=1e-3) for one in found)
    return found


def learn_at_once(model: Any, batch: Batch) -> None:
    labels = batch.labels[:, 0] if batch.labels.shape[-1] == 1 else batch.labels
    read = {"input_ids": batch.ids, "attention_mask": batch.mask.long()}
    model(**read, labels=labels).loss.backward()


def learn_one_by_one(model: Any, batch: Batch) -> None:
    for place, length in enumerate(batch.mask.sum(1).tolist()):
        assert batch.ids is not None
        ids, labels = batch.ids[place : place + 1, :length], batch.labels[place : place + 1]
        labels = labels[:, :length] if labels.dtype == torch.int64 and labels.ndim > 1 else labels
        model(input_ids=ids, labels=labels).loss.backward()


def learn_packed(model: Any, batch: Batch) -> None:
    """As TRL packs: one row, whose positions begin anew with each text."""
    assert batch.ids is not None
    places = torch.cat([torch.arange(length) for length in batch.mask.sum(1).tolist()])[None]
    ids = batch.ids[batch.mask][None]
    labels = ids.masked_fill(places == 0, NO_CLASS)
    model(input_ids=ids, position_ids=places, labels=labels).loss.backward()


def texts_of(target: Target) -> list[str]:
    return sorted(target.decode(row) for row in target.encode(TEXTS))


@pytest.mark.parametrize(
    ("problem", "classes", "labels"),
    [
        ("token_classification", 3, WORDS),
        ("multi_label_classification", 3, [(0, 1, 1), 2, (1, 0, 0)]),
        ("regression", 1, [0.25, -2.0, 3.5]),
    ],
)
def test_heads_of_other_kinds_are_captured_rebuilt_proven_and_scored(
    problem: str, classes: int, labels: list[Label], tmp_path: Path
) -> None:
    target = open_tiny(problem, classes)
    found = attack(target, tmp_path / "u.safetensors", labels, learn_at_once)
    assert sorted(guess.text for guess in found) == texts_of(target)
    assert all(guess.certified and (guess.adds or 0) > 0 for guess in found)
    record = gradleak.score(
        found, TEXTS, labels=[list(one) if isinstance(one, tuple) else one for one in labels]
    )
    assert record.worst_case["exact_match"].mean == 1.0


@pytest.mark.parametrize("loop", [learn_at_once, learn_one_by_one])
def test_classes_of_words_are_rebuilt_whatever_their_mean_is_over(
    loop: Loop, tmp_path: Path
) -> None:
    target, path = open_tiny(), tmp_path / "u.safetensors"
    found = attack(target, path, WORDS, loop)
    assert sorted(guess.text for guess in found) == texts_of(target)
    assert all(guess.certified for guess in found)
    facts = read_header(path).protocol
    expected = (1.0, "tokens") if loop is learn_at_once else (3.0, "texts")
    assert (facts.scale, facts.loss_over) == expected


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
@pytest.mark.parametrize("loop", [learn_packed, learn_one_by_one])
def test_packed_and_accumulated_texts_are_rebuilt_one_by_one(
    shape: Any, loop: Loop, tmp_path: Path
) -> None:
    target: Any = TinyCausal(shape=shape, hidden=64, heads=4).open(CPU)
    path = tmp_path / "u.safetensors"
    found = attack(target, path, [None] * 3, loop)
    assert sorted(guess.text for guess in found) == texts_of(target)
    assert all(guess.certified for guess in found)
    assert read_header(path).granted.batch_size == 3


def test_a_row_of_texts_that_end_in_a_token_is_cut_behind_it() -> None:
    target: Any = TinyCausal(shape="llama").open(CPU)
    assert target.split_row([2, 7, 3, 2, 8, 3]) == [[2, 7, 3, 2, 8, 3]]
    target.tokenizer.eos_token = "[SEP]"
    assert target.split_row([2, 7, 3, 2, 8, 3]) == [[2, 7, 3], [2, 8, 3]]
    assert target.split_row([2, 7, 3, 2, 8]) == [[2, 7, 3], [2, 8]]
    assert target.split_row([3]) == [[3]]


def test_frozen_embeddings_leave_the_first_layer_to_be_read(tmp_path: Path) -> None:
    target = open_tiny("single_label_classification", 2)
    frozen = ("bert.embeddings",)
    path = tmp_path / "u.safetensors"
    found = attack(target, path, [0, 1, 1], learn_at_once, frozen=frozen)
    assert sorted(guess.text for guess in found) == texts_of(target)
    assert all(guess.certified for guess in found)


def test_frozen_first_layers_leave_deeper_ones_to_energy(tmp_path: Path) -> None:
    spec = Tiny(problem_type="token_classification", classes=3, hidden=64, heads=4, layers=3)
    target: Any = spec.open(CPU)
    model = copy.deepcopy(target.module).requires_grad_(True)
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    batch = target.private_batch([Example(TEXTS[0], WORDS[0])]).batch
    path = tmp_path / "u.safetensors"
    with gradleak.capture(model, path, know=["batch_size", "lengths"]):
        learn_at_once(model, batch)
    given = {"model": model, "tokenizer": target.tokenizer}
    with pytest.raises(GradleakError, match="span needs the gradient of the first layer's"):
        gradleak.reconstruct(path, attacks="span", **given)
    (found,) = gradleak.reconstruct(path, attacks="energy:restarts=1", **given)
    assert found.text == target.decode(target.encode(TEXTS)[0]) and found.certified


def test_labels_of_other_kinds_are_never_told(tmp_path: Path) -> None:
    target = open_tiny()
    model = copy.deepcopy(target.module).requires_grad_(True)
    batch = target.private_batch([Example(TEXTS[0], WORDS[0])]).batch
    with (
        pytest.raises(GradleakError, match="leave labels out of know="),
        gradleak.capture(model, tmp_path / "u.safetensors", know=["labels"]),
    ):
        learn_at_once(model, batch)


def test_updates_of_two_kinds_of_mean_are_attacked_one_by_one(tmp_path: Path) -> None:
    target = open_tiny()
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, loop in zip(files, (learn_at_once, learn_one_by_one), strict=True):
        attack(target, path, WORDS, loop)
    with pytest.raises(GradleakError, match="of others over texts: attack them one by one"):
        gradleak.reconstruct(files, model=target.module, tokenizer=target.tokenizer, attacks="span")


@pytest.mark.parametrize("kind", ["PREFIX_TUNING", "PROMPT_TUNING"])
def test_a_loop_that_learns_a_prompt_is_not_captured(kind: str, tmp_path: Path) -> None:
    model: Any = copy.deepcopy(open_tiny().module)
    model.peft_config = {"default": SimpleNamespace(peft_type=kind)}
    model.get_base_model = lambda: model
    with (
        pytest.raises(GradleakError, match=f"learns a prompt \\({kind} of peft\\)"),
        gradleak.capture(model, tmp_path / "u.safetensors"),
    ):
        pass


def test_the_trainers_sum_over_accumulated_batches_of_a_token_classifier_is_noted(
    tmp_path: Path,
) -> None:
    from transformers import Trainer, TrainingArguments

    from gradleak.integrations.trainer import CaptureCallback

    target = open_tiny()
    pairs = zip(TEXTS[:2], WORDS[:2], strict=True)
    rows = []
    for text, label in pairs:
        one = target.private_batch([Example(text, label)]).batch
        rows.append({"input_ids": one.ids[0], "labels": one.labels[0]})

    def collate(some: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: torch.stack([one[name] for one in some]) for name in some[0]}

    model = copy.deepcopy(target.module).requires_grad_(True).eval()
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=1,
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    hook = CaptureCallback(tmp_path / "captures", know=["batch_size"])
    Trainer(model, arguments, train_dataset=rows, data_collator=collate, callbacks=[hook]).train()
    (path,) = (tmp_path / "captures").glob("*.safetensors")
    facts = read_header(path).protocol
    assert facts.loss_over == "texts"
    # The model leaves out the number of tokens that it is handed, so that the means are added up
    assert facts.scale == pytest.approx(2.0)
