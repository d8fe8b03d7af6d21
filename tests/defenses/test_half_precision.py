"""Updates in half precision: what is lost is what the channel says, and the exact attack looks
past it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradleak.attacks.span import Span
from gradleak.attacks.span.row_space import read_row_space
from gradleak.core.attack import Bench
from gradleak.core.defense import Channel, channel_of
from gradleak.core.observation import Fact, Observation
from gradleak.core.parts import ATTENTION_INPUTS
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.defenses.few_bits import Rounding
from gradleak.matching.inputs import visible_linear_parts
from gradleak.priors.english import FrequentWords
from gradleak.targets.tiny import Tiny

CPU = torch.device("cpu")
TEXTS = (
    "my phone number is five five zero one .",
    "the cat is red .",
    "she never paid the bank again soon",
)
BOTH = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


def rounded(values: torch.Tensor, dtype: Any) -> torch.Tensor:
    return (
        Rounding(dtype)
        .protect(Update({"a": values[None]}), [Streams.root("client", 0)])
        .tensors["a"][0]
    )


@BOTH
def test_rounding_twice_is_rounding_once_and_stays_within_half_a_step(dtype: str) -> None:
    values = torch.randn(10_000, generator=Streams.root("test", 0).generator())
    sent, channel = rounded(values, dtype), Rounding(dtype).channel()  # type: ignore[arg-type]
    assert sent.dtype == torch.float32 and not torch.equal(sent, values)
    assert torch.equal(rounded(sent, dtype), sent)
    assert bool(
        (
            (sent - values).abs() <= channel.rounding / 2 * values.abs() + channel.smallest_step / 2
        ).all()
    )


@BOTH
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-7])  # the last is where fp16 runs out of exponents
def test_the_channel_says_how_large_the_errors_are(dtype: str, size: float) -> None:
    values = size * torch.randn(100_000, generator=Streams.root("test", 0).generator())
    sent = rounded(values, dtype)
    said = Rounding(dtype).channel().errors(sent, 1).norm()  # type: ignore[arg-type]
    assert float((sent - values).norm()) == pytest.approx(float(said), rel=0.03)


def test_a_chain_adds_its_noises_and_keeps_its_coarsest_rounding() -> None:
    assert channel_of([]).exact and channel_of([]) == Channel()
    chain = channel_of([GaussianNoise(3.0), Rounding("fp16"), GaussianNoise(4.0), Rounding("bf16")])
    assert (chain.noise_std, chain.rounding) == (5.0, 2**-7)
    assert chain.smallest_step == Rounding("fp16").channel().smallest_step


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_span_knows_the_rank_and_proves_the_sentence(
    dtype: Any, text: str, observe: Callable[..., Observation]
) -> None:
    target = Tiny(layers=3, hidden=96).open(CPU)
    seen = observe(target, (text,), defenses=(Rounding(dtype),))
    parts = visible_linear_parts(seen, 1, ATTENTION_INPUTS)
    assert read_row_space(seen, parts).rank == len(target.encode([text])[0])
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(target))
    (guess,) = Span().reconstruct([seen.limit_to({Fact.DEFENSE})], bench)
    assert guess.sentences == (tuple(target.encode([text])[0]),)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("hidden", [32, 96])
@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS[1:2], TEXTS[:2], TEXTS])
def test_span_proves_nothing_that_is_wrong(
    texts: tuple[str, ...], hidden: int, known: bool, observe: Callable[..., Observation]
) -> None:
    target = Tiny(hidden=hidden).open(CPU)
    seen = observe(target, texts, defenses=(Rounding(),)).limit_to(
        {Fact.DEFENSE} if known else set()
    )
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(target))
    (guess,) = Span(steps=40).reconstruct([seen], bench)
    assert not guess.certified or set(guess.sentences) == {
        tuple(ids) for ids in target.encode(texts)
    }


def test_minilm_gives_up_canaries_in_bf16(
    minilm: Target, observe: Callable[..., Observation]
) -> None:
    secrets = ("My PIN is 4471, please keep it.", "Call me at 555-0142 after seven.")
    seen = [
        observe(minilm, (text,), index=place, defenses=(Rounding(),))
        for place, text in enumerate(secrets)
    ]
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(minilm))
    found = Span().reconstruct(
        [one.limit_to({Fact.DEFENSE, Fact.BATCH_SIZE}) for one in seen], bench
    )
    assert [guess.sentences for guess in found] == [(tuple(ids),) for ids in minilm.encode(secrets)]
    assert all(guess.certified for guess in found)
