"""Words through known noise, with the whole vocabulary for candidates at every place."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.attacks.energy.outlet import (
    Budget,
    LateLikelihood,
    find_outlet,
    make_batch,
    read_lexicon,
)
from gradleak.attacks.energy.whole_vocabulary import (
    VocabularySearch,
    can_search,
    list_moves,
    measure_surprise,
    measure_visibility,
    read_known_noise,
)
from gradleak.core.attack import Bench
from gradleak.core.defense import Defense
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.defenses.differential_privacy import DpSgd
from gradleak.matching.noisy_channel import Likelihood
from gradleak.priors.english import FrequentWords
from gradleak.views import PartsView

TEXT, OTHER = "the cat is red .", "my dog was bad !"
Observe = Callable[..., Observation]


def bench_for(target: Target, seconds: float | None = None) -> Bench:
    deadline = None if seconds is None else time.monotonic() + seconds
    return Bench(Streams.root("attacker", 3), FrequentWords().open(target), deadline=deadline)


def late_of(seen: Observation) -> LateLikelihood:
    outlet, channel = find_outlet(seen.target, tuple(seen.update.tensors)), read_known_noise(seen)
    assert outlet is not None and channel is not None
    return LateLikelihood(seen, outlet, channel, Budget(1000))


def encode(target: Target, text: str) -> torch.Tensor:
    return torch.tensor(target.encode([text]))


def test_the_outlet_is_where_one_vector_a_sentence_is_fed_on(tiny: Target) -> None:
    outlet = find_outlet(tiny, tuple(tiny.parameters))
    assert outlet is not None
    assert outlet.part.module == "pooler"
    assert not any("encoder" in name or "embeddings" in name for name in outlet.names)
    later = find_outlet(tiny, [name for name in tiny.parameters if "pooler" not in name])
    assert later is not None
    assert later.part.module == "head"
    assert find_outlet(tiny, [name for name in tiny.parameters if "encoder" in name]) is None


def test_the_late_likelihood_is_the_exact_one_of_what_comes_after_the_last_layer(
    tiny64: Target, observe: Observe
) -> None:
    defenses = (GaussianNoise(0.05),)
    seen = observe(tiny64, [TEXT], [1], defenses=defenses)
    late = late_of(seen)
    ids = torch.cat([encode(tiny64, TEXT), encode(tiny64, OTHER)])
    kept = {name: seen.update.tensors[name] for name in late.outlet.names}
    only = replace(
        seen, rounds=(replace(seen.rounds[-1], update=replace(seen.update, tensors=kept)),)
    )
    exact = Likelihood(only, make_batch(tiny64, ids[:1], 1), 0, late.channel)(ids)
    torch.testing.assert_close(late(ids, 1).nats, exact)
    assert late.budget.spent == 2


@pytest.mark.parametrize("defense", [GaussianNoise(0.1), DpSgd(noise_multiplier=0.05)])
def test_the_truth_misses_what_was_seen_of_the_outlet_by_no_more_than_chance(
    tiny64: Target, observe: Observe, defense: Defense
) -> None:
    misses = []
    for index in range(8):
        seen = observe(tiny64, [TEXT], [1], index=index, defenses=(defense,))
        misses.append(float(late_of(seen)(encode(tiny64, TEXT), 1).misses[0]))
    assert abs(sum(misses) / 8) < 2
    assert max(map(abs, misses)) < 6


def test_the_lexicon_says_nothing_of_a_word_in_its_own_place(
    tiny64: Target, observe: Observe
) -> None:
    seen = observe(tiny64, [TEXT], [1], defenses=(GaussianNoise(0.1),))
    late = late_of(seen)
    lexicon = read_lexicon(tiny64, late.outlet, bench_for(tiny64))
    assert lexicon is not None
    chains = late(torch.cat([encode(tiny64, TEXT), encode(tiny64, OTHER)]), 1)
    now = chains.ids[:, 2]
    gains = lexicon.shift(chains.slopes, chains.curvatures, now)
    own = gains.gather(1, lexicon.rows[now][:, None])
    torch.testing.assert_close(own, torch.zeros_like(own), atol=1e-6, rtol=0)


def test_moves_are_all_exchanges_and_all_moves_once() -> None:
    moved = list_moves(torch.tensor([9, 1, 2, 3, 4, 9]), [1, 2, 3, 4])
    assert len(moved) == len({tuple(row) for row in moved.tolist()}) == 6 + 6
    assert all(sorted(row) == [1, 2, 3, 4, 9, 9] for row in moved.tolist())


def test_noise_that_hides_the_spans_is_searched_by_likelihood(
    tiny64: Target, observe: Observe
) -> None:
    def seen(*defenses: Defense) -> Observation:
        return observe(tiny64, [TEXT], [1], defenses=defenses)

    loud, quiet = seen(DpSgd(noise_multiplier=0.1)), seen(GaussianNoise(1e-5))
    assert can_search(loud)
    assert EnergyAttack().searches_vocabulary(loud)
    assert not EnergyAttack(candidates=0).searches_vocabulary(loud)
    assert can_search(quiet)
    assert not EnergyAttack().searches_vocabulary(quiet)
    assert measure_visibility(quiet) > 1000 > 10 > measure_visibility(loud)
    assert not can_search(seen())
    two = observe(tiny64, [TEXT, OTHER], [1, 1], defenses=(GaussianNoise(0.1),))
    assert not can_search(two)
    layer = observe(tiny64, [TEXT], [1], view=PartsView(layers="1"), defenses=(GaussianNoise(0.1),))
    assert not can_search(layer)


@pytest.mark.parametrize("text", ["the cat", "she paid"])
def test_words_come_back_through_dp_sgd_their_label_unknown(
    tiny64: Target, observe: Observe, text: str
) -> None:
    seen = observe(tiny64, [text], [1], defenses=(DpSgd(noise_multiplier=0.001),))
    seen = replace(seen, knows=replace(seen.knows, labels=None))
    found = VocabularySearch(seen, bench_for(tiny64), 6_000).run()
    assert found is not None
    assert found.label == 1
    assert not found.has_failed
    assert found.sentence == tuple(tiny64.encode([text])[0])


def test_a_search_that_fails_is_known_to(tiny64: Target, observe: Observe) -> None:
    seen = observe(tiny64, [TEXT], [1], defenses=(DpSgd(noise_multiplier=0.001),))
    found = VocabularySearch(seen, bench_for(tiny64), 1).run()
    assert found is not None
    assert found.has_failed
    surprise = measure_surprise(seen, make_batch(tiny64, encode(tiny64, TEXT), 1))
    sentences, prior = (tuple(tiny64.encode([TEXT])[0]),), bench_for(tiny64).words
    at_truth = float(surprise) + EnergyAttack().penalty(seen, sentences, prior)
    assert found.score < -at_truth


def test_a_search_ends_with_its_budget_or_its_time(tiny64: Target, observe: Observe) -> None:
    seen = observe(tiny64, [TEXT], [1], defenses=(DpSgd(noise_multiplier=0.3),))
    found = VocabularySearch(seen, bench_for(tiny64), 300).run()
    assert found is not None
    assert found.scored < 2000  # what was begun is ended
    (guess,) = EnergyAttack().reconstruct([seen], bench_for(tiny64, seconds=0.0))
    assert len(guess.sentences[0]) == len(tiny64.encode([TEXT])[0])
