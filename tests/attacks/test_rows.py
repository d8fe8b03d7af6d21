"""Large batches: words by the rows of embeddings, sentences by the last layer's span."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from gradleak.attacks.portfolio import Portfolio, PortfolioRun
from gradleak.attacks.rows.account import Account
from gradleak.attacks.rows.embedding_rows import read_embedding_rows, share_out
from gradleak.attacks.rows.rows_attack import RowsAttack
from gradleak.attacks.rows.sentence_spaces import open_sentence_spaces
from gradleak.core.attack import Bench, Cost, Reconstruction, Stage
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.priors.english import FrequentWords
from gradleak.protocols.fedavg import FedAvg
from gradleak.views import Lamp, PartsView

Observe = Callable[..., Observation]
# With more tokens than the tiny model is wide (32), and words that stand at several places
TEXTS = (
    "the cat is red .",
    "my phone number is five zero one .",
    "she never paid the bank again",
    "the car was sold soon",
    "he lost my red car",
    "is the doctor late ?",
    "we owe the bank five",
)
LABELS = (1, 0, 0, 1, 1, 0, 1)


def attack(observation: Observation, rows: RowsAttack | None = None) -> Reconstruction:
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(observation.target))
    (found,) = (rows or RowsAttack(rounds=60, climbs=8)).reconstruct([observation], bench)
    return found


def places_of(target: Target, texts: Sequence[str]) -> dict[int, set[int]]:
    places: dict[int, set[int]] = {}
    for sentence in target.encode(texts):
        for place, word in enumerate(sentence):
            places.setdefault(word, set()).add(place)
    return places


@pytest.mark.parametrize("precision", ["tiny", "tiny64"])
def test_every_word_at_one_position_is_placed_and_no_other(
    precision: str, observe: Observe, request: pytest.FixtureRequest
) -> None:
    target = request.getfixturevalue(precision)
    rows = read_embedding_rows(observe(target, TEXTS, LABELS), 64)
    assert rows is not None
    truth = places_of(target, TEXTS)
    assert sorted(rows.words.tolist()) == sorted(truth)
    assert rows.placed == {word: min(at) for word, at in truth.items() if len(at) == 1}
    assert rows.positions == max(map(len, target.encode(TEXTS)))


def test_words_are_placed_by_the_model_that_a_large_batch_would_overfill(
    minilm: Target, observe: Observe
) -> None:
    whose, how = ("my", "our", "his", "her"), ("red", "old", "blue", "new")
    things = ("car", "house", "boat", "lamp")
    texts = [f"{one} {two} {what} ." for one in whose for two in how for what in things]
    texts += ["please wire 4913 to doctor amsel"]
    rows = read_embedding_rows(observe(minilm, texts), 128)
    assert rows is not None
    truth = places_of(minilm, texts)
    assert sum(map(len, minilm.encode(texts))) > 384
    assert {w: p for w, p in rows.placed.items() if len(truth[w]) > 1} == {}
    assert all(rows.placed.get(word) == min(at) for word, at in truth.items() if len(at) == 1)


def test_shares_are_those_that_the_rows_of_positions_are_made_with() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(12, 40, generator=generator, dtype=torch.float64)
    words *= torch.logspace(0, 2, 12, dtype=torch.float64)[:, None]  # of very different sizes
    shares = torch.rand(12, 5, generator=generator, dtype=torch.float64)
    shares /= shares.sum(1, keepdim=True)
    found = share_out(words, shares.mT @ words)
    assert bool((found >= 0).all())
    torch.testing.assert_close(found.sum(1), torch.ones(12, dtype=torch.float64))
    torch.testing.assert_close(found, shares, atol=0.02, rtol=0)


def test_true_sentences_alone_lie_in_the_spans(tiny: Target, observe: Observe) -> None:
    spaces = open_sentence_spaces(observe(tiny, TEXTS, LABELS))
    assert spaces is not None and spaces.rank == len(TEXTS) and not spaces.at_end
    true = [tuple(one) for one in tiny.encode(TEXTS)]
    wrong = [(*one[:2], *one[3:]) for one in true]
    assert all(spaces.hold(true)) and not any(spaces.hold(wrong))
    assert float(spaces.score(true).max()) < -3 < float(spaces.score(wrong).min())


def test_a_sentence_taken_out_leaves_the_update_of_the_others(
    tiny64: Target, observe: Observe
) -> None:
    seen = observe(tiny64, (*TEXTS, TEXTS[1]), (*LABELS, LABELS[1]))
    spaces, rows = open_sentence_spaces(seen), read_embedding_rows(seen, 64)
    assert spaces is not None
    account = Account(seen, spaces, rows)
    twice, once = (tuple(tiny64.encode([TEXTS[place]])[0]) for place in (1, 2))
    assert account.take_out(twice) == (LABELS[1], 2)
    assert account.take_out(once) == (LABELS[2], 1)
    rest = [text for place, text in enumerate(TEXTS) if place not in (1, 2)]
    left = account.rows
    assert left is not None
    kept = {
        word
        for word, is_kept in zip(left.words.tolist(), left.kept.tolist(), strict=True)
        if is_kept
    }
    assert kept == set(places_of(tiny64, rest))
    assert account.spaces.rank == len(rest)
    assert account.take_out(tuple(tiny64.encode(["the cat is late ."])[0])) is None


@pytest.mark.parametrize("batch_size", [len(TEXTS), None])
def test_it_finds_every_sentence_and_its_label(
    tiny64: Target, observe: Observe, batch_size: int | None
) -> None:
    seen = observe(tiny64, TEXTS, LABELS)
    knows = replace(seen.knows.limit_to(()), batch_size=batch_size)
    found = attack(replace(seen, knows=knows))
    assert sorted(found.sentences) == sorted(map(tuple, tiny64.encode(TEXTS)))
    assert found.labels is not None
    truth = dict(zip(map(tuple, tiny64.encode(TEXTS)), LABELS, strict=True))
    assert dict(zip(found.sentences, found.labels, strict=True)) == truth


def test_a_search_that_is_cut_says_how_far_it_came(tiny: Target, observe: Observe) -> None:
    seen = observe(tiny, TEXTS, LABELS)
    found = attack(seen, RowsAttack(rounds=1, climbs=2))
    assert "of 7 different sentences were found" in found.note
    assert not found.certified and len(found.sentences) <= len(TEXTS)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"view": Lamp()}, "this view does not show"),
        ({"view": PartsView(modules=("word_embedding", "position_embedding"))}, "last layer"),
        ({"protocol": FedAvg(steps=2)}, "several local steps"),
        ({"defenses": (GaussianNoise(std=1e-3),)}, "this update is noisy"),
    ],
)
def test_what_it_cannot_read_is_refused_by_name(
    tiny: Target, observe: Observe, how: dict[str, object], said: str
) -> None:
    with pytest.raises(GradleakError, match=said):
        attack(observe(tiny, TEXTS, LABELS, **how))


def test_the_portfolio_ends_with_it_in_large_batches(tiny64: Target, observe: Observe) -> None:
    words = ("red", "late", "lost", "five", "zero", "one", "bad", "sold")
    texts = [f"{who} is {word} ." for who in ("he", "my car") for word in words]
    seen = observe(tiny64, texts)
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(tiny64))
    (guess,) = Portfolio(steps=5, starts=2).reconstruct([seen], bench)
    assert [stage.attack for stage in guess.stages] == ["span", "rows"]
    assert sorted(guess.sentences) == sorted(map(tuple, tiny64.encode(texts)))


def test_what_it_came_to_before_its_time_was_up_is_the_portfolios_guess(
    tiny64: Target, observe: Observe
) -> None:
    seen = observe(tiny64, TEXTS, LABELS)
    span, rows = (Reconstruction((sentence,)) for sentence in ((2, 5, 3), (2, 6, 3)))
    stages = [
        Stage("span", span.sentences, False, Cost()),
        Stage("rows", rows.sentences, False, Cost(), "cut", "Its time was up."),
    ]
    assert PortfolioRun(seen.index, stages, [span, rows]).likeliest is rows
