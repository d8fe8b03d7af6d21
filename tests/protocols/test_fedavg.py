"""Local training by laws: one step is FedSGD, PyTorch's optimisers agree, slopes go through,
order is the client's own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradleak.audit import AuditSpec
from gradleak.core.batch import Batch, PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching import Cosine, SquaredL2, for_observations
from gradleak.matching.factored import FactoredMatcher
from gradleak.matching.matcher import SimulatedMatcher, structurally_silent
from gradleak.protocols.fedavg import FedAvg
from gradleak.protocols.fedsgd import FedSGD

TEXTS = ("the cat is red .", "my phone number is five .", "she left", "we owes the bank .")
OTHER = ("he paid our doctor ?", "i saw the car soon", "my dog was bad !", "she left")
OPTIMISERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.01),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9),
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.01),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.01),
}

Axes = Callable[[Batch, int], Batch]


@pytest.fixture
def batch(tiny64: Target, make_private: Callable[..., PrivateBatch], add_axes: Axes) -> Batch:
    return add_axes(make_private(tiny64, TEXTS).batch, 1)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], rtol: float = 1e-9) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=rtol, atol=1e-13)


def test_one_step_of_sgd_is_fedsgd_times_the_learning_rate(tiny64: Target, batch: Batch) -> None:
    protocol = FedAvg(learning_rate=0.1)
    gradients = FedSGD().update(tiny64, batch).tensors
    same(
        protocol.update(tiny64, batch).tensors,
        {name: 0.1 * tensor for name, tensor in gradients.items()},
    )
    assert protocol.gradient_scale(4) == 0.1


@pytest.mark.parametrize("optimiser", list(OPTIMISERS))
def test_local_training_is_what_pytorch_does(tiny64: Target, batch: Batch, optimiser: Any) -> None:
    weights = {
        name: value.detach().clone().requires_grad_() for name, value in tiny64.parameters.items()
    }
    theirs = OPTIMISERS[optimiser](list(weights.values()))
    for places in (slice(0, 2), slice(2, 4), slice(0, 2)):
        theirs.zero_grad()
        tiny64.losses(batch[0][places], weights).mean().backward()
        # PyTorch skips what has no gradient, and would not decay it
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        theirs.step()
    moved = (
        FedAvg(steps=3, local_batch_size=2, learning_rate=0.01, optimiser=optimiser)
        .update(tiny64, batch)
        .tensors
    )
    silent = structurally_silent(tiny64)  # Adam makes whole steps of their rounding errors
    kept = {
        name: value - weights[name].detach()
        for name, value in tiny64.parameters.items()
        if name not in silent
    }
    same(kept, {name: tensor[0] for name, tensor in moved.items()}, 1e-5)


def test_the_target_is_left_as_it_was(tiny64: Target, batch: Batch) -> None:
    before = {name: value.clone() for name, value in tiny64.parameters.items()}
    FedAvg(epochs=2, learning_rate=0.1).update(tiny64, batch)
    assert all(
        torch.equal(value, before[name]) and not value.requires_grad
        for name, value in tiny64.parameters.items()
    )


@pytest.mark.parametrize(
    ("protocol", "steps"),
    [(FedAvg(epochs=3), 3), (FedAvg(local_batch_size=1, epochs=2), 8), (FedAvg(steps=5), 5)],
)
def test_steps_are_counted_over_passes_and_batches(protocol: FedAvg, steps: int) -> None:
    assert protocol.gradient_scale(4) == pytest.approx(steps * protocol.learning_rate)


def test_a_client_s_order_is_its_own_and_a_whole_batch_has_none(
    tiny64: Target, batch: Batch
) -> None:
    apart, whole = (
        FedAvg(local_batch_size=1, learning_rate=0.1),
        FedAvg(epochs=2, learning_rate=0.1),
    )
    first, second = ([Streams.root("client", seed)] for seed in (0, 1))
    moved = [
        apart.update(tiny64, batch, rngs=rngs).tensors["classifier.weight"]
        for rngs in (first, first, second)
    ]
    assert torch.equal(moved[0], moved[1]) and not torch.allclose(moved[0], moved[2], rtol=1e-6)
    same(
        whole.update(tiny64, batch, rngs=first).tensors,
        whole.update(tiny64, batch, rngs=second).tensors,
        rtol=1e-7,
    )


def test_a_mean_over_clients_of_one_step_each_is_one_batch_of_all(
    tiny64: Target, batch: Batch
) -> None:
    same(
        FedAvg(clients=2, learning_rate=0.1).update(tiny64, batch).tensors,
        FedAvg(learning_rate=0.1).update(tiny64, batch).tensors,
    )
    with pytest.raises(GradleakError, match="cannot be dealt out evenly among 3 clients"):
        FedAvg(clients=3).update(tiny64, batch)


# Adam is no smooth function of gradients near zero
@pytest.mark.parametrize("optimiser", ["sgd", "momentum"])
def test_slopes_go_through_every_local_step(
    tiny64: Target,
    make_private: Callable[..., PrivateBatch],
    observe: Callable[..., Observation],
    add_axes: Axes,
    optimiser: Any,
) -> None:
    protocol = FedAvg(local_batch_size=2, epochs=2, learning_rate=0.02, optimiser=optimiser)
    matcher = for_observations([observe(tiny64, TEXTS, protocol=protocol)], SquaredL2())
    ids = make_private(tiny64, OTHER).batch
    embeddings = tiny64.embed(ids.ids).clone()

    def distance(values: torch.Tensor) -> torch.Tensor:
        return matcher.distances(add_axes(replace(ids, ids=None, embeddings=values), 2))[0, 0]

    leaf = embeddings.clone().requires_grad_()
    (slope,) = torch.autograd.grad(distance(leaf), leaf)
    direction = torch.randn(
        embeddings.shape, generator=Streams.root("test", 0).generator(), dtype=torch.float64
    )
    direction *= ids.mask[..., None]
    with torch.no_grad():
        numeric = (
            distance(embeddings + 1e-6 * direction) - distance(embeddings - 1e-6 * direction)
        ) / 2e-6
    torch.testing.assert_close((slope * direction).sum(), numeric, rtol=2e-4, atol=1e-7)


def test_slopes_through_adam_are_finite_where_words_do_not_occur(
    tiny64: Target,
    make_private: Callable[..., PrivateBatch],
    observe: Callable[..., Observation],
    add_axes: Axes,
) -> None:
    seen = observe(tiny64, TEXTS, protocol=FedAvg(epochs=2, optimiser="adam"))
    ids = make_private(tiny64, OTHER).batch
    leaf = tiny64.embed(ids.ids).clone().requires_grad_()
    distances = for_observations([seen], Cosine()).distances(
        add_axes(replace(ids, ids=None, embeddings=leaf), 2)
    )
    assert bool(torch.autograd.grad(distances.sum(), leaf)[0].isfinite().all())


def test_unrolled_the_truth_is_at_zero_and_averaged_it_is_near(
    tiny64: Target,
    make_private: Callable[..., PrivateBatch],
    observe: Callable[..., Observation],
    add_axes: Axes,
) -> None:
    seen = observe(tiny64, TEXTS, protocol=FedAvg(epochs=4, learning_rate=1e-3))
    truth, other = (add_axes(make_private(tiny64, texts).batch, 2) for texts in (TEXTS, OTHER))
    unrolled, averaged = (for_observations([seen], Cosine(), unroll=how) for how in (True, False))
    assert isinstance(unrolled, SimulatedMatcher) and isinstance(averaged, FactoredMatcher)
    assert (
        abs(float(unrolled.distances(truth)))
        < 1e-9
        < float(averaged.distances(truth))
        < 0.2 * float(averaged.distances(other))
    )


def test_an_averaged_step_of_adam_is_read_by_its_signs(
    tiny64: Target,
    make_private: Callable[..., PrivateBatch],
    observe: Callable[..., Observation],
    add_axes: Axes,
) -> None:
    seen = observe(tiny64, TEXTS, protocol=FedAvg(learning_rate=1e-3, optimiser="adam"))
    truth = add_axes(make_private(tiny64, TEXTS).batch, 2)
    by_signs, by_sizes = (
        for_observations([seen], Cosine(), unroll=False, adaptive=how) for how in (True, False)
    )
    assert abs(float(by_signs.distances(truth))) < 1e-9 < 0.1 < float(by_sizes.distances(truth))


def test_an_averaged_update_has_the_size_of_a_gradient(
    tiny64: Target, observe: Callable[..., Observation]
) -> None:
    plain, moved = (
        observe(tiny64, TEXTS, protocol=one)
        for one in (FedSGD(), FedAvg(epochs=3, learning_rate=1e-6))
    )
    ours, theirs = (
        for_observations([one], SquaredL2(), unroll=False).observed_squared
        for one in (moved, plain)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-12)


def test_dp_sgd_on_weight_differences_is_refused_with_a_way_out() -> None:
    with pytest.raises(
        GradleakError, match="fedavg sends none: use --protocol fedsgd, or --defense client_dp"
    ):
        AuditSpec.from_plain({"target": "tiny", "protocol": "fedavg", "defenses": ["dp_sgd"]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fedavg:epochs=0", "epochs counts from 1"),
        ("fedavg:learning_rate=0", "learning_rate must be"),
    ],
)
def test_senseless_schedules_are_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(GradleakError, match=message):
        AuditSpec.from_plain({"target": "tiny", "protocol": line})
