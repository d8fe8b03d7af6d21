"""Matching what a defense left: the fast form against the plain one, closed forms, and that the
truth fits best."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gradleak.core.batch import Batch, PrivateBatch
from gradleak.core.defense import Defense
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.target import Target
from gradleak.defenses.clipping_and_noise import Clipping, GaussianNoise
from gradleak.defenses.differential_privacy import DpSgd
from gradleak.defenses.few_bits import Quantisation, Sign
from gradleak.defenses.sparsification import Masking, Pruning, TopK
from gradleak.matching import L2L1, Cosine, Distance, SquaredL2, for_observations
from gradleak.matching.distances import WrongSigns, WrongSignSquares
from gradleak.matching.factored import FactoredMatcher
from gradleak.matching.terms import Sparse

TEXTS = ("the cat is red .", "my phone number is five .")
OTHER = ("we owes the bank .", "she left")
EQUAL = (("the cat is red .", "my dog was bad !"), ("he paid our doctor ?", "i saw the car soon"))
CHAINS: list[tuple[Defense, ...]] = [
    (Pruning(0.2),),
    (TopK(0.1),),
    (Pruning(0.01),),
    (Pruning(0.01, "update"),),  # of some tensors nothing is left
    (Masking(0.98),),
    (Masking(0.5),),
    (Sign(),),
    (GaussianNoise(0.01),),
    (Clipping(0.1),),
    (Quantisation(),),
    (Pruning(0.2), Quantisation()),
    (GaussianNoise(0.01), Pruning(0.2), Clipping(0.1)),
]
DISTANCES = [Cosine(), SquaredL2(), L2L1()]
LOSSLESS = [
    (Pruning(0.2),),
    (Pruning(0.01, "update"),),
    (TopK(0.1),),
    (Masking(0.5),),
    (Sign(),),
    (Clipping(0.1),),
]  # the truth fits what is left exactly

Observe = Callable[..., Observation]
Axes = Callable[[Batch, int], Batch]
Private = Callable[..., PrivateBatch]


def differentiable(target: Target, batch: Batch) -> Batch:
    assert batch.ids is not None
    return replace(batch, ids=None, embeddings=target.embed(batch.ids).clone().requires_grad_())


@pytest.mark.parametrize("defenses", CHAINS, ids=repr)
@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
@pytest.mark.parametrize("architecture", ["Bert", "GPT2"])
def test_the_fast_form_agrees_with_the_plain_one_in_value_and_slope(
    random_target: Callable[..., Target],
    observe: Observe,
    make_private: Private,
    add_axes: Axes,
    architecture: str,
    distance: Distance,
    defenses: tuple[Defense, ...],
) -> None:
    target = random_target(architecture, torch.float64)
    texts, others = (TEXTS, OTHER) if architecture == "Bert" else EQUAL
    seen = observe(target, texts, defenses=defenses)
    found = []
    for plain in (False, True):
        batch = differentiable(
            target,
            add_axes(
                make_private(target, others[::-1] if architecture == "Bert" else others).batch, 2
            ),
        )
        matcher = for_observations([seen], distance, plain=plain)
        assert isinstance(matcher, FactoredMatcher) != plain
        distances = matcher.distances(batch)
        found.append(
            (distances.detach(), torch.autograd.grad(distances.sum(), batch.embeddings)[0])
        )
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(
        found[0][1], found[1][1], rtol=1e-6, atol=1e-9 * float(found[1][1].abs().max())
    )


@pytest.mark.parametrize("defenses", LOSSLESS, ids=repr)
@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
def test_the_truth_explains_all_that_is_left_and_the_naive_distance_does_not_see_it(
    tiny64: Target,
    observe: Observe,
    make_private: Private,
    add_axes: Axes,
    distance: Distance,
    defenses: tuple[Defense, ...],
) -> None:
    seen, truth = (
        observe(tiny64, TEXTS, defenses=defenses),
        add_axes(make_private(tiny64, TEXTS).batch, 2),
    )
    adaptive, naive = (
        float(for_observations([seen], distance, adaptive=one).distances(truth))
        for one in (True, False)
    )
    assert abs(adaptive) < 1e-9
    # Which never looked at sizes
    if not (isinstance(defenses[0], Clipping) and distance == Cosine()):
        assert naive > 1e-4


def by_hand(
    seen: Observation, batch: Batch, names: tuple[str, ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of a batch and what was seen, tensor by tensor."""
    gradients = seen.simulate_undefended(batch, []).tensors
    return [(gradients[name].flatten(), seen.update.tensors[name].flatten()) for name in names]


