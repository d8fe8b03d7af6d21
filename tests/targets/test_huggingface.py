"""Models from folders: each architecture opens and gives the library's own loss; what is unfit
is refused by name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.core.batch import Batch, PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.targets import hub_ids, resolve_target
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.tiny import TinyCausal, tiny_tokenizer
from gradleak.targets.token_classifier import TokenClassifier

CPU = torch.device("cpu")
MASKED = ["Bert", "DistilBert", "Roberta", "MPNet", "Electra", "Albert"]
Model = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer and no model yet."""
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def bert_folder(folder: Path, random_model: Model) -> Path:
    random_model("Bert").save_pretrained(folder)
    return folder


def opened(folder: Path, fields: str = "", **options: bool) -> Target:
    return resolve_target(f"{folder}{fields}", **options).open(CPU)


@pytest.mark.parametrize("architecture", MASKED)
def test_an_architecture_opens_and_gives_the_librarys_own_loss(
    folder: Path, random_model: Model, make_private: Callable[..., PrivateBatch], architecture: str
) -> None:
    model = random_model(architecture).eval()
    model.save_pretrained(folder)
    target = opened(folder)
    assert target.padding_is_free
    batch = make_private(target).batch
    ours = target.losses(batch)
    with torch.no_grad():
        whole = model(
            input_ids=batch.ids, attention_mask=batch.mask.long(), labels=batch.labels
        ).loss
    torch.testing.assert_close(ours.mean(), whole)
    by_embeddings = target.losses(
        Batch(embeddings=target.embed(batch.ids), mask=batch.mask, labels=batch.labels)
    )
    torch.testing.assert_close(by_embeddings, ours, rtol=1e-4, atol=1e-6)
    alone = target.losses(
        Batch(ids=batch.ids[:1, :7], mask=batch.mask[:1, :7], labels=batch.labels[:1])
    )
    torch.testing.assert_close(alone[0], ours[0], rtol=1e-4, atol=1e-6)  # padding is free


def test_gpt2_reads_padding_so_that_batches_need_one_length(
    random_target: Callable[..., Target], make_private: Callable[..., PrivateBatch]
) -> None:
    target = random_target("GPT2")
    assert not target.padding_is_free
    assert target.groups["head_bias"] == ()
    make_private(target, ("the cat is red .", "my dog was bad !"))
    with pytest.raises(
        GradleakError,
        match=(
            r"reads padding, so a batch needs sentences of one length; these have \[7, 11\] tokens"
        ),
    ):
        make_private(target)


@pytest.mark.parametrize("architecture", [*MASKED, "GPT2"])
def test_parameters_are_found_by_their_role(
    random_target: Callable[..., Target], architecture: str
) -> None:
    target = random_target(architecture)
    words, positions, bias = (
        target.groups[group] for group in ("word_embedding", "position_embedding", "head_bias")
    )
    assert [target.parameters[name].shape[0] for name in words] == [len(tiny_tokenizer())]
    assert len(positions) == 1
    assert "position" in positions[0].replace("wpe", "position")
    assert [tuple(target.parameters[name].shape) for name in bias] == (
        [] if architecture == "GPT2" else [(2,)]
    )
    assert set(bias) < set(target.groups["head"]) <= set(target.parameters)


def test_opening_a_model_leaves_gradients_off_and_eval_on(bert_folder: Path) -> None:
    module = opened(bert_folder).module
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert module.config._attn_implementation == "eager"


@pytest.mark.parametrize("share", ["module", "weight"])
def test_losses_at_other_parameters_leave_the_model_as_it_was_even_where_layers_are_shared(
    random_model: Model, make_private: Callable[..., PrivateBatch], share: str
) -> None:
    model = random_model("Bert")
    first, second = (layer.attention.self for layer in model.bert.encoder.layer)
    if share == "module":
        second.value = first.value
    else:
        second.value.weight = first.value.weight
    target = TextClassifier("shared", model, tiny_tokenizer())
    batch = make_private(target).batch
    before, loss = dict(model.named_parameters()), target.losses(batch)
    copies = {name: 2 * value for name, value in target.parameters.items()}
    doubled = target.losses(batch, copies)
    assert {name: id(value) for name, value in model.named_parameters()} == {
        name: id(value) for name, value in before.items()
    }
    assert torch.equal(target.losses(batch), loss)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(target.losses(batch), doubled)


