"""The portfolio: exact attacks first, others only for what they leave, and every attack's own
guess kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from gradleak.attacks import portfolio
from gradleak.attacks.portfolio import Portfolio
from gradleak.core import attack
from gradleak.core.attack import Attack, Bench, Reconstruction
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.priors.english import FrequentWords
from gradleak.views import Everything, PartsView

TEXTS = ("my phone number is five zero .", "the cat is red .")
Observe = Callable[..., Observation]
ATTACK = Portfolio(restarts=0, steps=5, starts=2)


def bench_for(target: Target) -> Bench:
    return Bench(Streams.root("attacker", 3), FrequentWords().open(target))


def test_what_span_proves_is_not_attacked_again(tiny64: Target, observe: Observe) -> None:
    seen = [observe(tiny64, [text], [1], index=index) for index, text in enumerate(TEXTS)]
    guesses = ATTACK.reconstruct(seen, bench_for(tiny64))
    assert [tiny64.decode(guess.sentences[0]) for guess in guesses] == [
        "my phone number is five zero.",
        "the cat is red.",
    ]
    assert all(guess.certified for guess in guesses)
    assert [[stage.attack for stage in guess.stages] for guess in guesses] == [["span"], ["span"]]


def test_where_the_first_layer_is_not_seen_energy_begins(tiny64: Target, observe: Observe) -> None:
    seen = [observe(tiny64, [TEXTS[1]], [1], view=PartsView(layers="2"))]
    span, energy, *_ = ATTACK.reconstruct(seen, bench_for(tiny64))[0].stages
    assert (span.attack, span.fate, span.sentences) == ("span", "refused", ())
    assert "span needs the gradient of the first layer's query, key or value" in span.reason
    assert (energy.attack, energy.fate, energy.reason) == ("energy", "ran", "")


def test_under_noise_every_attack_gets_a_try_and_the_nearest_guess_counts(
    tiny64: Target, observe: Observe
) -> None:
    seen = [observe(tiny64, ["the cat ."], [1], defenses=(GaussianNoise(std=0.3),))]
    guess = ATTACK.reconstruct(seen, bench_for(tiny64))[0]
    assert [stage.attack for stage in guess.stages] == ["span", "energy", "lamp_plus"]
    assert not guess.certified

    def distance(sentences: tuple[tuple[int, ...], ...]) -> float:
        found = ATTACK.objective(seen, [tiny64.batch_of(sentences, [1])])
        assert found is not None
        return float(found[0]) + ATTACK.penalty(seen[0], sentences, bench_for(tiny64).words)

    assert distance(guess.sentences) == min(distance(stage.sentences) for stage in guess.stages)
    assert guess.cost.seconds == pytest.approx(sum(stage.cost.seconds for stage in guess.stages))


def test_what_matches_all_but_the_noise_is_not_attacked_again(
    tiny64: Target, observe: Observe
) -> None:
    seen = [observe(tiny64, [TEXTS[1]], [1], defenses=(GaussianNoise(std=1e-4),))]
    guess = ATTACK.reconstruct(seen, bench_for(tiny64))[0]
    assert "lamp_plus" not in [stage.attack for stage in guess.stages]
    assert tiny64.decode(guess.sentences[0]) == "the cat is red."
    assert not guess.certified


def test_a_view_nothing_applies_to_is_refused_with_every_members_reason(
    tiny64: Target, observe: Observe
) -> None:
    loud = (GaussianNoise(std=10.0),)  # not even the words can be told
    seen = [
        observe(tiny64, [TEXTS[1]], [1], view=PartsView(modules=("word_embedding",)), defenses=loud)
    ]
    with pytest.raises(GradleakError, match="No attack of the portfolio applies") as refused:
        ATTACK.reconstruct(seen, bench_for(tiny64))
    assert all(f"{name}: " in str(refused.value) for name in ("span", "energy", "lamp_plus"))


def test_where_no_member_applies_the_update_speaks_for_itself(
    tiny64: Target, observe: Observe
) -> None:
    seen = [observe(tiny64, [TEXTS[1]], [1], view=PartsView(modules=("word_embedding",)))]
    (guess,) = ATTACK.reconstruct(seen, bench_for(tiny64))
    assert [(stage.attack, stage.fate) for stage in guess.stages] == [
        ("span", "refused"), ("energy", "refused"), ("lamp_plus", "refused"), ("outright", "ran"),
    ]  # fmt: skip
    assert set(guess.sentences[0]) == set(tiny64.encode([TEXTS[1]])[0])
    assert not guess.certified


def test_more_words_than_a_prior_can_be_asked_for_are_said_in_turn(
    tiny64: Target, observe: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portfolio, "MOST_ORDERED", 0)
    seen = observe(tiny64, TEXTS, [1, 1], view=PartsView(modules=("word_embedding",)))
    said = portfolio.say_outright(seen, bench_for(tiny64))
    assert said is not None and tuple(map(len, said)) == seen.knows.lengths
    words = {word for sentence in said for word in sentence}
    assert words == {word for row in tiny64.encode(TEXTS) for word in row}


@dataclass(frozen=True)
class Fake(Attack):
    """Does as it is told, and notes how much time it was given."""

    name = "fake"
    does: Callable[[Sequence[Observation]], None] = lambda seen: None
    given: list[float | None] = field(default_factory=list)

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        self.given.append(
            None if bench.deadline is None else bench.deadline - portfolio.time.monotonic()
        )
        self.does(observations)
        return [Reconstruction(((1, 2),)) for _ in observations]


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(portfolio, "time", made)
    monkeypatch.setattr(attack, "time", made)
    return made


def of_fakes(monkeypatch: pytest.MonkeyPatch, *fakes: Fake) -> Portfolio:
    monkeypatch.setattr(Portfolio, "members", fakes)
    return ATTACK


def limited(target: Target, seconds: float) -> Bench:
    return replace(bench_for(target), deadline=seconds)


def test_each_member_gets_an_equal_share_of_the_time_that_is_left(
    tiny64: Target, observe: Observe, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(seconds: float) -> Callable[[Sequence[Observation]], None]:
        return lambda seen: setattr(clock, "now", clock.now + seconds)

    fakes = Fake(take(10)), Fake(take(50)), Fake(take(1))
    (guess,) = of_fakes(monkeypatch, *fakes).reconstruct(
        [observe(tiny64, [TEXTS[1]], [1])], limited(tiny64, 100)
    )
    assert [fake.given for fake in fakes] == [
        [pytest.approx(95 / 3)],
        [pytest.approx(85 / 2)],
        [pytest.approx(35)],
    ]
    assert [stage.fate for stage in guess.stages] == ["ran", "cut", "ran"]


def test_a_member_that_takes_all_the_time_leaves_word_of_those_it_took_it_from(
    tiny64: Target, observe: Observe, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy, late = Fake(lambda seen: setattr(clock, "now", 200.0)), Fake()
    (guess,) = of_fakes(monkeypatch, greedy, late).reconstruct(
        [observe(tiny64, [TEXTS[1]], [1])], limited(tiny64, 100)
    )
    assert [(stage.fate, stage.reason) for stage in guess.stages] == [
        ("cut", "Its time was up before it had ended."), ("no_time", "No time was left for it."),
    ]  # fmt: skip
    assert late.given == [] and guess.sentences == ((1, 2),)


def test_without_a_limit_nobody_has_a_deadline(
    tiny64: Target, observe: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = Fake(), Fake()
    of_fakes(monkeypatch, *fakes).reconstruct([observe(tiny64, [TEXTS[1]], [1])], bench_for(tiny64))
    assert [fake.given for fake in fakes] == [[None], [None]]


def test_where_there_is_no_time_at_all_an_answer_says_so(
    tiny64: Target, observe: Observe, clock: Clock
) -> None:
    clock.now = 1.0
    for view, words in ((PartsView(layers="2"), False), (Everything(), True)):
        (guess,) = ATTACK.reconstruct(
            [observe(tiny64, [TEXTS[1]], [1], view=view)], limited(tiny64, 0.5)
        )
        fates = [stage.fate for stage in guess.stages if stage.attack != "outright"]
        assert fates == ["no_time"] * 3
        assert (len(guess.sentences[0]) > 2) == words


ERRORS = [
    (MemoryError("no room"), "MemoryError: no room"),
    (
        torch.OutOfMemoryError("CUDA out of memory.\nTried to"),
        "OutOfMemoryError: CUDA out of memory.",
    ),
    (torch.linalg.LinAlgError("did not converge"), "LinAlgError: did not converge"),
    (ZeroDivisionError(), "ZeroDivisionError."),
    (IndexError("out of range"), "IndexError: out of range"),
]


@pytest.mark.parametrize(("error", "reason"), ERRORS, ids=lambda one: type(one).__name__)
def test_a_member_that_fails_is_named_and_the_next_goes_on(
    error: Exception, reason: str, tiny64: Target, observe: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(seen: Sequence[Observation]) -> None:
        raise error

    (guess,) = of_fakes(monkeypatch, Fake(fail), Fake()).reconstruct(
        [observe(tiny64, [TEXTS[1]], [1])], bench_for(tiny64)
    )
    assert [(stage.fate, stage.reason) for stage in guess.stages] == [
        ("failed", reason),
        ("ran", ""),
    ]
    assert guess.sentences == ((1, 2),)


def test_whoever_interrupts_is_obeyed(
    tiny64: Target, observe: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seen: Sequence[Observation]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        of_fakes(monkeypatch, Fake(interrupt)).reconstruct(
            [observe(tiny64, [TEXTS[1]], [1])], bench_for(tiny64)
        )


def test_one_batch_that_fails_does_not_stop_a_member_for_the_others(
    tiny64: Target, observe: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(seen: Sequence[Observation]) -> None:
        if any(one.index == 2 for one in seen):
            raise RuntimeError("not this one")

    member = Fake(fail)
    seen = [observe(tiny64, [TEXTS[1]], [1], index=index) for index in range(5)]
    guesses = of_fakes(monkeypatch, member, Fake()).reconstruct(seen, bench_for(tiny64))
    assert [guess.stages[0].fate for guess in guesses] == ["ran", "ran", "failed", "ran", "ran"]
    assert len(member.given) <= 2 * 5  # halves of halves, and no more


def test_a_guess_that_is_proven_is_not_called_cut(
    tiny64: Target, observe: Observe, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Fake,
        "reconstruct",
        lambda self, seen, bench: [Reconstruction(((1, 2),), certified=True)] * len(seen),
    )
    monkeypatch.setattr(Bench, "out_of_time", property(lambda bench: clock.now > 0))
    monkeypatch.setattr(
        portfolio, "_note_guess", lambda *given: setattr(clock, "now", 1.0) or plain(*given)
    )
    (guess,) = of_fakes(monkeypatch, Fake(), Fake()).reconstruct(
        [observe(tiny64, [TEXTS[1]], [1])], bench_for(tiny64)
    )
    assert [(stage.fate, stage.certified) for stage in guess.stages] == [("ran", True)]


plain = portfolio._note_guess
