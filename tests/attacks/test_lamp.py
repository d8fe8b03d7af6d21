"""LAMP: starts, rounds and the choice of the answer, each on a tiny model."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradleak.attacks.gradient_matching import discrete
from gradleak.attacks.gradient_matching.loop import Search
from gradleak.attacks.gradient_matching.starts import OneGaussian, TwoStep
from gradleak.attacks.recipes.lamp import LampCos, LampL2L1, LampPlus
from gradleak.attacks.search.likelihood import compute_nll
from gradleak.attacks.search.search_rows import group_problems, lay_out
from gradleak.core.attack import Attack, Bench, Reconstruction
from gradleak.core.defense import Channel
from gradleak.core.observation import Observation
from gradleak.core.prior import Prior
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.priors.english import FrequentWords

TEXTS = (
    "my phone number is five five zero one .",
    "the cat is red .",
    "she never paid the bank again soon",
)
Observe = Callable[..., Observation]
SMALL = LampCos(steps=20, starts=8)


def bench_for(target: Target) -> Bench:
    return Bench(Streams.root("attacker", 3), FrequentWords().open(target))


def search_of(target: Target, observe: Observe, attack: LampCos = SMALL) -> Search:
    seen = [observe(target, [text], [1], index=index) for index, text in enumerate(TEXTS)]
    return Search(
        attack.loop, lay_out(group_problems(seen, attack.loop.assumptions)[0]), bench_for(target)
    )


def distances(search: Search, embeddings: torch.Tensor) -> torch.Tensor:
    framed = torch.where(search.rows.fixed[..., None], search.frame, embeddings)
    return search.scorer.matcher.distances(search.rows.batch(framed[:, None]))[:, 0]


def test_more_starts_begin_nearer(tiny64: Target, observe: Observe) -> None:
    search = search_of(tiny64, observe)
    one = distances(search, OneGaussian().draw(search.rows, search.bench, search.scorer.matcher))
    many = distances(search, TwoStep(100).draw(search.rows, search.bench, search.scorer.matcher))
    assert bool((many < one).all())


def test_a_start_has_the_size_of_words(tiny64: Target, observe: Observe) -> None:
    search = search_of(tiny64, observe)
    start = TwoStep(4).draw(search.rows, search.bench, search.scorer.matcher)
    free = ~search.rows.fixed
    assert torch.allclose(
        start.norm(dim=-1)[free], torch.full((), tiny64.vocabulary.mean_norm, dtype=torch.float64)
    )


def test_a_round_never_makes_a_row_worse_and_moves_the_moments_too(
    tiny64: Target, observe: Observe
) -> None:
    search = search_of(tiny64, observe, replace(SMALL, prior_weight=0.0))
    rounds = search.loop.discrete
    assert rounds is not None
    state = search.loop.optimiser.begin(search.embeddings)
    # Stands for moments: it must stay beside the words it belongs to
    state.first = search.embeddings.clone()
    before = distances(search, search.embeddings)
    rounds.reorder_words(search.scorer, search.embeddings, state, 0, search.loop.slips)
    assert bool((distances(search, search.embeddings) <= before + 1e-9).all())
    assert bool((distances(search, search.embeddings) < before - 1e-9).any())
    assert torch.equal(state.first, search.embeddings)


def test_the_score_of_an_order_is_that_of_the_reordered_sentence(
    tiny64: Target, observe: Observe
) -> None:
    search = search_of(tiny64, observe)
    ids = torch.zeros_like(search.rows.frame)
    orders = torch.arange(ids.shape[-1]).repeat(len(TEXTS), 2, 1)
    orders[:, 1, [2, 3]] = orders[:, 1, [3, 2]]
    scores = search.scorer.score_orders(search.embeddings, ids, orders, prior_weight=0.0)
    swapped = search.embeddings.clone()
    swapped[:, :, [2, 3]] = swapped[:, :, [3, 2]]
    assert torch.allclose(scores[:, 0], distances(search, search.embeddings))
    assert torch.allclose(scores[:, 1], distances(search, swapped))


def test_the_truth_scores_best_among_guesses(tiny64: Target, observe: Observe) -> None:
    search = search_of(tiny64, observe)
    truth = search.rows.frame.clone()
    for row, problem in enumerate(search.rows.problems):
        ids = tiny64.encode([TEXTS[problem.observation.index]])[0]
        truth[row, 0, : len(ids)] = torch.tensor(ids)
    wrong = torch.where(search.rows.fixed, truth, truth.flip(1) + 1)
    scores = search.scorer.score_tokens(torch.stack([wrong, truth], dim=1), prior_weight=0.0)
    assert bool((scores[:, 1] < 1e-9).all())
    assert bool((scores[:, 0] > 1e-3).all())


class Rising(Prior):
    """Likes sentences whose ids rise: a prior with an opinion on order."""

    def nll(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return (ids[:, 2:] < ids[:, 1:-1]).sum(1) / lengths

    def likely(self, length: int, streams: Streams) -> list[int]:
        return list(range(length))

    def draw(self, lengths: Sequence[int], streams: Sequence[Streams]) -> list[list[int]]:
        return [self.likely(*one) for one in zip(lengths, streams, strict=True)]

    def likely_length(self) -> int:
        return 5


# Past a round, in which this prior insists on another order
OPINIONATED = {"steps": 80, "prior_weight": 100.0}


@pytest.fixture(scope="module")
def full(tiny64: Target, observe: Observe) -> list[Reconstruction]:
    seen = [observe(tiny64, [text], [1], index=index) for index, text in enumerate(TEXTS[:2])]
    return replace(SMALL, **OPINIONATED).reconstruct(
        seen, Bench(Streams.root("attacker", 3), Rising())
    )


@pytest.mark.parametrize(
    "attack",
    [
        SMALL,
        replace(SMALL, distance="l2"),
        replace(SMALL, norm_weight=0.0),
        replace(SMALL, discrete="at_end"),
        replace(SMALL, discrete="none"),
        LampL2L1(steps=20, starts=8),
    ],
    ids=["full", "l2", "no_norm", "at_end", "no_discrete", "l2l1"],
)
def test_every_ablation_runs_and_differs_from_the_full_attack(
    attack: Attack, tiny64: Target, observe: Observe, full: list[Reconstruction]
) -> None:
    seen = [observe(tiny64, [text], [1], index=index) for index, text in enumerate(TEXTS[:2])]
    mine = replace(attack, **OPINIONATED).reconstruct(
        seen, Bench(Streams.root("attacker", 3), Rising())
    )
    assert all(
        len(guess.sentences[0]) == (one.knows.lengths or (0,))[0]
        for guess, one in zip(mine, seen, strict=True)
    )
    same = [guess.loss for guess in mine] == [guess.loss for guess in full]
    assert same is (attack == SMALL)


@pytest.mark.parametrize("relative", [True, False])
def test_relative_weights_are_shares_of_the_distance_of_no_gradient(
    tiny64: Target, observe: Observe, relative: bool
) -> None:
    seen = [
        observe(tiny64, [text], [label], index=index)
        for index, (text, label) in enumerate(zip(TEXTS[:2], (0, 1), strict=True))
    ]
    loop = LampL2L1(steps=1, starts=2, l1_weight=0.5, relative=relative).loop
    search = Search(
        loop,
        lay_out(group_problems(seen, loop.assumptions)[0]),
        Bench(Streams.root("a", 0), Rising()),
    )
    entries = [
        torch.cat([one.flatten() for one in observation.update.tensors.values()])
        for observation in seen
    ]
    sizes = torch.stack([flat.square().sum() + 0.5 * flat.abs().sum() for flat in entries])
    torch.testing.assert_close(search.scorer.unit, sizes if relative else torch.ones_like(sizes))
    ids = search.answers[:, None]
    heavy, light = (search.scorer.score_tokens(ids, weight) for weight in (3.0, 0.0))
    torch.testing.assert_close(
        heavy - light,
        3.0 * search.scorer.unit[:, None] * compute_nll(search.bench, search.rows, ids),
    )


def test_a_record_from_before_has_weights_as_numbers() -> None:
    assert LampL2L1().before(Channel()) == {"relative": False}


def test_a_heavy_prior_decides_the_order_and_none_does_not(
    tiny64: Target, observe: Observe
) -> None:
    seen = [observe(tiny64, [TEXTS[0]], [1])]
    bench = Bench(Streams.root("attacker", 3), Rising())
    falls = []
    for weight in (0.0, 1000.0):
        ids = (
            replace(SMALL, steps=160, prior_weight=weight)
            .reconstruct(seen, bench)[0]
            .sentences[0][1:-1]
        )
        falls.append(sum(first > second for first, second in itertools.pairwise(ids)))
    assert falls[1] < falls[0]


def test_lamp_alone_and_in_company_give_the_same_tokens_in_float64(
    tiny64: Target, observe: Observe
) -> None:
    seen = [observe(tiny64, [text], [1], index=index) for index, text in enumerate(TEXTS[:2])]
    attack = replace(SMALL, steps=80)
    together = attack.reconstruct(seen, bench_for(tiny64))
    alone = [attack.reconstruct([one], bench_for(tiny64))[0] for one in seen]
    assert [guess.sentences for guess in together] == [guess.sentences for guess in alone]


def test_a_last_search_over_words_gives_the_same_alone_and_in_company(
    tiny64: Target, observe: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    # words; the promise does not depend on how many are tried
    monkeypatch.setattr(discrete, "MANY", 8)
    monkeypatch.setattr(discrete, "NEAREST", 2)
    seen = [
        observe(tiny64, texts, index=index)
        for index, texts in enumerate([("she left", "my cat"), ("the bank", "we paid")])
    ]
    attack = LampPlus(steps=3, starts=2, polish_rounds=1, word_sweeps=1, word_restarts=0)
    together = attack.reconstruct(seen, bench_for(tiny64))
    alone = [attack.reconstruct([one], bench_for(tiny64))[0] for one in seen]
    assert [guess.sentences for guess in together] == [guess.sentences for guess in alone]


def test_a_batch_is_reordered_sentence_by_sentence(tiny64: Target, observe: Observe) -> None:
    seen = observe(tiny64, TEXTS[:2], [0, 1])
    guess = replace(SMALL, steps=80).reconstruct([seen], bench_for(tiny64))[0]
    assert [len(sentence) for sentence in guess.sentences] == list(seen.knows.lengths or ())