def test_a_missing_head_is_drawn_from_its_seed_and_nothing_else(
    folder: Path, random_model: Model
) -> None:
    random_model("Bert").bert.save_pretrained(folder)
    before = torch.get_rng_state()
    one, same = (opened(folder).parameters for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    other, wide = (
        opened(folder, fields).parameters for fields in (":head_seed=1", ":head_std=2.0")
    )
    assert torch.equal(one["classifier.weight"], same["classifier.weight"])
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])
    torch.testing.assert_close(wide["classifier.weight"], 100 * one["classifier.weight"])
    assert float(one["classifier.weight"].std()) == pytest.approx(0.02, rel=0.3)
    assert not one["classifier.bias"].any()
    assert opened(folder, ":classes=5").classes == 5
    for name, value in one.items():
        assert name.startswith("classifier") or torch.equal(value, other[name])


def test_a_head_that_is_there_is_kept(bert_folder: Path, random_model: Model) -> None:
    kept = opened(bert_folder, ":head_seed=7").parameters["classifier.weight"]
    assert torch.equal(kept, random_model("Bert").classifier.weight)


def test_a_frozen_group_is_neither_trained_nor_sent(bert_folder: Path) -> None:
    whole, part = opened(bert_folder), opened(bert_folder, ":frozen=[word_embedding]")
    assert set(whole.parameters) - set(part.parameters) == set(whole.groups["word_embedding"])
    with pytest.raises(
        GradleakError,
        match="no group of parameters called 'words' to freeze; groups are word_embedding, ",
    ):
        opened(bert_folder, ":frozen=words")


def test_a_shorthand_keeps_its_fields_and_odd_paths(tmp_path: Path) -> None:
    assert resolve_target("org/some-model:classes=3").path == "org/some-model"
    odd = tmp_path / "a, b=c {d}"
    odd.mkdir()
    assert resolve_target(str(odd)).path == str(odd)
    assert resolve_target(f"{odd}:classes=3").classes == 3


def test_the_fingerprint_follows_the_weights(bert_folder: Path, random_model: Model) -> None:
    before = resolve_target(str(bert_folder)).fingerprint()
    assert before.startswith("sha256:")
    assert before == resolve_target(str(bert_folder)).fingerprint()
    model = random_model("Bert")
    torch.nn.init.zeros_(model.classifier.weight)
    model.save_pretrained(bert_folder)
    assert resolve_target(str(bert_folder)).fingerprint() != before


@pytest.mark.parametrize(
    ("changes", "learns"),
    [
        ({"num_labels": 1}, "1 numbers"),
        ({"problem_type": "regression"}, "2 numbers"),
        ({"problem_type": "multi_label_classification"}, "2 labels, any number at once"),
    ],
)
def test_a_head_learns_what_its_config_says(
    folder: Path, random_model: Model, changes: dict[str, Any], learns: str
) -> None:
    random_model("Bert", **changes).save_pretrained(folder)
    target = opened(folder)
    assert target.labels_are_open and learns in target.in_words
    assert resolve_target(str(folder)).labels_are_open


def test_a_folder_of_a_token_classifier_is_opened_as_one(folder: Path, random_model: Model) -> None:
    from transformers import BertForTokenClassification

    model = BertForTokenClassification(random_model("Bert").config)
    model.save_pretrained(folder)
    assert isinstance(opened(folder), TokenClassifier)
    assert resolve_target(str(folder)).labels_are_open
    other = resolve_target(f"huggingface:path={folder},problem_type=multi_label_classification")
    assert "2 labels, any number at once)" in other.open(CPU).in_words


def test_pickled_weights_are_refused_unless_trusted(folder: Path, random_model: Model) -> None:
    model = random_model("Bert")
    model.config.architectures = ["BertForSequenceClassification"]
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(
        GradleakError,
        match=r"has no \.safetensors weights; pickled weights can run code\. .*--allow-pickle",
    ):
        opened(folder)
    target = opened(folder, allow_pickle=True)
    assert torch.equal(target.parameters["classifier.weight"], model.classifier.weight)


