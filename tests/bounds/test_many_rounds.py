"""Several rounds, batches and runs: what is thin follows exactly, and the rest is what it says."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from oracle import multiply
from rounds import make_likelihood, move

from gradleak.bounds.information import most_success, most_success_of_run
from gradleak.core.defense import Defense, Sampling, protect_in_turn
from gradleak.core.observation import Observation, Round
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.defenses.differential_privacy import DpSgd
from gradleak.matching.noisy_channel import Likelihood, read_channel
from gradleak.protocols.fedsgd import FedSGD

TEXTS = ("the cat is red .", "my dog was bad again !", "a house was red .", "the car .")


def list_words(target: Target, batch, place: int = 0):  # type: ignore[no-untyped-def]
    words = target.vocabulary.allowed.nonzero()[7::9, 0][:5]
    ids = batch.ids[place].repeat(len(words) + 1, 1)
    ids[1:, 2] = words
    return ids


def send(seen: Observation, batch, defenses: tuple[Defense, ...], number: int) -> Update:  # type: ignore[no-untyped-def]
    rngs = [Streams.root("client", number)]
    each = defenses[0].wants_per_example
    sent = FedSGD().update(seen.target, batch[None], per_example=each, rngs=rngs)
    return protect_in_turn(defenses, sent, rngs)


@pytest.mark.parametrize(
    "defenses",
    [(DpSgd(clip=0.7, noise_multiplier=0.3),), (GaussianNoise(std=0.05),)],
    ids=["dp_sgd", "gaussian_noise"],
)
def test_log_likelihoods_of_rounds_are_that_of_their_mean(  # type: ignore[no-untyped-def]
    tiny64: Target, observe, make_private, defenses: tuple[Defense, ...]
) -> None:
    texts, count = TEXTS[:2], 5
    seen = observe(tiny64, texts, defenses=defenses)
    batch = make_private(tiny64, texts).batch
    ids = list_words(tiny64, batch)
    rounds = [send(seen, batch, defenses, number) for number in range(count)]

    def score(update: Update, number: int):  # type: ignore[no-untyped-def]
        one = replace(seen, rounds=(Round(tiny64, update.detached_clone()),))
        channel = read_channel(defenses, FedSGD(), len(texts), number)
        found = Likelihood(one, batch, 0, channel)(ids)
        return found - found[0]

    mean = {
        name: torch.stack([one.tensors[name] for one in rounds]).mean(0)
        for name in rounds[0].tensors
    }
    added = torch.stack([score(one, 1) for one in rounds]).sum(0)
    torch.testing.assert_close(added, score(Update(mean), count), rtol=1e-8, atol=1e-8)


def test_one_of_four_is_one_alone_with_four_times_the_noise(  # type: ignore[no-untyped-def]
    tiny64: Target, observe, make_private
) -> None:
    noise = (GaussianNoise(std=0.02),)
    seen, batch = observe(tiny64, TEXTS, defenses=noise), make_private(tiny64, TEXTS).batch
    ids = list_words(tiny64, batch)
    found = Likelihood(seen, batch, 0, read_channel(noise, FedSGD(), 4))(ids)
    # Who knows the other three takes them off, and has four times the rest
    quiet = FedSGD().update(tiny64, batch[1:][None]).tensors
    alone = {
        name: 4 * tensor - 3 * quiet[name].detach() for name, tensor in seen.update.tensors.items()
    }
    one = replace(seen, rounds=(Round(tiny64, Update(alone)),))
    loud = read_channel((GaussianNoise(std=0.08),), FedSGD(), 1)
    other = Likelihood(one, batch[:1], 0, loud)(ids)
    torch.testing.assert_close(found - found[0], other - other[0], rtol=1e-8, atol=1e-8)


def test_the_benchmark_has_the_kernels_products(tiny64: Target, observe, make_private) -> None:  # type: ignore[no-untyped-def]
    from gradleak.matching.noisy_channel import GradientSums

    seen = observe(tiny64, TEXTS[:1], defenses=(GaussianNoise(std=0.02),))
    batch = make_private(tiny64, TEXTS[:1]).batch
    ids = list_words(tiny64, batch)
    likelihood = Likelihood(seen, batch, 0, read_channel((GaussianNoise(0.1),), FedSGD(), 1))
    candidates = likelihood.candidates(ids)
    sums = GradientSums(tiny64, tuple(tiny64.parameters), needs_whole=True)
    true = sums.cut(FedSGD().update(tiny64, batch[None]).detached_clone())
    noise = {name: torch.randn(tensor.shape).double() for name, tensor in true.items()}
    right = sums(candidates, {"true": true, "noise": noise})
    squares, along_true, along_noise = multiply(sums, candidates, [noise]).sum(0)
    for found, expected in (
        (squares, right.whole),
        (along_true, right.along["true"]),
        (along_noise, right.along["noise"]),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 3.0])
def test_a_run_of_one_step_that_all_take_part_in_is_one_release(noise_multiplier: float) -> None:
    pytest.importorskip("dp_accounting")
    for chance in (0.01, 0.3):
        found = most_success_of_run(chance, Sampling(noise_multiplier, 1.0, 1))
        exact = most_success(chance, 1 / noise_multiplier)
        assert found is not None
        assert exact - 1e-6 <= found <= exact + 1e-3  # rounded to the safe side


def test_more_steps_guarantee_less_and_rarer_ones_more() -> None:
    pytest.importorskip("dp_accounting")

    def guaranteed(rate: float, steps: int) -> float:
        found = most_success_of_run(0.1, Sampling(0.7, rate, steps))
        assert found is not None
        return found

    assert 0.1 <= guaranteed(0.001, 10) < guaranteed(0.001, 1000) < guaranteed(0.05, 1000) <= 1
    # Who takes part in every step gains nothing by not saying so
    assert guaranteed(1.0, 4) == pytest.approx(most_success(0.1, math.sqrt(4) / 0.7), abs=2e-3)


def test_what_no_noise_guarantees_is_nothing() -> None:
    assert most_success_of_run(0.1, Sampling(0.0, 0.1, 10)) == 1.0


def test_what_hardly_any_noise_guarantees_is_little() -> None:
    pytest.importorskip("dp_accounting")
    assert most_success_of_run(0.1, Sampling(1e-6, 0.1, 10)) == 1.0
    assert 0.5 < (most_success_of_run(0.1, Sampling(0.02, 0.1, 10)) or 0.0) <= 1.0
    assert most_success_of_run(0.0, Sampling(1.0, 0.1, 10)) == 0.0


def test_the_benchmark_adds_rounds_as_their_sum() -> None:
    squares, along_true, *noises = torch.rand(7, 12, dtype=torch.float64)
    squares = squares + 0.5
    one_by_one = sum(
        make_likelihood(torch.stack([squares, along_true, noise]), 0.9, 0.2) for noise in noises
    )
    summed = torch.stack([squares, along_true, torch.stack(noises).sum(0)])
    torch.testing.assert_close(make_likelihood(summed, 0.9, 0.2, len(noises)), one_by_one)


def test_the_benchmark_moves_a_model_as_a_server_does(tiny64: Target, make_private) -> None:  # type: ignore[no-untyped-def]
    batch, moving = make_private(tiny64, TEXTS[:1]).batch, copy.deepcopy(tiny64)
    noise = {part.name: torch.randn(part.shape).double() for part in tiny64.parts}
    move(moving, batch, noise, 0.1, 0.5)
    quiet = FedSGD().update(tiny64, batch[None], per_example=True)
    sent = protect_in_turn(
        [DpSgd(clip=1.0, noise_multiplier=0.0)], quiet, [Streams.root("nobody", 0)]
    )
    for part in tiny64.parts:
        before, after = (part.of(one.parameters[part.parameter]) for one in (tiny64, moving))
        gradient = part.of(sent.tensors[part.parameter][0])
        expected = before - 0.5 * (gradient + 0.1 * noise[part.name])
        torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-9)
