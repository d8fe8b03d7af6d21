"""LAMP on parts of an update."""

from collections.abc import Callable

import pytest

from gradleak.attacks.blind import Blind
from gradleak.attacks.recipes.lamp import LampCos, PartialGradients
from gradleak.core.attack import Attack, Bench
from gradleak.core.observation import Observation
from gradleak.core.parts import MODULES
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.priors.english import FrequentWords
from gradleak.views import PartsView

Observe = Callable[..., Observation]
TEXT = "my dog was bad !"


def right_words(attack: Attack, seen: Observation) -> int:
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(seen.target))
    (found,) = attack.reconstruct([seen], bench)
    (secret,) = seen.target.encode([TEXT])
    return len(set(secret[1:-1]) & set(found.sentences[0]))


def test_it_is_lamps_search_with_lamps_settings() -> None:
    assert PartialGradients().loop == LampCos().loop
    assert PartialGradients(faithful=True, steps=7).loop == LampCos(faithful=True, steps=7).loop


def test_one_matrix_of_the_update_tells_more_than_a_blind_guess(
    tiny: Target, observe: Observe
) -> None:
    seen = observe(tiny, [TEXT], [1], view=PartsView("1", ("query",)))
    assert len(seen.update.tensors) == 1
    assert right_words(PartialGradients(steps=250, starts=30), seen) > right_words(Blind(), seen)


# Not matched by this recipe, or not in a plain BERT
ABSENT = ("word_embedding", "convolution", "adapter_in", "adapter_out")


@pytest.mark.parametrize("module", [module for module in MODULES if module not in ABSENT])
def test_any_module_alone_can_be_matched(module: str, tiny: Target, observe: Observe) -> None:
    seen = observe(tiny, [TEXT], [1], view=PartsView("", (module,)))
    assert 0 <= right_words(PartialGradients(steps=2, starts=3), seen) <= 5


@pytest.mark.parametrize("architecture", ["GPT2", "GPTNeoX"])
def test_a_slice_of_a_fused_matrix_can_be_matched(
    architecture: str, random_target: Callable[..., Target], observe: Observe
) -> None:
    seen = observe(random_target(architecture), [TEXT], [1], view=PartsView("1", ("value",)))
    assert 0 <= right_words(PartialGradients(steps=2, starts=3), seen) <= 5