@pytest.mark.parametrize(
    "written", ["./clff", "clff", "clff/", "models/clff", "{here}/clff", "huggingface:path=./clff"]
)
def test_a_mistyped_folder_is_told_with_the_one_that_is_near(
    bert_folder: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    here = bert_folder.parent
    for folder in (here / "clf", here / "models" / "clf"):
        shutil.copytree(bert_folder, folder)
    monkeypatch.chdir(here)
    with pytest.raises(GradleakError, match=r"no.* folder '?[\S]*clff/?'?; did you mean \S*clf\?"):
        resolve_target(written.format(here=here)).open(CPU)


def test_what_can_only_be_a_folder_is_refused_before_the_hub_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.bin").touch()
    for written in ("./gone", "../gone/too", "a/b/c", "/nowhere/at/all"):
        with pytest.raises(GradleakError, match=f"There is no folder {written}; check the path"):
            resolve_target(written)
    with pytest.raises(GradleakError, match="is a file: name the folder that holds config.json"):
        resolve_target("./model.bin")
    assert hub_ids([resolve_target("org/some-model"), resolve_target("tiny")]) == ["org/some-model"]


def test_kinds_of_models_are_told_by_config_json(folder: Path, random_model: Model) -> None:
    TinyCausal().open(CPU).module.save_pretrained(folder)
    spec = resolve_target(f"{folder}:frozen=word_embedding")
    assert (spec.name, spec.open(CPU).in_words) == (
        "causal_lm",
        "causal language model (GPT2LMHeadModel, 171 words)",
    )
    # Asked for by what only classifiers have
    assert resolve_target(f"{folder}:classes=3").name == "huggingface"
    assert (
        resolve_target(f"huggingface:path={folder}").open(CPU).in_words
        == "sequence classifier (GPT2ForSequenceClassification, 2 classes) with a random head"
        " (score), which GPT2LMHeadModel does not have (to train it as a language model:"
        f" causal_lm:path={folder})"
    )


def test_a_random_head_is_said(folder: Path, random_model: Model) -> None:
    random_model("Bert").save_pretrained(folder)
    assert (
        opened(folder).in_words == "sequence classifier (BertForSequenceClassification, 2 classes)"
    )
    (folder / "model.safetensors").unlink()
    random_model("Bert").bert.save_pretrained(folder)
    assert opened(folder).in_words.endswith(
        "2 classes) with a random head (classifier), which BertModel does not have"
    )


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, random_model: Model) -> None:
    random_model("Bert").save_pretrained(tmp_path / "bare")
    with pytest.raises(
        GradleakError, match=r"bare has no tokenizer files .*save the tokenizer into that folder"
    ):
        opened(tmp_path / "bare")


def test_a_folder_that_is_no_model_is_refused(folder: Path) -> None:
    with pytest.raises(
        GradleakError, match=r"has no config\.json: it is not a Hugging Face model folder"
    ):
        opened(folder)


@pytest.mark.parametrize("content", ["{", '{"model_type": "no_such_model"}'])
def test_a_folder_with_a_broken_config_is_refused(bert_folder: Path, content: str) -> None:
    (bert_folder / "config.json").write_text(content)
    with pytest.raises(GradleakError, match="model"):
        opened(bert_folder)


def test_weights_that_are_no_weights_are_refused(bert_folder: Path) -> None:
    (bert_folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(GradleakError, match="could not be loaded as a sequence classifier"):
        opened(bert_folder)


def test_a_wrong_number_of_classes_is_refused(bert_folder: Path) -> None:
    with pytest.raises(GradleakError, match="could not be loaded as a sequence classifier"):
        opened(bert_folder, ":classes=5")


def test_a_model_that_takes_no_embeddings_is_refused(
    random_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("Bert")
    inner = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda input_ids, attention_mask: inner(input_ids=input_ids, attention_mask=attention_mask),
    )
    with pytest.raises(
        GradleakError, match="deaf does not take input embeddings, which gradient attacks optimise"
    ):
        TextClassifier("deaf", model, tiny_tokenizer())


def test_a_model_that_does_something_else_with_embeddings_is_refused(
    random_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("Bert")
    inner = model.forward

    def forward(input_ids: Any = None, inputs_embeds: Any = None, **inputs: Any) -> Any:
        return inner(
            input_ids=input_ids,
            inputs_embeds=None if inputs_embeds is None else 2 * inputs_embeds,
            **inputs,
        )

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(GradleakError, match="The embeddings of scaled cannot be reached"):
        TextClassifier("scaled", model, tiny_tokenizer())


def test_attending_padding_is_refused_where_positions_follow_it(random_model: Model) -> None:
    with pytest.raises(
        GradleakError,
        match="positioned numbers positions by its padding tokens: attend_padding cannot",
    ):
        TextClassifier("positioned", random_model("Roberta"), tiny_tokenizer(), attend_padding=True)
    TextClassifier("positioned", random_model("Bert"), tiny_tokenizer(), attend_padding=True)


def test_a_model_that_hides_its_embeddings_is_refused(
    random_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("Bert")

    def hidden() -> None:
        raise NotImplementedError

    monkeypatch.setattr(model, "get_input_embeddings", hidden)
    with pytest.raises(
        GradleakError,
        match=r"word embeddings of hidden cannot be reached through get_input_embeddings",
    ):
        TextClassifier("hidden", model, tiny_tokenizer())
