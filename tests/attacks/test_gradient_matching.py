"""The search loop: same seed, same result; alone or in company; above blind; labels and lengths
known, derived or enumerated."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradleak.attacks.gradient_matching import loop
from gradleak.attacks.gradient_matching.loop import Search
from gradleak.attacks.gradient_matching.slopes import open_slopes
from gradleak.attacks.recipes.baselines import Dlg, Tag
from gradleak.attacks.recipes.lamp import LampCos
from gradleak.attacks.search.hypotheses import Hypothesis
from gradleak.attacks.search.search_rows import SearchProblem, lay_out
from gradleak.core.attack import Attack, Bench, Reconstruction
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation, Round
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.priors.english import FrequentWords
from gradleak.views import Lamp

TEXTS = (
    "my phone number is five five zero one .",
    "the cat is red .",
    "she never paid the bank again soon",
)
Observe = Callable[..., Observation]


def bench_for(target: Target, **changes: object) -> Bench:
    return Bench(Streams.root("attacker", 3), FrequentWords().open(target), **changes)  # type: ignore[arg-type]


def observations_of(target: Target, observe: Observe) -> list[Observation]:
    return [observe(target, [text], index=index, view=Lamp()) for index, text in enumerate(TEXTS)]


def first_losses(result: Reconstruction) -> list[float]:
    return [loss for _, loss in result.trace.losses]


@pytest.mark.parametrize("attack", [Tag(steps=20), Dlg(steps=20)])
def test_same_seed_gives_the_same_result_bit_for_bit(
    attack: Attack, tiny: Target, observe: Observe
) -> None:
    seen = observations_of(tiny, observe)
    once, again = (attack.reconstruct(seen, bench_for(tiny)) for _ in range(2))
    assert [guess.sentences for guess in once] == [guess.sentences for guess in again]
    assert [guess.trace.losses for guess in once] == [guess.trace.losses for guess in again]


@pytest.mark.parametrize("attack", [Tag(steps=40), Dlg(steps=40)])
def test_alone_and_in_company_give_the_same_tokens_in_float64(
    attack: Attack, tiny64: Target, observe: Observe
) -> None:
    seen = observations_of(tiny64, observe)[:2]
    together = attack.reconstruct(seen, bench_for(tiny64))
    alone = [attack.reconstruct([observation], bench_for(tiny64))[0] for observation in seen]
    assert [guess.sentences for guess in together] == [guess.sentences for guess in alone]


@pytest.mark.parametrize("attack", [Tag(steps=50), Dlg(steps=50)])
def test_alone_and_in_company_agree_in_float32_over_the_first_50_steps(
    attack: Attack, tiny: Target, observe: Observe
) -> None:
    seen = observations_of(tiny, observe)[:2]
    together = attack.reconstruct(seen, bench_for(tiny))
    for observation, shared in zip(seen, together, strict=True):
        alone = attack.reconstruct([observation], bench_for(tiny))[0]
        assert first_losses(alone) == pytest.approx(first_losses(shared), rel=1e-3)


def test_another_seed_starts_elsewhere(tiny: Target, observe: Observe) -> None:
    seen = observations_of(tiny, observe)[:1]
    other = replace(bench_for(tiny), streams=Streams.root("attacker", 4))
    assert first_losses(Tag(steps=1).reconstruct(seen, bench_for(tiny))[0]) != first_losses(
        Tag(steps=1).reconstruct(seen, other)[0]
    )


def test_the_search_finds_far_more_words_than_chance_of_a_tiny_model(
    tiny64: Target, observe: Observe
) -> None:
    seen = observations_of(tiny64, observe)
    guesses = Dlg(steps=200, learning_rate=0.05).reconstruct(seen, bench_for(tiny64))
    right = total = 0
    for text, guess in zip(TEXTS, guesses, strict=True):
        words = set(tiny64.encode([text])[0][1:-1])
        right += len(words & set(guess.sentences[0]))
        total += len(words)
    assert right / total >= 0.25  # chance: 8 words of 180, 0.04


def test_special_tokens_stay_in_place_and_never_appear_inside(
    tiny: Target, observe: Observe
) -> None:
    for guess in Tag(steps=5).reconstruct(observations_of(tiny, observe), bench_for(tiny)):
        ids = guess.sentences[0]
        assert (ids[0], ids[-1]) == (*tiny.vocabulary.prefix, *tiny.vocabulary.suffix)
        assert bool(tiny.vocabulary.allowed[torch.tensor(ids[1:-1])].all())


def test_derived_labels_and_lengths_are_exact_for_one_sentence(
    tiny: Target, observe: Observe
) -> None:
    for label in (0, 1):
        seen = observe(tiny, [TEXTS[0]], [label])
        known = Tag(steps=2).reconstruct([seen], bench_for(tiny))[0]
        derived = Tag(steps=2, labels="derived", lengths="derived").reconstruct(
            [seen.limit_to([Fact.BATCH_SIZE])], bench_for(tiny)
        )[0]
        assert derived.labels == known.labels == (label,)
        assert derived.sentences == known.sentences


def test_enumerated_labels_keep_the_best_match(tiny64: Target, observe: Observe) -> None:
    for label in (0, 1):
        seen = observe(tiny64, [TEXTS[1]], [label], view=Lamp())
        guess = Dlg(steps=80, labels="enumerate").reconstruct([seen], bench_for(tiny64))[0]
        assert guess.labels == (label,)
        assert guess.cost.steps == 160


def test_enumerated_lengths_keep_the_best_match(tiny64: Target, observe: Observe) -> None:
    seen = observe(tiny64, [TEXTS[1]], [1])
    enumerated = Dlg(steps=20, lengths="enumerate", longest=8)
    guess = enumerated.reconstruct([seen], bench_for(tiny64))[0]
    assert guess.cost.steps == 20 * 5  # 4 to 8 tokens
    one_by_one = []
    for number, length in enumerate(range(4, 9)):
        assumed = replace(seen, knows=replace(seen.knows, lengths=(length,)))
        # The stream of a hypothesis bears its number: put the known length in the same place.
        padded = [SearchProblem(assumed, Hypothesis((1,), (length,)), number)]
        search = Search(enumerated.loop, lay_out(padded), bench_for(tiny64))
        search.run()
        one_by_one.append(search.reconstruct(0))
    assert guess.sentences == min(one_by_one, key=lambda result: result.loss or 0.0).sentences


def test_derived_labels_need_the_head_to_be_seen(tiny: Target, observe: Observe) -> None:
    seen = observe(tiny, [TEXTS[0]])
    hidden = replace(
        seen,
        rounds=(replace(seen.rounds[0], update=seen.update.select(list(seen.update.tensors)[:5])),),
    )
    with pytest.raises(
        GradleakError,
        match="bias of the classification head, which is not visible: use labels=enumerate",
    ):
        Tag(steps=1, labels="derived").reconstruct([hidden], bench_for(tiny))


def test_too_many_combinations_are_refused(tiny: Target, observe: Observe) -> None:
    seen = observe(tiny, ["the cat is red ."] * 8, [0] * 8)
    with pytest.raises(GradleakError, match="combinations of labels and lengths"):
        Tag(steps=1, labels="enumerate", lengths="enumerate").reconstruct([seen], bench_for(tiny))


def test_a_batch_of_two_gives_two_sentences(tiny: Target, observe: Observe) -> None:
    seen = observe(tiny, TEXTS[:2])
    guess = Tag(steps=3).reconstruct([seen], bench_for(tiny))[0]
    assert [len(sentence) for sentence in guess.sentences] == list(seen.knows.lengths or ())


def test_a_deadline_stops_the_search_with_the_best_guess_so_far(
    tiny: Target, observe: Observe
) -> None:
    guess = Tag(steps=500).reconstruct(
        observations_of(tiny, observe)[:1], bench_for(tiny, deadline=0.0)
    )[0]
    assert guess.cost.steps == 1
    assert guess.sentences


def test_a_step_that_would_end_after_the_deadline_is_not_begun(
    tiny: Target, observe: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def open_slowly(*given: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        step = open_slopes(*given)

        def slow(embeddings: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal now
            now += 7.0
            return step(embeddings)

        return slow

    monkeypatch.setattr(loop, "open_slopes", open_slowly)
    monkeypatch.setattr("gradleak.core.attack.time.monotonic", lambda: now)
    seen = observations_of(tiny, observe)[:1]
    (guess,) = Tag(steps=500).reconstruct(seen, bench_for(tiny, deadline=100.0))
    assert 70 < now <= 100  # as many steps as there is time for, and none that is over it
    assert guess.sentences


def test_a_model_that_reads_padding_is_attacked_length_by_length(
    random_target: Callable[..., Target], observe: Observe
) -> None:
    target = random_target("GPT2")
    assert not target.padding_is_free
    seen = [observe(target, [text], index=index) for index, text in enumerate(TEXTS)]
    together = Tag(steps=5).reconstruct(seen, bench_for(target))
    alone = [Tag(steps=5).reconstruct([one], bench_for(target))[0] for one in seen]
    assert [guess.sentences for guess in together] == [guess.sentences for guess in alone]


def test_the_objective_is_zero_at_the_truth_and_larger_elsewhere(
    tiny64: Target, observe: Observe, make_private: Callable[..., object]
) -> None:
    seen = observe(tiny64, [TEXTS[0]], [1])
    truth = make_private(tiny64, [TEXTS[0]], [1]).batch  # type: ignore[attr-defined]
    wrong = make_private(tiny64, ["the dog is red and my salary is bad ."], [1]).batch  # type: ignore[attr-defined]
    at_truth, at_wrong = (float(Tag().objective([seen], [batch])[0]) for batch in (truth, wrong))
    assert at_truth < 1e-9 < at_wrong


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_what_counts_as_rounding_grows_with_what_a_distance_is_made_of(
    tiny64: Target, observe: Callable[..., Observation], scale: float
) -> None:
    seen = observe(tiny64, [TEXTS[0]], [1])
    small = Update({name: scale * tensor for name, tensor in seen.update.tensors.items()})
    seen = replace(seen, rounds=(Round(seen.target, small),))
    squares = sum(float(tensor.square().sum()) for tensor in small.tensors.values())
    absolutes = sum(float(tensor.abs().sum()) for tensor in small.tensors.values())
    assert Dlg().objective_scale(seen).rounding == pytest.approx(1e-5 * squares)
    assert Tag().objective_scale(seen).rounding == pytest.approx(
        1e-5 * (squares + Tag().l1_weight * absolutes)
    )
    assert LampCos().objective_scale(seen).rounding == 1e-5  # of a cosine the size cancels
