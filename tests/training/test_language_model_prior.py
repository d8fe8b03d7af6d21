"""Training a prior: it learns, goes on where it stopped, and says what is wrong with its input."""

from pathlib import Path

import pytest
import torch

from gradleak.core.errors import GradleakError
from gradleak.priors.english import pack_prior
from gradleak.targets.tiny import WORDS, tiny_tokenizer
from gradleak.training.language_model_prior import (
    HELD_OUT_EVERY,
    PriorTraining,
    batches,
    read_corpus,
    train_prior,
)

CPU = torch.device("cpu")
SETTINGS = PriorTraining(
    width=32,
    layers=1,
    heads=2,
    feed_forward=64,
    longest=16,
    epochs=2,
    tokens_a_batch=256,
    warm_up=5,
)


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    """Sentences in which each word fixes the next: there is something to learn."""
    lines = [
        " ".join(WORDS[(start + step) % 60] for step in range(3 + start % 5))
        for start in range(600)
    ]
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(lines))
    return path


def test_held_out_sentences_are_not_trained_on(corpus_file: Path) -> None:
    corpus = read_corpus([corpus_file], tiny_tokenizer(), 16)
    count = sum(len(table) for table in corpus.training.values())
    held = sum(len(table) for table in corpus.held_out.values())
    assert (count, held) == (600 - 600 // HELD_OUT_EVERY, 600 // HELD_OUT_EVERY)


def test_batches_hold_every_sentence_once_and_one_length_each(corpus_file: Path) -> None:
    tables = read_corpus([corpus_file], tiny_tokenizer(), 16).training
    made = batches(tables, 64, torch.Generator().manual_seed(0))
    assert sorted(tuple(row) for batch in made for row in batch.tolist()) == sorted(
        tuple(row) for table in tables.values() for row in table.tolist()
    )


def test_training_lowers_the_loss_and_a_second_call_goes_on(
    corpus_file: Path, tmp_path: Path
) -> None:
    corpus = read_corpus([corpus_file], tiny_tokenizer(), 16)
    once = list(train_prior(SETTINGS, corpus, tiny_tokenizer(), tmp_path / "once", CPU))
    assert once[-1]["validation"] < 4.5 < torch.tensor(float(len(tiny_tokenizer()))).log()
    stopped = train_prior(SETTINGS, corpus, tiny_tokenizer(), tmp_path / "twice", CPU)
    for news in stopped:
        if news["epoch"] == 2:  # the first epoch's checkpoint is written
            break
    stopped.close()
    again = list(train_prior(SETTINGS, corpus, tiny_tokenizer(), tmp_path / "twice", CPU))
    assert {news["epoch"] for news in again} == {2}
    assert again[-1]["validation"] == pytest.approx(once[-1]["validation"], rel=1e-4)


def test_a_checkpoint_of_other_settings_is_refused(corpus_file: Path, tmp_path: Path) -> None:
    corpus = read_corpus([corpus_file], tiny_tokenizer(), 16)
    list(train_prior(SETTINGS, corpus, tiny_tokenizer(), tmp_path / "one", CPU))
    other = PriorTraining(width=32, layers=1, heads=2, feed_forward=64, longest=16, epochs=3)
    with pytest.raises(GradleakError, match="checkpoint of other settings"):
        list(train_prior(other, corpus, tiny_tokenizer(), tmp_path / "one", CPU))
    assert pack_prior(tmp_path / "one", tmp_path / "one.safetensors", 5, 6) < 60_000


def test_a_missing_or_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GradleakError, match="There is no corpus file"):
        read_corpus([tmp_path / "gone.txt"], tiny_tokenizer(), 16)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(GradleakError, match="too few sentences"):
        read_corpus([tmp_path / "empty.txt"], tiny_tokenizer(), 16)
    with pytest.raises(GradleakError, match="holds no trained prior"):
        pack_prior(tmp_path, tmp_path / "x.safetensors", 5, 6)