def test_cosine_over_survivors_and_shares_of_wrong_signs_are_what_they_say(
    tiny64: Target, observe: Observe, make_private: Private, add_axes: Axes
) -> None:
    other = make_private(tiny64, OTHER).batch
    pruned, signs = (
        observe(tiny64, TEXTS, defenses=(Pruning(0.1),)),
        observe(tiny64, TEXTS, defenses=(Sign(),)),
    )
    matcher = for_observations([pruned], Cosine())
    pairs = by_hand(pruned, add_axes(other, 1), matcher.names)
    slow = torch.stack(
        [
            1 - torch.cosine_similarity(mine[seen != 0], seen[seen != 0], dim=0)
            for mine, seen in pairs
        ]
    ).mean()
    torch.testing.assert_close(matcher.distances(add_axes(other, 2))[0, 0], slow)
    for distance in (Cosine(), L2L1()):
        matcher = for_observations([signs], distance)
        hinges = [
            ((-mine * seen).clamp_min(0), mine)
            for mine, seen in by_hand(signs, add_axes(other, 1), matcher.names)
        ]
        if distance == Cosine():
            assert matcher.distance == WrongSigns()
            slow = torch.stack(
                [hinge.square().sum() / mine.square().sum() for hinge, mine in hinges]
            ).mean()
        else:
            assert matcher.distance == WrongSignSquares()
            # As many as there are signs
            sizes = [signs.update.tensors[name].abs().sum() for name in matcher.names]
            slow = sum(
                n * hinge.square().sum() / mine.square().sum()
                for n, (hinge, mine) in zip(sizes, hinges, strict=True)
            )
        torch.testing.assert_close(matcher.distances(add_axes(other, 2))[0, 0], slow)


@pytest.mark.parametrize("distance", [Cosine(), SquaredL2()], ids=repr)
def test_with_the_noise_taken_off_the_truth_is_at_zero_in_the_mean(
    tiny64: Target, observe: Observe, make_private: Private, add_axes: Axes, distance: Distance
) -> None:
    truth = add_axes(make_private(tiny64, TEXTS).batch, 2)
    seen = [
        observe(tiny64, TEXTS, index=place, defenses=(GaussianNoise(0.02),)) for place in range(8)
    ]
    adaptive, naive = (
        torch.stack(
            [for_observations([one], distance, adaptive=how).distances(truth)[0, 0] for one in seen]
        )
        for how in (True, False)
    )
    assert abs(float(adaptive.mean())) < 0.1 * float(naive.mean())


def test_little_noise_leaves_the_mean_of_cosines(
    tiny64: Target, observe: Observe, make_private: Private, add_axes: Axes
) -> None:
    other = add_axes(make_private(tiny64, OTHER).batch, 2)
    clear, noisy = (
        for_observations([observe(tiny64, TEXTS, defenses=how)], Cosine())
        for how in ((), (GaussianNoise(1e-9),))
    )
    torch.testing.assert_close(noisy.distances(other), clear.distances(other), rtol=1e-4, atol=0)


def test_under_noise_tensors_weigh_by_what_is_sure_of_them(
    tiny64: Target, observe: Observe
) -> None:
    seen = observe(tiny64, TEXTS, defenses=(GaussianNoise(0.3),))
    matcher = for_observations([seen], Cosine())
    signal = {
        name: tensor.square().sum()
        for name, tensor in observe(tiny64, TEXTS).update.tensors.items()
    }
    loudest, faintest = (
        max(matcher.names, key=signal.__getitem__),
        min(matcher.names, key=signal.__getitem__),
    )
    weights = dict(zip(matcher.names, matcher.weights[0].tolist(), strict=True))
    assert weights[loudest] > 10 * weights[faintest]


