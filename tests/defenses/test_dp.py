"""Differential privacy: what leaves is what is accounted for, and ε is what the accountants say."""

import math
import sys
import time
from collections.abc import Callable

import pytest
import torch
from scipy.stats import norm

from gradleak.audit import AuditSpec
from gradleak.audit.client import observe as observe_client
from gradleak.audit.record import guarantee_records
from gradleak.audit.runner import run_audits
from gradleak.core.batch import Batch, PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.defenses.differential_privacy import (
    MOST_POINTS,
    CentralDp,
    ClientDp,
    DpSgd,
    analytic_epsilon,
    opacus_epsilon,
    prv_points,
)
from gradleak.protocols.fedsgd import FedSGD

TEXTS = ["the cat is red .", "my phone number is five five zero one .", "she left"]
RNG = [Streams.root("client", 0)]


def gradients(target: Target, batch: Batch, place: int) -> dict[str, torch.Tensor]:
    """One example's gradient by plain autograd, written out once more."""
    copies = {
        name: value.detach().clone().requires_grad_() for name, value in target.parameters.items()
    }
    loss = target.losses(batch[place : place + 1], copies).sum()
    return dict(
        zip(
            copies,
            torch.autograd.grad(loss, list(copies.values()), materialize_grads=True),
            strict=True,
        )
    )


def per_example(target: Target, batch: Batch, add_axes: Callable[[Batch, int], Batch]) -> Update:
    return FedSGD().update(target, add_axes(batch, 1), per_example=True)


@pytest.fixture
def batch(tiny64: Target, make_private: Callable[..., PrivateBatch]) -> Batch:
    return make_private(tiny64, TEXTS).batch


@pytest.mark.parametrize("clip", [0.5, 2.0])
def test_what_leaves_is_the_mean_of_clipped_gradients_plus_noise(
    tiny64: Target, batch: Batch, add_axes: Callable[[Batch, int], Batch], clip: float
) -> None:
    defense = DpSgd(clip=clip, noise_multiplier=0.7)
    update = per_example(tiny64, batch, add_axes)
    sent, silent = (
        one.protect(update, RNG).tensors
        for one in (defense, DpSgd(clip=clip, noise_multiplier=0.0))
    )
    examples = [gradients(tiny64, batch, place) for place in range(3)]
    norms = [
        math.sqrt(sum(float(tensor.square().sum()) for tensor in example.values()))
        for example in examples
    ]
    assert max(norms) > clip
    for name, tensor in silent.items():
        slow = (
            sum(
                min(1.0, clip / size) * example[name]
                for size, example in zip(norms, examples, strict=True)
            )
            / 3
        )
        torch.testing.assert_close(tensor[0], slow, rtol=1e-9, atol=1e-12)
    noise = torch.cat([(sent[name] - silent[name]).flatten() for name in sent])
    assert float(noise.std()) == pytest.approx(0.7 * clip / 3, rel=0.02)


def test_the_attacker_sees_the_clipped_and_noised_update_and_nothing_before_it(
    tiny64: Target, make_private: Callable[..., PrivateBatch]
) -> None:
    def seen(line: str, seed: int = 0) -> torch.Tensor:
        spec = AuditSpec.from_plain(
            {
                "target": "tiny",
                "defenses": [line],
                "batch_size": 3,
                "dtype": "float64",
                "seed": seed,
            }
        )
        observation = observe_client(spec, tiny64, make_private(tiny64, TEXTS), 0)
        return torch.cat([tensor.flatten() for tensor in observation.update.tensors.values()])

    clipped, noisy, again = (
        seen("dp_sgd:clip=0.1,noise_multiplier=0"),
        seen("dp_sgd:clip=0.1"),
        seen("dp_sgd:clip=0.1", 1),
    )
    assert float(clipped.norm()) <= 0.1 * (1 + 1e-9)
    assert float((noisy - clipped).std()) == pytest.approx(0.1 / 3, rel=0.02)
    # Another seed, other noise
    assert float((noisy - again).std()) == pytest.approx(2**0.5 * 0.1 / 3, rel=0.02)


def test_without_clip_and_noise_it_is_fedsgd(
    tiny64: Target, batch: Batch, add_axes: Callable[[Batch, int], Batch]
) -> None:
    plain = FedSGD().update(tiny64, add_axes(batch, 1)).tensors
    open_wide = DpSgd(clip=math.inf, noise_multiplier=0.0)
    for name, tensor in open_wide.protect(
        per_example(tiny64, batch, add_axes), RNG
    ).tensors.items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-9, atol=1e-14)
    assert open_wide.channel().clear


def test_dp_sgd_refuses_an_aggregated_update(
    tiny64: Target, batch: Batch, add_axes: Callable[[Batch, int], Batch]
) -> None:
    with pytest.raises(GradleakError, match="was given their mean"):
        DpSgd().protect(FedSGD().update(tiny64, add_axes(batch, 1)), RNG)


