"""Updates of adapters: words are found jointly, where they outnumber the directions that are
seen."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="adapters need peft, the extra lora")

from gradleak.attacks.span import Span
from gradleak.attacks.span.low_rank import LowRankSearch, Words, has_only_adapters
from gradleak.core.attack import Bench
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.priors.english import FrequentWords
from gradleak.targets.adapters import CausalLora, Lora

Observe = Callable[..., Observation]
TEXT = "my phone number is five five zero one ."
BASE = "tiny:hidden=64,heads=2"  # heads of 32, room for 32 words
BESIDE = (Fact.LENGTHS, Fact.BATCH_SIZE)


@pytest.fixture(scope="module")
def adapted() -> Target:
    """A random BERT with fresh adapters of rank 4 on query and value."""
    return Lora(base=BASE, rank=4).open(torch.device("cpu"))


@pytest.fixture(scope="module")
def trained() -> Target:
    """The same with a B that is no longer zero."""
    opened = Lora(base=BASE, rank=4).open(torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in opened.parameters.items():
            if "lora_B" in name:
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
                parameter.copy_(0.05 * drawn)
    return opened


def bench_for(target: Target) -> Bench:
    return Bench(Streams.root("attacker", 0), FrequentWords().open(target))


def rebuild(observation: Observation, known: Sequence[Fact] = BESIDE) -> Any:
    (guess,) = Span().reconstruct([observation.limit_to(known)], bench_for(observation.target))
    return guess


def test_the_first_step_gives_more_words_back_than_its_rank(
    adapted: Target, observe: Observe
) -> None:
    seen = observe(adapted, (TEXT,))
    first = [name for name in seen.update.tensors if "lora_A" in name]
    assert first and not any(bool(seen.update.tensors[name].any()) for name in first)
    guess = rebuild(seen)
    assert guess.sentences == (tuple(adapted.encode([TEXT])[0]),)
    assert guess.certified


def test_later_steps_and_unknown_lengths_do_too(trained: Target, observe: Observe) -> None:
    seen = observe(trained, (TEXT,))
    for known in (BESIDE, (Fact.BATCH_SIZE,)):
        guess = rebuild(seen, known)
        assert guess.sentences == (tuple(trained.encode([TEXT])[0]),)
        assert guess.certified


def test_the_truth_leaves_nothing_of_the_signal_and_another_word_does(
    adapted: Target, observe: Observe
) -> None:
    bench, (ids,) = bench_for(adapted), adapted.encode([TEXT])
    words = Words(adapted, len(ids), bench)
    search = LowRankSearch(observe(adapted, (TEXT,)), words, bench, 1)
    columns = [
        words.ids.tolist().index(word) if word in words.ids.tolist() else words.column(word)
        for word in ids
    ]
    truth = list(enumerate(columns))
    assert search._measure_left(truth) < 1e-6
    wrong = [*truth[:3], (3, (truth[3][1] + 1) % words.free), *truth[4:]]
    assert search._measure_left(wrong) > 1e-3


def test_a_full_update_is_not_taken_for_adapters(
    tiny: Target, adapted: Target, observe: Observe
) -> None:
    assert not has_only_adapters(observe(tiny))
    assert has_only_adapters(observe(adapted))


def test_lengths_of_several_texts_must_be_known(adapted: Target, observe: Observe) -> None:
    seen = observe(adapted, (TEXT, "the cat is red ."))
    with pytest.raises(GradleakError, match="needs the lengths"):
        rebuild(seen, (Fact.BATCH_SIZE,))


def test_a_short_text_of_a_rotary_model_grows_by_its_values(observe: Observe) -> None:
    target = CausalLora().open(torch.device("cpu"))
    text = "my dog was bad"
    guess = rebuild(observe(target, (text,)))
    assert guess.sentences == (tuple(target.encode([text])[0]),)


def test_a_fused_matrix_of_gpt2_gives_its_text_back(observe: Observe) -> None:
    target = CausalLora(base="tiny_causal:hidden=64,heads=2", rank=4).open(torch.device("cpu"))
    assert {part.module for part in target.parts} == {"adapter_in", "adapter_out"}
    text = "my dog was bad and the cat is red ."
    guess = rebuild(observe(target, (text,)))
    assert guess.sentences == (tuple(target.encode([text])[0]),)
    assert guess.certified