def test_of_drowned_tensors_the_signal_is_taken_to_be_as_usual(
    tiny64: Target, observe: Observe
) -> None:
    seen = observe(tiny64, TEXTS, defenses=(GaussianNoise(0.05),))
    matcher = for_observations([seen], Cosine())
    signal = torch.stack(
        [observe(tiny64, TEXTS).update.tensors[name].square().sum() for name in matcher.names]
    )
    guessed, naive = (
        matcher.signal_squared[0],
        (matcher.observed_squared - matcher.noise_squared)[0],
    )
    errors = [
        ((one.clamp_min(1e-12) / signal).log()[signal > 0].square().mean())
        for one in (guessed, naive)
    ]
    assert float(errors[0]) < 0.5 * float(errors[1])


def test_what_rounding_at_random_adds_is_told_from_what_is_seen(
    tiny64: Target, observe: Observe
) -> None:
    seen = [
        observe(tiny64, TEXTS, index=place, defenses=(Quantisation(bits=2),)) for place in range(4)
    ]
    matcher = for_observations(seen, Cosine())
    signal = torch.stack(
        [observe(tiny64, TEXTS).update.tensors[name].square().sum() for name in matcher.names]
    )
    added = (matcher.observed_squared - signal).mean(0)
    large = matcher.observed_squared.mean(0) > 0.05 * float(matcher.observed_squared.mean(0).max())
    ratios = matcher.noise_squared.mean(0)[large] / added[large]
    assert 0.5 < float(ratios.median()) < 2
    fine = for_observations([observe(tiny64, TEXTS, defenses=(Quantisation(bits=16),))], Cosine())
    assert (
        float(fine.weights[fine.weights > 0].min())
        > 0.99
        > 0.9
        > float(matcher.weights[matcher.weights > 0].min())
    )


def test_of_pruned_tensors_only_what_is_left_was_rounded(tiny64: Target, observe: Observe) -> None:
    chain = (Pruning(0.01), Quantisation(bits=16))
    matcher = for_observations([observe(tiny64, TEXTS, defenses=chain)], Cosine())
    assert float(matcher.weights[matcher.weights > 0].min()) > 0.99


def test_noise_of_a_batch_is_shared_by_its_examples(tiny64: Target, observe: Observe) -> None:
    alone, both = (
        observe(tiny64, texts, defenses=(DpSgd(clip=1.0, noise_multiplier=0.1),))
        for texts in (TEXTS[:1], TEXTS)
    )
    one, two = (for_observations([seen], Cosine()).noise_squared for seen in (alone, both))
    torch.testing.assert_close(one, 4 * two)


@pytest.mark.parametrize("defenses", CHAINS, ids=repr)
def test_the_naive_attack_is_the_attack_of_one_who_knows_of_no_defense(
    tiny64: Target,
    observe: Observe,
    make_private: Private,
    add_axes: Axes,
    defenses: tuple[Defense, ...],
) -> None:
    other, seen = (
        add_axes(make_private(tiny64, OTHER).batch, 2),
        observe(tiny64, TEXTS, defenses=defenses),
    )
    unaware = seen.limit_to(set(Fact) - {Fact.DEFENSE})
    naive, ignorant = (
        for_observations([one], Cosine(), adaptive=how)
        for one, how in ((seen, False), (unaware, True))
    )
    assert torch.equal(naive.distances(other), ignorant.distances(other))


def test_where_few_entries_are_left_only_these_are_computed(
    tiny64: Target, observe: Observe
) -> None:
    few, many = (
        for_observations([observe(tiny64, defenses=(how,))], Cosine())
        for how in (Pruning(0.01), Pruning(0.5))
    )
    assert isinstance(few, FactoredMatcher)
    assert isinstance(many, FactoredMatcher)
    assert any(isinstance(one, Sparse) for one in few.observed)
    assert not any(isinstance(one, Sparse) for one in many.observed)


def test_updates_under_different_defenses_are_not_read_alike(
    tiny64: Target, observe: Observe
) -> None:
    with pytest.raises(GradleakError, match="different kinds of defenses"):
        for_observations([observe(tiny64), observe(tiny64, defenses=(Sign(),))], Cosine())
