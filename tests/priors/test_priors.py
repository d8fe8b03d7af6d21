"""Priors score text, sample it, and say clearly when they do not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.priors.english import (
    Auto,
    English,
    FrequentWords,
    load_packed,
    pack,
    save_packed,
    unpack,
)
from gradleak.priors.language_model import CausalLMPrior, OwnVocabulary, SameVocabulary
from gradleak.targets.tiny import TinyCausal, tiny_tokenizer


def rows(target: Target, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    encoded = target.encode(texts)
    lengths = torch.tensor([len(row) for row in encoded])
    ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
    for place, row in enumerate(encoded):
        ids[place, : len(row)] = torch.tensor(row)
    return ids, lengths


@pytest.fixture(scope="module")
def small_lm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Saves a random causal language model over the tiny vocabulary, or over one with more
    words."""

    def make(extra: int = 0) -> Path:
        from transformers import GPT2Config, GPT2LMHeadModel

        folder = tmp_path_factory.mktemp("lm")
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens([f"extra{number}" for number in range(extra)])
        tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=len(tokenizer),
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=64,
            bos_token_id=2,
            eos_token_id=3,
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def test_a_model_over_the_same_vocabulary_scores_ids_directly(
    tiny: Target, small_lm: Callable[..., Path]
) -> None:
    prior = CausalLMPrior(str(small_lm())).open(tiny)
    assert isinstance(prior, SameVocabulary)
    ids, lengths = rows(tiny, ["the cat is red .", "my dog"])
    expected = []
    for row, length in zip(ids, lengths, strict=True):
        logits = prior.model(input_ids=row[None, : length - 1]).logits[0]
        expected.append(float(torch.nn.functional.cross_entropy(logits, row[1:length])))
    assert prior.nll(ids, lengths).tolist() == pytest.approx(expected, rel=1e-5)


def test_a_model_with_another_vocabulary_scores_the_decoded_text(
    tiny: Target, small_lm: Callable[..., Path]
) -> None:
    same, other = (CausalLMPrior(str(small_lm(extra))).open(tiny) for extra in (0, 5))
    assert isinstance(other, OwnVocabulary)
    ids, lengths = rows(tiny, ["the cat is red .", "my dog was bad"])
    assert other.nll(ids, lengths).shape == same.nll(ids, lengths).shape
    assert bool(torch.isfinite(other.nll(ids, lengths)).all())


@pytest.mark.parametrize("extra", [0, 5])
def test_a_likely_sentence_has_the_asked_length_and_only_allowed_words(
    extra: int, tiny: Target, small_lm: Callable[..., Path]
) -> None:
    prior = CausalLMPrior(str(small_lm(extra))).open(tiny)
    made = prior.likely(9, Streams.root("blind", 0))
    assert len(made) == 9
    assert (made[0], made[-1]) == (*tiny.vocabulary.prefix, *tiny.vocabulary.suffix)
    assert bool(tiny.vocabulary.allowed[torch.tensor(made[1:-1])].all())
    assert made == prior.likely(9, Streams.root("blind", 0))


@pytest.mark.parametrize("extra", [0, 5])
def test_sentences_are_drawn_each_by_its_own_stream(
    extra: int, tiny: Target, small_lm: Callable[..., Path]
) -> None:
    prior = CausalLMPrior(str(small_lm(extra))).open(tiny)
    streams = [Streams.root("draw", seed) for seed in range(3)]
    drawn = prior.draw([9, 5, 9], streams)
    assert [len(one) for one in drawn] == [9, 5, 9]
    assert drawn[0] != drawn[2]
    assert drawn == [prior.draw([len(one)], [streams[seed]])[0] for seed, one in enumerate(drawn)]
    for one in drawn:
        assert (one[0], one[-1]) == (*tiny.vocabulary.prefix, *tiny.vocabulary.suffix)
        assert bool(tiny.vocabulary.allowed[torch.tensor(one[1:-1])].all())


def test_words_are_drawn_as_the_model_believes(tiny: Target, small_lm: Callable[..., Path]) -> None:
    """Against one word after another, read from the beginning each time."""
    prior = CausalLMPrior(str(small_lm())).open(tiny)
    assert isinstance(prior, SameVocabulary)
    stream = Streams.root("draw", 0)
    shares = torch.rand(8, generator=stream.generator()).tolist()
    ids = [*tiny.vocabulary.prefix]
    for place in range(1, 7):
        logits = prior.model(input_ids=torch.tensor([ids])).logits[0, -1].double()
        chances = logits.masked_fill(~tiny.vocabulary.allowed, -torch.inf).softmax(-1)
        ids.append(int((chances.cumsum(0) <= shares[place]).sum()))
    assert prior.draw([8], [stream]) == [[*ids, *tiny.vocabulary.suffix]]


