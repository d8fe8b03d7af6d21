"""Causal language models: the loss is the library's own, labels are the text, and what is unfit
is refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.core.batch import Batch, Example, PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.targets import resolve_target
from gradleak.targets.causal_language_model import CausalLanguageModel
from gradleak.targets.tiny import TinyCausal, tiny_tokenizer

CPU = torch.device("cpu")
SHORT, LONG = (
    Example("the cat is red ."),
    Example("my phone number is five five zero one .", label=7),
)
Private = Callable[..., PrivateBatch]


def test_the_loss_of_one_text_is_the_librarys_own(causal: Target) -> None:
    for example in (SHORT, LONG):
        batch = causal.private_batch([example]).batch
        with torch.no_grad():
            theirs = causal.module(input_ids=batch.ids, labels=batch.ids).loss
        torch.testing.assert_close(
            causal.losses(batch)[0].float(), theirs.float(), rtol=1e-5, atol=0
        )


def test_a_batch_is_the_mean_over_its_examples_and_padding_changes_nothing(causal: Target) -> None:
    together, alone = (
        causal.private_batch([SHORT, LONG]),
        [causal.private_batch([example]) for example in (SHORT, LONG)],
    )
    assert causal.padding_is_free
    assert together.lengths == (alone[0].lengths[0], alone[1].lengths[0])
    each = torch.cat([causal.losses(one.batch) for one in alone])
    # Llama normalises in float32
    torch.testing.assert_close(causal.losses(together.batch), each, rtol=1e-5, atol=0)
    words = together.batch.ids.clone()
    words[~together.batch.mask] = 30
    torch.testing.assert_close(
        causal.losses(replace(together.batch, ids=words)), each, rtol=1e-5, atol=0
    )


def test_embeddings_with_hard_or_one_hot_labels_are_the_ids(causal: Target) -> None:
    batch = causal.private_batch([SHORT, LONG]).batch
    by_ids = causal.losses(batch)
    one_hot = torch.nn.functional.one_hot(batch.ids, causal.classes).to(causal.dtype)
    for labels in (batch.ids, one_hot):
        by_embeddings = causal.losses(
            Batch(embeddings=causal.embed(batch.ids), mask=batch.mask, labels=labels)
        )
        torch.testing.assert_close(by_embeddings, by_ids, rtol=1e-9, atol=0)


def test_ids_are_their_own_labels_whatever_stands_in_their_place(causal: Target) -> None:
    batch = causal.private_batch([SHORT, LONG]).batch
    assert torch.equal(batch.labels, batch.ids)
    torch.testing.assert_close(
        causal.losses(replace(batch, labels=torch.zeros(2, dtype=torch.int64))),
        causal.losses(batch),
    )


def test_embeddings_without_token_labels_are_refused(causal: Target) -> None:
    batch = causal.private_batch([SHORT, LONG]).batch
    for labels in (
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, causal.classes, dtype=torch.float64),
    ):
        with pytest.raises(ValueError, match="come with one label a token"):
            causal.losses(Batch(embeddings=causal.embed(batch.ids), mask=batch.mask, labels=labels))


def test_leading_axes_are_free(causal: Target) -> None:
    batch = causal.private_batch([SHORT, LONG]).batch
    doubled = Batch(
        **{part: getattr(batch, part)[None].expand(2, -1, -1) for part in ("ids", "mask", "labels")}
    )
    torch.testing.assert_close(
        causal.losses(doubled), causal.losses(batch).expand(2, -1), rtol=1e-9, atol=0
    )


def test_probabilities_are_those_of_the_word_after_the_last(causal: Target) -> None:
    private = causal.private_batch([SHORT, LONG])
    logits = causal.module(input_ids=private.batch.ids).logits
    after = torch.stack(
        [row[length - 1] for row, length in zip(logits, private.lengths, strict=True)]
    )
    torch.testing.assert_close(
        causal.probabilities(private.batch), after.softmax(-1), rtol=1e-5, atol=1e-9
    )


def test_gpt2_has_no_frame_and_llama_a_first_token() -> None:
    bare, framed = (TinyCausal(shape=shape).open(CPU) for shape in ("gpt2", "llama"))
    assert (bare.vocabulary.prefix, bare.vocabulary.suffix) == ((), ())
    assert (len(framed.vocabulary.prefix), framed.vocabulary.suffix) == (1, ())
    assert bare.vocabulary.frame(3) == ([0, 0, 0], [False] * 3)
    (ids,) = bare.encode(["the cat"])
    assert framed.encode(["the cat"]) == [[*framed.vocabulary.prefix, *ids]]


def test_a_text_of_one_token_is_refused_where_nothing_comes_before_it() -> None:
    bare, framed = (TinyCausal(shape=shape).open(CPU) for shape in ("gpt2", "llama"))
    with pytest.raises(
        GradleakError,
        match="Text 2 of the batch has one token, of which a language model learns nothing",
    ):
        bare.private_batch([SHORT, Example("cat")])
    assert framed.private_batch([Example("cat")]).lengths == (2,)


def test_an_empty_text_is_refused_by_its_place_or_its_line(causal: Target) -> None:
    for where, said in (
        ("", "Text 2 of the batch is empty after tokenising"),
        ("notes.csv, line 4", "notes.csv, line 4 is empty"),
    ):
        with pytest.raises(GradleakError, match=said):
            causal.private_batch([SHORT, Example("  ", where=where)])


def test_a_long_text_is_truncated_as_the_tokenizer_does(causal: Target) -> None:
    private = causal.private_batch([SHORT, Example("doctor " * 140)])
    assert private.lengths[1] == 128
    assert private.dropped == (0, 140 + len(causal.vocabulary.prefix) - 128)
    assert bool(causal.losses(private.batch).isfinite().all())


def test_parts_have_a_head_where_it_is_not_tied() -> None:
    gpt2, llama = (TinyCausal(shape=shape).open(CPU) for shape in ("gpt2", "llama"))
    assert (gpt2.groups["head"], gpt2.words_are_outputs) == ((), True)
    assert (llama.groups["head"], llama.words_are_outputs) == (("lm_head.weight",), False)
    modules = [{part.module for part in target.parts} for target in (gpt2, llama)]
    assert all("pooler" not in held and "other" not in held for held in modules)
    assert ["head" in held for held in modules] == [False, True]
    assert (
        TinyCausal(shape="llama", frozen=("head",)).open(CPU).frozen_parts[0].name
        == "lm_head.weight"
    )


def test_tiny_causal_has_the_same_weights_whenever_it_is_opened() -> None:
    before = torch.get_rng_state()
    one, same, other = (TinyCausal(seed=seed).open(CPU).parameters for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(same[name], value) for name, value in one.items())
    assert not any(torch.equal(other[name], value) for name, value in one.items())


# From folders


@pytest.fixture
def folder(tmp_path: Path, causal: Any) -> Path:
    """A language model on disk."""
    causal.module.save_pretrained(tmp_path / "model")
    causal.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_opens_as_what_was_saved(folder: Path, causal: Target) -> None:
    spec = resolve_target(f"causal_lm:path={folder}")
    target = spec.open(CPU, torch.float64)
    assert spec.labels_are_tokens
    assert spec.fingerprint().startswith("sha256:")
    assert target.module.config._attn_implementation == "eager"
    assert list(target.parameters) == list(causal.parameters)
    batch = causal.private_batch([SHORT, LONG]).batch
    torch.testing.assert_close(target.losses(batch), causal.losses(batch), rtol=1e-5, atol=0)


def test_a_checkpoint_without_its_output_layer_is_refused(tmp_path: Path) -> None:
    target: Any = TinyCausal(shape="llama").open(CPU)
    target.module.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        GradleakError, match=r"has no lm_head\.weight: it is not a whole causal language model"
    ):
        resolve_target(f"causal_lm:path={tmp_path}").open(CPU)


def test_a_model_that_reads_ahead_is_refused() -> None:
    from transformers import BertConfig, BertLMHeadModel

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    model = BertLMHeadModel(BertConfig(vocab_size=len(tiny_tokenizer()), is_decoder=False, **sizes))
    model.bert.embeddings.word_embeddings.weight.data.normal_(
        generator=torch.Generator().manual_seed(0)
    )
    with pytest.raises(
        GradleakError,
        match="bert reads the tokens it is to predict: it is not a causal language model",
    ):
        CausalLanguageModel("bert", model, tiny_tokenizer())


def test_pickled_weights_need_to_be_asked_for(folder: Path) -> None:
    model = resolve_target(f"causal_lm:path={folder}").open(CPU).module
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(GradleakError, match="pickled weights can run code"):
        resolve_target(f"causal_lm:path={folder}").open(CPU)
    assert resolve_target(f"causal_lm:path={folder}", allow_pickle=True).open(CPU).padding_is_free
