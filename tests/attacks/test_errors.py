"""What defenses and rounding leave on entries, told from what is seen; and spans that survive
them."""

from collections.abc import Callable

import pytest

from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.attacks.energy.objective import estimate_error_std
from gradleak.core.attack import Bench
from gradleak.core.defense import Defense
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.defenses.few_bits import Quantisation, Sign
from gradleak.defenses.sparsification import Masking, TopK
from gradleak.priors.english import FrequentWords
from gradleak.protocols.fedavg import FedAvg

Observe = Callable[..., Observation]
TEXTS = ["the cat is red ."]


def matrix_name(target: Target) -> str:
    return next(name for name in target.parameters if "intermediate.dense.weight" in name)


@pytest.mark.parametrize(
    ("defense", "within"),
    [
        (GaussianNoise(std=0.01), 1e-9),
        (Masking(fraction_zeroed=0.75), 0.2),
        (Quantisation(bits=3), 0.5),
        (Sign(), 0.5),
        (TopK(0.1), 0.5),
    ],
    ids=lambda one: one.name if isinstance(one, Defense) else "",
)
def test_the_size_of_errors_is_told_from_what_is_seen(
    tiny64: Target, observe: Observe, defense: Defense, within: float
) -> None:
    name = matrix_name(tiny64)
    clear, seen = (observe(tiny64, TEXTS, [1], defenses=how) for how in ((), (defense,)))
    gradient, sent = (one.update.tensors[name].double().flatten() for one in (clear, seen))
    factor = (gradient @ sent) / (gradient @ gradient)
    assert estimate_error_std(clear, name) == 0
    expected = (
        0.01
        if isinstance(defense, GaussianNoise)
        else float((sent - factor * gradient).square().mean().sqrt())
    )
    assert estimate_error_std(seen, name) == pytest.approx(expected, rel=within)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_difference_of_weights_is_rounded_to_their_digits(
    tiny: Target, tiny64: Target, observe: Observe, steps: int
) -> None:
    name, protocol = matrix_name(tiny), FedAvg(steps=steps, learning_rate=1e-5)
    rounded, exact = (observe(target, TEXTS, [1], protocol=protocol) for target in (tiny, tiny64))
    error = (
        (rounded.update.tensors[name].double() - exact.update.tensors[name]).square().mean().sqrt()
    )
    assert estimate_error_std(rounded, name) == pytest.approx(float(error), rel=0.3)
    assert estimate_error_std(exact, name) == 0


@pytest.mark.parametrize(
    "defense",
    [Sign(), TopK(fraction_kept=0.2), Quantisation(bits=3), Masking(fraction_zeroed=0.5)],
    ids=repr,
)
def test_energy_sees_through_what_is_done_to_entries(
    tiny64: Target, observe: Observe, defense: Defense
) -> None:
    bench = Bench(Streams.root("attacker", 3), FrequentWords().open(tiny64))
    guess = EnergyAttack(restarts=4).reconstruct(
        [observe(tiny64, TEXTS, [1], defenses=(defense,))], bench
    )[0]
    assert tiny64.decode(guess.sentences[0]) == "the cat is red."
    assert not guess.certified