def test_a_word_of_the_list_is_drawn_the_more_often_the_more_frequent_it_is(tiny: Target) -> None:
    prior = FrequentWords().open(tiny)
    drawn = prior.draw([102] * 20, [Streams.root("draw", seed) for seed in range(20)])
    words = torch.tensor([one[1:-1] for one in drawn]).flatten()
    order = prior.likely(2 + 30, Streams.root("draw", 0))[1:-1]
    counts = [int((words == word).sum()) for word in order]
    assert sum(counts[:3]) > 1.5 * sum(counts[10:13]) > 0


def test_frequent_words_prefer_frequent_words(tiny: Target) -> None:
    ids, lengths = rows(tiny, ["the of and to", "asthma salary cat dog"])
    frequent, rare = FrequentWords().open(tiny).nll(ids, lengths).tolist()
    assert frequent < rare


def test_a_corpus_of_ones_own_changes_what_is_frequent(tiny: Target, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("asthma asthma asthma pain pain the")
    made = (
        FrequentWords(corpus=str(tmp_path / "notes.txt"))
        .open(tiny)
        .likely(4, Streams.root("blind", 0))
    )
    assert tiny.decode(made) == "asthma pain"
    with pytest.raises(GradleakError, match="cannot be read as UTF-8"):
        FrequentWords(corpus=str(tmp_path / "gone.txt")).open(tiny)


def test_a_folder_without_a_model_is_refused(tiny: Target, tmp_path: Path) -> None:
    with pytest.raises(GradleakError, match="could not be loaded as a causal language model"):
        CausalLMPrior(str(tmp_path)).open(tiny)


def test_the_shipped_prior_refuses_another_vocabulary_and_auto_falls_back(tiny: Target) -> None:
    with pytest.raises(GradleakError, match="speaks BERT's uncased vocabulary"):
        English().open(tiny)
    assert Auto().open(tiny).likely(4, Streams.root("blind", 0)) == FrequentWords().open(
        tiny
    ).likely(4, Streams.root("blind", 0))


def test_the_shipped_prior_prefers_english_in_order(minilm: Target) -> None:
    prior = English().open(minilm)
    ids, lengths = rows(
        minilm,
        ["she walked to the bank.", "bank the walked she. to", "xylophone quantum the of of"],
    )
    good, shuffled, odd = prior.nll(ids, lengths).tolist()
    assert good < 4.5
    assert good + 1 < min(shuffled, odd)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_packing_rounds_to_half_a_step_at_most(bits: int) -> None:
    tensor = torch.randn(64, 96, generator=Streams.root("packing", bits).generator())
    packed, scales = pack(tensor, bits)
    again = unpack(packed, scales, bits, (64, 96))
    assert packed.numel() == 64 * 96 * bits // 8
    steps = scales.float().repeat_interleave(32).view(64, 96)
    assert bool(((again - tensor).abs() <= 0.501 * steps + 1e-3 * tensor.abs()).all())


def test_packed_weights_and_facts_come_back(tmp_path: Path) -> None:
    weights = {"a": torch.randn(8, 32), "b": torch.ones(3)}
    facts: dict[str, Any] = {"config": {"width": 8}}
    save_packed(tmp_path / "x.safetensors", weights, {"a": 8}, facts)
    again, told = load_packed(tmp_path / "x.safetensors")
    assert told == facts
    assert torch.equal(again["b"], weights["b"])
    assert torch.allclose(again["a"], weights["a"], atol=0.02)


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_a_sentence_of_a_language_models_vocabulary_has_only_words_where_nothing_frames_it(
    shape: Literal["gpt2", "llama"],
) -> None:
    target = TinyCausal(shape=shape).open(torch.device("cpu"))
    model = TinyCausal(shape=shape, seed=1).open(torch.device("cpu")).module
    for prior in (FrequentWords().open(target), SameVocabulary(model, target)):
        ids = prior.likely(6, Streams.root("test", 0))
        first = len(target.vocabulary.prefix)
        assert len(ids) == 6
        assert tuple(ids[:first]) == target.vocabulary.prefix
        assert all(bool(target.vocabulary.allowed[number]) for number in ids[first:])


@pytest.mark.parametrize("name", ["english", "frequent_words"])
def test_words_at_a_place_are_scored_as_whole_sentences_are(minilm: Target, name: str) -> None:
    prior = {"english": English(), "frequent_words": FrequentWords()}[name].open(minilm)
    (ids,) = minilm.encode(["the doctor called me in the morning"])
    sentence, words = torch.tensor(ids), torch.tensor(ids[1:5])
    for place in (1, 4, len(ids) - 1):
        rows = sentence.repeat(len(words), 1)
        rows[:, place] = words
        counted = len(ids) - 1 if name == "english" else len(ids)
        right = -prior.nll(rows, torch.full((len(rows),), len(ids))).double() * counted
        found = prior.score_words(sentence, place, words)
        torch.testing.assert_close(found - found[0], right - right[0], rtol=1e-4, atol=1e-4)
