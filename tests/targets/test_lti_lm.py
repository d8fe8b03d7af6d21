"""The language model of Learning to Invert, and its blocks of text; skipped where GPT-2's
vocabulary is missing."""

import os
from pathlib import Path

import pytest
import torch

from gradleak.attacks.learning_to_invert.simulation import ClosedForms
from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError
from gradleak.datasets.benchmarks import Wikitext2
from gradleak.targets.lti_lm import LtiLanguageModel

CPU = torch.device("cpu")


@pytest.fixture
def data() -> Path:
    folder = Path(os.environ.get("GRADLEAK_DATA", "/nowhere"))
    if not (folder / "gpt2_bpe" / "vocab.bpe").is_file() or not (folder / "wikitext2").is_dir():
        pytest.skip("GRADLEAK_DATA names no folder with gpt2_bpe and wikitext2")
    return folder


def test_without_the_vocabulary_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GRADLEAK_DATA", raising=False)
    with pytest.raises(
        GradleakError, match="set GRADLEAK_DATA to the folder that holds gpt2_bpe/encoder.json"
    ):
        LtiLanguageModel().open(CPU)
    monkeypatch.setenv("GRADLEAK_DATA", str(tmp_path))
    with pytest.raises(
        GradleakError, match=r"There is no wikitext2/test.txt.xz in the folder GRADLEAK_DATA names"
    ):
        Wikitext2().load(1)


def test_it_shares_as_many_parameters_as_in_the_paper_and_none_of_its_words(data: Path) -> None:
    target = LtiLanguageModel().open(CPU)
    assert sum(value.numel() for value in target.parameters.values()) == 1_100_832
    assert not set(target.groups["word_embedding"] + target.groups["head"]) & set(target.parameters)
    assert len(target.vocabulary.allowed) == 50_257
    assert float(target.vocabulary.embeddings.abs().max()) <= 0.1
    ClosedForms(target)


def test_the_decoder_is_the_words_where_it_is_copied_and_its_own_otherwise(data: Path) -> None:
    own, copied = (
        LtiLanguageModel(layers=1, decoder_copied=copied).open(CPU) for copied in (False, True)
    )
    decoders = [target.module.get_output_embeddings().weight for target in (own, copied)]  # type: ignore[operator]
    assert torch.equal(decoders[1], copied.vocabulary.embeddings)
    assert not torch.equal(decoders[0], own.vocabulary.embeddings)
    assert torch.equal(own.vocabulary.embeddings, copied.vocabulary.embeddings)
    assert list(own.parameters) == list(copied.parameters)  # neither is sent


def test_with_the_mask_nothing_depends_on_what_comes_later_and_without_it_does(data: Path) -> None:
    changed = []
    for causal in (True, False):
        target = LtiLanguageModel(causal=causal, layers=1).open(CPU)
        first = target.private_batch([Example("one two three four")]).batch
        second = target.private_batch([Example("one two three five")]).batch
        logits = [
            target.module(input_ids=batch.ids, attention_mask=batch.mask.long()).logits[0, 0]
            for batch in (first, second)
        ]
        changed.append(bool((logits[0] != logits[1]).any()))
    assert changed == [False, True]


def test_blocks_have_sixteen_tokens_and_the_attackers_are_others(data: Path) -> None:
    target = LtiLanguageModel(layers=1).open(CPU)
    blocks = Wikitext2().load(200)
    assert {len(row) for row in target.encode([example.text for example in blocks])} == {16}
    assert Wikitext2().public() == Wikitext2(split="train")
