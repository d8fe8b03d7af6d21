"""Labels of a language model that move beside the embeddings: what is read off which, and how
much more is found."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gradleak.attacks.blind import Blind
from gradleak.attacks.gradient_matching import loop, starts
from gradleak.attacks.recipes.baselines import Tag
from gradleak.attacks.recipes.lamp import LampCos
from gradleak.attacks.search.search_rows import (
    Rows,
    SearchProblem,
    group_problems,
    lay_out,
    nearest_tokens,
)
from gradleak.core.attack import Attack, Bench
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.priors.english import FrequentWords
from gradleak.targets.tiny import TinyCausal

TEXTS = (
    "my phone number is five five zero one .",
    "the cat is red .",
    "she never paid the bank again soon",
)
Observe = Callable[..., Observation]


@pytest.fixture(scope="module")
def gpt2() -> Target:
    return TinyCausal().open(torch.device("cpu"), torch.float64)


def bench_for(target: Target) -> Bench:
    return Bench(Streams.root("attacker", 3), FrequentWords().open(target))


def rows_of(target: Target, observe: Observe) -> Rows:
    """One text of nine words and one of five, padded."""
    seen = [observe(target, [text], index=index) for index, text in enumerate(TEXTS[:2])]
    return lay_out(group_problems(seen, Tag().loop.assumptions)[0], free_labels=True)


def tokens_right(attack: Attack, target: Target, observe: Observe) -> float:
    seen = [observe(target, [text], index=index) for index, text in enumerate(TEXTS)]
    guesses = [guess.sentences[0] for guess in attack.reconstruct(seen, bench_for(target))]
    pairs = [
        pair
        for text, guess in zip(target.encode(TEXTS), guesses, strict=True)
        for pair in zip(text, guess, strict=True)
    ]
    return sum(word == guessed for word, guessed in pairs) / len(pairs)


def test_free_labels_find_far_more_tokens_than_tied_ones_in_as_many_steps(
    gpt2: Target, observe: Observe
) -> None:
    free, tied = (
        tokens_right(Tag(steps=150, token_labels=labels), gpt2, observe)
        for labels in ("free", "tied")
    )  # type: ignore[arg-type]
    assert free >= 0.65
    assert free > tied + 0.2
    assert free > tokens_right(Blind(), gpt2, observe) + 0.4


def test_a_classifier_is_attacked_as_before(tiny: Target, observe: Observe) -> None:
    seen = [observe(tiny, [TEXTS[1]])]
    free, tied = (
        Tag(steps=5, token_labels=labels).reconstruct(seen, bench_for(tiny))[0]
        for labels in ("free", "tied")
    )  # type: ignore[arg-type]
    assert free.trace.losses == tied.trace.losses


def test_the_first_word_is_read_off_its_embedding_and_the_others_off_their_labels(
    gpt2: Target, observe: Observe
) -> None:
    rows = rows_of(gpt2, observe)
    shown, predicted = int(rows.words[3]), int(rows.words[7])
    numbers = torch.zeros(*rows.mask.shape, rows.width, dtype=gpt2.dtype)
    numbers[..., : gpt2.hidden_size] = gpt2.embed(torch.tensor([shown]))
    numbers[..., gpt2.hidden_size + predicted] = 1.0
    numbers[..., gpt2.hidden_size + gpt2.vocabulary.pad] = 2.0  # larger, but no word
    long, short = nearest_tokens(rows, numbers)[:, 0].tolist()
    assert long == [shown] + 8 * [predicted]
    assert short == [shown] + 4 * [predicted] + 4 * [gpt2.vocabulary.pad]


def test_the_labels_of_special_tokens_are_certain(observe: Observe) -> None:
    # A token begins every text
    llama = TinyCausal(shape="llama").open(torch.device("cpu"), torch.float64)
    rows = rows_of(llama, observe)
    numbers = torch.where(
        rows.fixed[..., None], rows.special_numbers(), torch.zeros((), dtype=llama.dtype)
    )
    batch = rows.batch(numbers[:, None])
    first, second = batch.labels[0, 0, 0, :2]
    assert first.argmax() == llama.vocabulary.prefix[0]
    assert float(first.max()) == 1.0 > 2 / llama.classes > float(second.max())
    assert batch.embeddings is not None
    assert torch.equal(
        batch.embeddings[0, 0, 0, 0], llama.embed(torch.tensor(llama.vocabulary.prefix))[0]
    )


def test_a_text_is_guessed_alike_alone_and_in_company(causal: Target, observe: Observe) -> None:
    seen = [observe(causal, [text], index=index) for index, text in enumerate(TEXTS[:2])]
    together = Tag(steps=6).reconstruct(seen, bench_for(causal))
    for observation, shared in zip(seen, together, strict=True):
        alone = Tag(steps=6).reconstruct([observation], bench_for(causal))[0]
        assert alone.sentences == shared.sentences
        assert [loss for _, loss in alone.trace.losses] == pytest.approx(
            [loss for _, loss in shared.trace.losses], rel=1e-6
        )


def test_where_memory_is_short_texts_are_searched_one_after_the_other(
    gpt2: Target, observe: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [observe(gpt2, [text], index=index) for index, text in enumerate(TEXTS)]
    together = Tag(steps=5).reconstruct(seen, bench_for(gpt2))
    searched: list[int] = []

    def noted(problems: list[SearchProblem], *further: bool) -> Rows:
        searched.append(len(problems))
        return lay_out(problems, *further)

    monkeypatch.setattr(loop, "lay_out", noted)
    monkeypatch.setattr(starts, "ROOM", 0.0)
    one_by_one = Tag(steps=5).reconstruct(seen, bench_for(gpt2))
    assert searched == [1, 1, 1]
    assert [guess.sentences for guess in one_by_one] == [guess.sentences for guess in together]


def test_free_labels_are_refused_beside_discrete_rounds() -> None:
    with pytest.raises(ValueError, match="free labels go with plain descent"):
        replace(LampCos().loop, free_labels=Tag().loop.free_labels)