def test_noise_of_a_sum_shrinks_with_the_batch() -> None:
    channel = DpSgd(clip=2.0, noise_multiplier=3.0).channel()
    assert channel.noisy and channel.noise_std_for(1) == 6.0 and channel.noise_std_for(4) == 1.5


# Accounting


@pytest.mark.parametrize("accountant", ["PRV", "RDP"])
@pytest.mark.parametrize(
    ("noise", "rate", "steps"), [(1.0, 0.01, 1000), (0.8, 0.05, 200), (1.0, 1.0, 1)]
)
def test_epsilon_is_what_opacus_says_after_the_same_steps(
    accountant: str, noise: float, rate: float, steps: int
) -> None:
    create_accountant = pytest.importorskip("opacus.accountants").create_accountant
    theirs = create_accountant(accountant.lower())
    for _ in range(steps):
        theirs.step(noise_multiplier=noise, sample_rate=rate)
    assert opacus_epsilon(accountant, noise, rate, steps, 1e-5) == pytest.approx(
        theirs.get_epsilon(delta=1e-5), abs=1e-3
    )


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
def test_one_release_by_opacus_is_the_analytic_gaussian_mechanism(noise: float) -> None:
    pytest.importorskip("opacus")
    exact = analytic_epsilon(noise, 1e-5)
    assert norm.cdf(0.5 / noise - exact * noise) - math.exp(exact) * norm.cdf(
        -0.5 / noise - exact * noise
    ) == pytest.approx(1e-5)
    prv, rdp = (opacus_epsilon(name, noise, 1.0, 1, 1e-5) for name in ("PRV", "RDP"))
    assert exact <= prv <= exact + 0.011  # an upper bound, by PRV's own tolerance of 0.01
    assert exact < rdp < 1.3 * exact


@pytest.mark.parametrize(
    ("noise", "epsilon"), [(1e-4, 5.00426e7), (0.01, 5430), (1.0, 4.377), (1e9, 0.0)]
)
def test_the_analytic_epsilon_holds_from_hardly_any_noise_to_too_much(
    noise: float, epsilon: float
) -> None:
    assert analytic_epsilon(noise, 1e-5) == pytest.approx(epsilon, rel=2e-3)


def test_without_noise_there_is_no_guarantee() -> None:
    assert all(one.epsilon == math.inf for one in DpSgd(noise_multiplier=0.0).guarantees())


@pytest.mark.parametrize("defense", [DpSgd(), ClientDp(), CentralDp()], ids=lambda one: one.name)
def test_guarantees_name_their_reading_and_accountant(
    defense: DpSgd | ClientDp | CentralDp,
) -> None:
    pytest.importorskip("opacus")
    made = defense.guarantees()
    assert [(one.reading, one.accountant) for one in made] == [
        ("one release", "analytic Gaussian"),
        ("one release", "PRV (Opacus)"),
        ("one release", "RDP (Opacus)"),
        ("whole run", "PRV (Opacus)"),
        ("whole run", "RDP (Opacus)"),
    ]
    assert all(
        one.protects == ("example" if isinstance(defense, DpSgd) else "client") for one in made
    )


def test_an_accountant_that_gives_up_says_nothing() -> None:
    pytest.importorskip("opacus")
    assert opacus_epsilon("PRV", 0.01, 1.0, 1, 1e-5) is None
    assert opacus_epsilon("RDP", 1e-200, 1.0, 1, 1e-5) is None  # the square of the noise is zero


def test_without_opacus_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(GradleakError, match=r"pip install 'gradleak\[dp\]'"):
        DpSgd().guarantees()


def test_without_opacus_an_audit_is_refused_and_its_neighbours_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    guarantee_records.cache_clear()
    plain = {"target": "tiny", "data": "canaries", "attacks": ["blind"], "limit": 1}
    specs = [
        AuditSpec.from_plain({**plain, "defenses": defenses}) for defenses in (["dp_sgd"], ["sign"])
    ]
    refused, finished = run_audits(specs)
    assert isinstance(refused, GradleakError) and "gradleak[dp]" in str(refused)
    assert not isinstance(finished, GradleakError)


def test_an_accountant_that_would_stall_the_machine_is_not_asked() -> None:
    pytest.importorskip("opacus")
    assert prv_points(0.5, 0.01, 1000, 2e-5) < MOST_POINTS < prv_points(0.1, 0.01, 1000, 2e-5)
    began = time.process_time()
    assert opacus_epsilon("PRV", 0.1, 0.01, 1000, 2e-5) is None
    assert time.process_time() - began < 5
    assert opacus_epsilon("RDP", 0.1, 0.01, 1000, 2e-5) == pytest.approx(9398.5, abs=0.1)
