"""The last search on whole words."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradleak.attacks.gradient_matching.discrete import Polish
from gradleak.attacks.gradient_matching.loop import Search
from gradleak.attacks.recipes.lamp import LampPlus
from gradleak.attacks.search.search_rows import group_problems, lay_out
from gradleak.core.attack import Bench
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.priors.english import FrequentWords

TEXTS = ("my phone number is five zero one .", "she never paid the bank again")
Observe = Callable[..., Observation]
POLISH = Polish(rounds=25, orders=60, substitutions=30, prior_weight=0.0)


@pytest.fixture
def search(tiny64: Target, observe: Observe) -> Search:
    seen = [observe(tiny64, [text], [1], index=index) for index, text in enumerate(TEXTS)]
    loop = LampPlus(steps=1, starts=2).loop
    return Search(
        loop,
        lay_out(group_problems(seen, loop.assumptions)[0]),
        Bench(Streams.root("attacker", 3), FrequentWords().open(tiny64)),
    )


def truth(search: Search) -> Tensor:
    ids = search.rows.frame.clone()
    for row, problem in enumerate(search.rows.problems):
        words = search.rows.target.encode([TEXTS[problem.observation.index]])[0]
        ids[row, 0, : len(words)] = torch.tensor(words)
    return ids


def scores(search: Search, ids: Tensor) -> Tensor:
    return search.scorer.score_tokens(ids[:, None], 0.0)[:, 0]


def test_a_sentence_one_move_away_is_put_right(search: Search) -> None:
    moved = truth(search)
    moved[:, 0, [2, 5]] = moved[:, 0, [5, 2]]
    polish = Polish(rounds=3, orders=400, substitutions=10, prior_weight=0.0)
    assert torch.equal(polish.improve(search.ending, moved), truth(search))


def test_a_single_wrong_word_is_exchanged_if_the_right_one_is_near(search: Search) -> None:
    right = truth(search)
    # The continuous search knows the word; the guess does not
    search.best = search.rows.target.embed(right)
    wrong = right.clone()
    wrong[:, 0, 3] = search.rows.target.encode(["asthma"])[0][1]
    polish = Polish(rounds=3, orders=10, substitutions=2000, nearest=1, prior_weight=0.0)
    assert torch.equal(polish.improve(search.ending, wrong), right)


def test_polishing_never_makes_a_guess_worse(search: Search) -> None:
    guess = torch.where(
        search.rows.fixed, search.rows.frame, torch.full_like(search.rows.frame, 20)
    )
    assert bool(
        (
            scores(search, POLISH.improve(search.ending, guess)) <= scores(search, guess) + 1e-12
        ).all()
    )


def test_the_truth_is_left_alone(search: Search) -> None:
    assert torch.equal(POLISH.improve(search.ending, truth(search)), truth(search))
