"""The portfolio: exact attacks first, others only for what they leave, and every attack's own guess kept."""

from collections.abc import Callable

import pytest

from gradleak.attacks.portfolio import Portfolio
from gradleak.core.attack import Bench
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.defenses.gaussian_noise import GaussianNoise
from gradleak.priors.frequent_words import FrequentWords
from gradleak.views.parts import Parts

TEXTS = ("my phone number is five zero .", "the cat is red .")
Observe = Callable[..., Observation]
ATTACK = Portfolio(restarts=1, steps=5, starts=2)


def bench_for(target: Target) -> Bench:
    return Bench(Streams.root("attacker", 3), FrequentWords().open(target))


def test_what_span_proves_is_not_attacked_again(tiny64: Target, observe: Observe) -> None:
    seen = [observe(tiny64, [text], [1], index=index) for index, text in enumerate(TEXTS)]
    guesses = ATTACK.reconstruct(seen, bench_for(tiny64))
    assert [tiny64.decode(guess.sentences[0]) for guess in guesses] == ["my phone number is five zero.", "the cat is red."]
    assert all(guess.certified for guess in guesses)
    assert [[stage.attack for stage in guess.stages] for guess in guesses] == [["span"], ["span"]]


def test_where_the_first_layer_is_not_seen_energy_begins(tiny64: Target, observe: Observe) -> None:
    seen = [observe(tiny64, [TEXTS[1]], [1], view=Parts(layers="2"))]
    stages = [stage.attack for stage in ATTACK.reconstruct(seen, bench_for(tiny64))[0].stages]
    assert stages[0] == "energy"


def test_under_noise_every_attack_gets_a_try_and_the_nearest_guess_counts(tiny64: Target, observe: Observe) -> None:
    seen = [observe(tiny64, [TEXTS[1]], [1], defenses=(GaussianNoise(std=0.3),))]
    guess = ATTACK.reconstruct(seen, bench_for(tiny64))[0]
    assert [stage.attack for stage in guess.stages] == ["span", "energy", "lamp_plus"]
    assert not guess.certified

    def distance(sentences: tuple[tuple[int, ...], ...]) -> float:
        found = ATTACK.objective(seen, [tiny64.batch_of(sentences, [1])])
        assert found is not None
        return float(found[0])

    assert distance(guess.sentences) == min(distance(stage.sentences) for stage in guess.stages)
    assert guess.cost.seconds == pytest.approx(sum(stage.cost.seconds for stage in guess.stages))


def test_what_matches_all_but_the_noise_is_not_attacked_again(tiny64: Target, observe: Observe) -> None:
    seen = [observe(tiny64, [TEXTS[1]], [1], defenses=(GaussianNoise(std=1e-4),))]
    guess = ATTACK.reconstruct(seen, bench_for(tiny64))[0]
    assert "lamp_plus" not in [stage.attack for stage in guess.stages]
    assert tiny64.decode(guess.sentences[0]) == "the cat is red."
    assert not guess.certified


def test_a_view_nothing_applies_to_is_refused(tiny64: Target, observe: Observe) -> None:
    seen = [observe(tiny64, [TEXTS[1]], [1], view=Parts(modules=("word_embedding",)))]
    with pytest.raises(GradleakError, match="No attack of the portfolio applies"):
        ATTACK.reconstruct(seen, bench_for(tiny64))
