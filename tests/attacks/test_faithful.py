"""`faithful=true` puts LAMP's oversights back, each where it says; restarts go to what failed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradleak.attacks.gradient_matching.discrete import (
    MENDED,
    RELEASED,
    CandidateScorer,
    DiscreteRounds,
    Slips,
)
from gradleak.attacks.gradient_matching.loop import Search
from gradleak.attacks.recipes.lamp import LampCos, LampPlus
from gradleak.attacks.search.changes import draw_orders
from gradleak.attacks.search.search_rows import Rows, group_problems, lay_out, nearest_tokens
from gradleak.core.attack import Bench
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching import Cosine, for_observations
from gradleak.priors.english import FrequentWords

BATCH = ["my phone number is five five zero one .", "the cat is red ."]
Observe = Callable[..., Observation]
Losses = tuple[tuple[int, float], ...]
ATTACK = LampCos(steps=100, starts=4, prior_weight=0.0)


@pytest.fixture(scope="module")
def seen(tiny64: Target, observe: Observe) -> Observation:
    return observe(tiny64, BATCH, [1, 0])


def bench_for(target: Target) -> Bench:
    return Bench(Streams.root("attacker", 3), FrequentWords().open(target))


def rows_of(seen: Observation, specials_inside: bool = False) -> Rows:
    return lay_out(group_problems([seen], ATTACK.loop.assumptions)[0], specials_inside)


def test_faithful_is_every_slip_and_the_answer_of_the_lowest_loss() -> None:
    assert LampCos().loop.slips == MENDED
    faithful = LampCos(faithful=True).loop
    assert faithful.slips == RELEASED
    assert faithful.answer_by_prior is None
    assert all(vars(RELEASED).values())


def losses_with(slips: Slips, seen: Observation) -> Losses:
    return (
        replace(ATTACK.loop, slips=slips)
        .reconstruct([seen], bench_for(seen.target))[0]
        .trace.losses
    )


@pytest.fixture(scope="module")
def without(seen: Observation) -> Losses:
    return losses_with(MENDED, seen)


@pytest.mark.parametrize("slip", ["silent_tensors", "moments_stay", "padding_in_penalty"])
def test_every_slip_changes_the_search_of_a_batch(
    slip: str, seen: Observation, without: Losses
) -> None:
    assert losses_with(Slips(**{slip: True}), seen) != without


@pytest.mark.parametrize("stale", [False, True])
def test_a_stale_round_leaves_a_sentence_that_does_not_beat_the_one_before(
    stale: bool, seen: Observation, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowest = iter([0.1, 0.5])  # of the first sentence's candidates, then of the second's

    def scores(
        scorer: CandidateScorer,
        embeddings: Tensor,
        ids: Tensor,
        orders: Tensor,
        prior_weight: float,
    ) -> Tensor:
        made = torch.ones(orders.shape[:2], dtype=torch.float64)
        made[:, 1] = next(lowest)
        return made

    monkeypatch.setattr(CandidateScorer, "score_orders", scores)
    search = Search(
        replace(ATTACK.loop, slips=Slips(stale_rounds=stale)), rows_of(seen), bench_for(seen.target)
    )
    before = search.embeddings.clone()
    state = search.loop.optimiser.begin(search.embeddings)
    DiscreteRounds().reorder_words(search.scorer, search.embeddings, state, 0, search.loop.slips)
    moved = [not torch.equal(search.embeddings[0, place], before[0, place]) for place in range(2)]
    assert moved == [True, not stale]


def test_silent_tensors_count_only_when_asked(seen: Observation) -> None:
    names = [name for name in seen.update.tensors if name.endswith("key.bias")]
    assert names
    assert not set(names) & set(for_observations([seen], Cosine()).names)
    kept = for_observations([seen], Cosine(), keep_silent=True)
    assert set(names) <= set(kept.names)
    assert bool((kept.weights[0, [kept.names.index(name) for name in names]] == 1).all())


def test_specials_are_guessed_inside_only_when_asked(seen: Observation) -> None:
    mask = next(
        number
        for number in seen.target.vocabulary.specials
        if seen.target.decode([number], keep_special=True) == "[MASK]"
    )
    for inside in (False, True):
        rows = rows_of(seen, inside)
        guess = nearest_tokens(rows, rows.target.embed(torch.full_like(rows.frame, mask)))
        assert bool((guess[0, 0, 2] == mask) == inside)


def test_an_order_reaches_into_the_padding_only_when_asked(seen: Observation) -> None:
    rows = rows_of(seen)
    width, short = rows.mask.shape[-1], rows.problems[0].hypothesis.lengths[1]
    padding = slice(width + short - 1, 2 * width)
    for padded in (False, True):
        orders = draw_orders(rows, bench_for(seen.target), 50, 0, 1, "round", padded)
        assert bool((orders[0, :, padding] != torch.arange(2 * width)[padding]).any()) == padded


def test_a_restart_is_spent_only_where_the_first_try_failed(
    tiny64: Target, observe: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[list[int]] = []
    run = Search.run

    def counted(search: Search) -> None:
        tries.append(sorted(problem.observation.index for problem in search.rows.problems))
        run(search)
        if len(tries) == 1:
            search.judged = torch.tensor(
                [0.0 if problem.observation.index == 0 else 1.0 for problem in search.rows.problems]
            )

    monkeypatch.setattr(Search, "run", counted)
    both = [observe(tiny64, [text], [1], index=index) for index, text in enumerate(BATCH)]
    guesses = LampPlus(steps=3, starts=2, polish_rounds=1, word_sweeps=0, restarts=1).reconstruct(
        both, bench_for(tiny64)
    )
    assert tries == [[0, 1], [1]]
    assert [guess.cost.steps for guess in guesses] == [3, 6]
