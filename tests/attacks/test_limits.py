"""Searches end, and fit: no piece is begun after the deadline, work has a bound, and pieces are
planned for the memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradleak.attacks.bag_of_words import BagOfWords, OrderClimb
from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.attacks.energy.lexicon import read_first_layer
from gradleak.attacks.energy.objective import Energy
from gradleak.attacks.gradient_matching import discrete, starts
from gradleak.attacks.gradient_matching.discrete import WordPolish
from gradleak.attacks.gradient_matching.loop import MatchingAttack, MatchingLoop
from gradleak.attacks.gradient_matching.slopes import SlopesInPieces
from gradleak.attacks.gradient_matching.starts import TwoStep
from gradleak.attacks.portfolio import Portfolio
from gradleak.attacks.recipes.baselines import Tag
from gradleak.attacks.recipes.lamp import LampCos, LampPlus, LampQuick
from gradleak.attacks.search.search_rows import group_problems, lay_out
from gradleak.attacks.search.word_search import WEAKEST, SearchEffort, WordSearch
from gradleak.attacks.span import Span
from gradleak.attacks.span_continuous import SpanContinuous
from gradleak.core.attack import Attack, Bench
from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching import L2L1, Cosine, for_observations
from gradleak.matching.chunking import Chunks
from gradleak.matching.matcher import Matcher
from gradleak.priors.english import FrequentWords

Observe = Callable[..., Observation]
TEXTS = (
    ["the cat is red .", "my dog was bad !"],
    ["she never paid the bank again", "the cat and the dog"],
)
ATTACKS: tuple[Attack, ...] = (
    EnergyAttack(restarts=4, sweeps=2),
    EnergyAttack(restarts=0, lengths="enumerate", longest=6),
    LampCos(steps=4, starts=4),
    LampCos(steps=4, starts=4, discrete="at_end", across=True),
    LampPlus(steps=2, starts=2, polish_rounds=2, word_sweeps=1, word_restarts=4),
    Tag(steps=4),
    BagOfWords(steps=3, orders=8, repeats=4),
    SpanContinuous(steps=4, starts=2),
    Span(steps=4),
    Portfolio(restarts=0, steps=2, starts=2),
)


@dataclass(frozen=True, eq=False)
class Clock(Bench):
    """A bench whose time is over after so many looks at the clock, on any machine."""

    looks: int = 0
    seen: list[bool] = field(default_factory=list)

    @property
    def out_of_time(self) -> bool:
        self.seen.append(len(self.seen) >= self.looks)
        return self.seen[-1]


@dataclass(frozen=True, eq=False)
class Narrow(Bench):
    """A bench with so much memory left, on any machine."""

    left: float = 0.0

    def memory_left(self, device: torch.device) -> float:
        return self.left


def made(kind: Callable[..., Bench], target: Target, **fields: Any) -> Bench:
    return kind(Streams.root("attacker", 3), FrequentWords().open(target), **fields)


def batches_of(target: Target, observe: Observe) -> list[Observation]:
    return [observe(target, texts, [0, 1], index=index) for index, texts in enumerate(TEXTS)]


def limited(attack: Attack, seen: Sequence[Observation]) -> list[Observation]:
    return [one.limit_to(attack.requires) for one in seen]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Bench | None]:
    """The bench of every piece that is computed from here on."""
    found: list[Bench | None] = []
    whole = Chunks.run_pairs

    def noted(self: Chunks, function: Callable[[slice, slice], Tensor], *rest: Any) -> Tensor:
        def piece(rows: slice, some: slice) -> Tensor:
            found.append(self.bench)
            return function(rows, some)

        return whole(self, piece, *rest)

    monkeypatch.setattr(Chunks, "run_pairs", noted)
    return found


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: f"{attack.name}")
@pytest.mark.parametrize("looks", [0, 1, 7, 40])
def test_when_time_ends_every_batch_has_a_guess_and_nothing_is_computed_any_more(
    attack: Attack, looks: int, tiny: Target, observe: Observe, computed: list[Bench | None]
) -> None:
    seen = batches_of(tiny, observe)
    bench = made(Clock, tiny, looks=looks)
    assert isinstance(bench, Clock)
    found = attack.reconstruct(limited(attack, seen), bench)
    assert len(found) == len(seen)
    assert all(guess.sentences and all(guess.sentences) for guess in found)
    assert sum(one is bench for one in computed) <= looks  # one look at least before each
    # What is left of the search is passed over, not gone through
    assert len(bench.seen) <= looks + 100


def test_a_guess_found_before_the_end_of_time_is_kept(tiny: Target, observe: Observe) -> None:
    seen = [observe(tiny, ["the red cat"], [1])]
    attack = EnergyAttack(restarts=4)
    whole = made(Clock, tiny, looks=10**9)
    assert isinstance(whole, Clock)
    (best,) = attack.reconstruct(seen, whole)
    losses = []
    for looks in (3, len(whole.seen) // 2, len(whole.seen)):
        (guess,) = attack.reconstruct(seen, made(Clock, tiny, looks=looks))
        losses.append(torch.inf if guess.loss is None else guess.loss)
    assert losses == sorted(losses, reverse=True)  # more time is never worse
    assert best.loss is not None
    assert losses[-1] == pytest.approx(best.loss, abs=1e-3)


def test_nothing_is_proven_when_time_ended_before_the_proof(
    tiny64: Target, observe: Observe
) -> None:
    seen = [observe(tiny64, ["the cat is red ."], [1])]
    attack = EnergyAttack(restarts=8)
    whole = made(Clock, tiny64, looks=10**9)
    assert isinstance(whole, Clock)
    (proven,) = attack.reconstruct(seen, whole)
    assert proven.certified
    for looks in range(len(whole.seen)):
        (guess,) = attack.reconstruct(seen, made(Clock, tiny64, looks=looks))
        assert guess.sentences == proven.sentences or not guess.certified


# How often candidates are scored at most, for batches of so many sentences of so many tokens:
# bounds that follow from the fields alone, on any machine and whatever the objective does.


def bound_moves(examples: int, tokens: int) -> int:
    """Until none helps: all are tried, then the best few after each that was taken."""
    return 2 * tokens * (1 + 2 * examples * tokens)


def bound_attempt(effort: SearchEffort, examples: int, tokens: int) -> int:
    """Down, more words at the weakest places, and down again."""
    sweep = 3 + (2 + 2 * examples * tokens if effort.at_once else examples * tokens)
    return 2 * (1 + effort.sweeps * (sweep + bound_moves(examples, tokens))) + 1 + WEAKEST


def bound_retries(effort: SearchEffort, examples: int, tokens: int) -> int:
    """From changed guesses: three changes are scored, and what came of all."""
    return (effort.rounds - 1) * (4 + bound_attempt(effort, examples, tokens))


def bound_words(effort: SearchEffort, examples: int, tokens: int) -> int:
    """A search begins, makes its attempts, settles ties, and looks at its guess without each
    word."""
    attempts = bound_attempt(effort, examples, tokens) + bound_retries(effort, examples, tokens)
    return 1 + attempts + 2 + bound_moves(examples, tokens) + 1


def bound_rematch(effort: SearchEffort, examples: int, tokens: int) -> int:
    """It begins in two ways, goes on from changed guesses, and ends with an attempt by all that
    is seen."""
    bounds = []
    for one in (replace(effort, at_once=False), replace(effort, at_once=True)):
        attempts = 3 * bound_attempt(one, examples, tokens) + bound_retries(one, examples, tokens)
        bounds.append(1 + bound_moves(examples, tokens) + 2 + attempts + 1)
    return max(bounds)


def bound_loop(loop: MatchingLoop, examples: int, tokens: int) -> int:
    """Of candidates and of slopes, under one hypothesis and (of a last search) one size."""
    scored = loop.steps + 1 + (2 if isinstance(loop.start, TwoStep) else 0)
    if loop.discrete is not None:
        rounds = loop.discrete.rounds_at_end or loop.steps // loop.discrete.every
        scored += rounds * (examples + (1 if loop.discrete.across and examples > 1 else 0))
    if loop.answer_by_prior is not None:
        scored += 2
    if loop.polish is not None:
        moves = loop.polish.moves if isinstance(loop.polish, WordPolish) else loop.polish
        scored += 1 + moves.rounds * examples
    if isinstance(loop.polish, WordPolish):
        scored += bound_rematch(loop.polish.effort, examples, tokens)
    return (1 + loop.restarts) * scored


class Falling(Energy):
    """An objective that is lower at every look: no search ends by itself."""

    calls = 0

    def score(self, batch: Batch, rows: slice) -> Tensor:
        Falling.calls += 1
        falls = -torch.arange(batch.mask[..., 0, 0].numel(), dtype=torch.float64).view(
            batch.mask.shape[:2]
        )
        embeddings = batch.embeddings
        assert embeddings is not None
        return falls - 1000.0 * Falling.calls + 0 * embeddings.square().sum((-1, -2, -3))

    def explains_all(self, batch: Batch, rows: slice, level: float) -> bool:
        return False


@pytest.mark.parametrize(
    "effort", [SearchEffort(sweeps=1, restarts=4), SearchEffort(sweeps=1, restarts=0, at_once=True)]
)
@pytest.mark.parametrize("texts", [["my red cat"], ["my dog", "the cat"]])
def test_a_search_over_words_ends_whatever_its_objective_does(
    effort: SearchEffort,
    texts: list[str],
    tiny: Target,
    observe: Observe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = lay_out(
        group_problems([observe(tiny, texts, [1] * len(texts))], EnergyAttack().assumptions)[0]
    )
    likely = rows.words[None, :8].repeat(1, 1)
    passes = counted(monkeypatch, WordSearch, "_plan_pass")
    energy = Falling([rows.problems[0].observation])
    bench = made(Bench, tiny)
    start = read_first_layer(rows, bench)
    search = WordSearch(rows, energy, bench, effort, (likely, likely), start)
    search.run()
    search.settle_ties()
    search.score_without_words(search.best)
    bound = bound_words(effort, *rows.mask.shape[1:])
    assert bound / 30 < passes[0] <= bound  # and the bound is no idle one


@pytest.mark.parametrize("batch", [0, 1])
def test_energy_ends_within_its_bound(
    batch: int, tiny: Target, observe: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = counted(monkeypatch, WordSearch, "_plan_pass")
    seen = batches_of(tiny, observe)[batch]
    attack = EnergyAttack(restarts=4, sweeps=2)
    attack.reconstruct([seen], made(Bench, tiny))
    assert seen.knows.lengths is not None
    assert (
        0
        < passes[0]
        <= bound_words(attack.effort, len(seen.knows.lengths), max(seen.knows.lengths))
    )


MATCHING: tuple[MatchingAttack, ...] = (
    Tag(steps=3),
    LampCos(steps=20, starts=3),
    LampCos(steps=80, starts=3, discrete="at_end", across=True),
    LampQuick(steps=3, starts=2, polish_rounds=3),
    LampPlus(steps=3, starts=2, polish_rounds=2, word_sweeps=1, word_restarts=4, restarts=0),
)


@pytest.mark.parametrize("attack", MATCHING, ids=lambda attack: attack.name)
def test_gradient_matching_ends_within_its_bound(
    attack: MatchingAttack, tiny: Target, observe: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [
        counted(monkeypatch, WordSearch, "_plan_pass"),
        counted(monkeypatch, SlopesInPieces, "__call__"),
    ]
    counts += [counted(monkeypatch, module, "score_in_passes") for module in (discrete, starts)]
    seen = batches_of(tiny, observe)[0]
    assert seen.knows.lengths is not None
    attack.reconstruct(limited(attack, [seen]), made(Bench, tiny))
    bound = bound_loop(attack.loop, 2, max(seen.knows.lengths))
    total = sum(count[0] for count in counts)
    assert total <= bound
    if attack.loop.polish is None:  # nothing stops before its time
        assert total == bound


def test_the_bound_of_a_last_search_holds_many_passes_more_than_its_moves() -> None:
    assert bound_rematch(SearchEffort(), 2, 7) > bound_attempt(SearchEffort(), 2, 7)


def test_a_climb_ends_within_its_bound(
    tiny: Target, observe: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = BagOfWords(steps=9, orders=8, repeats=4, labels="known")
    passes = counted(monkeypatch, OrderClimb, "measure_distances")
    attack.reconstruct(limited(attack, batches_of(tiny, observe)[:1]), made(Bench, tiny))
    # At first; for each sentence of every round and twice where rows begin anew; at last
    assert attack.steps < passes[0] <= 1 + attack.steps * (2 + 2) + 1


@pytest.mark.parametrize(
    "attack",
    [
        EnergyAttack(restarts=0, sweeps=1),
        LampCos(steps=3, starts=6),
        BagOfWords(steps=2, orders=8, repeats=8),
    ],
    ids=lambda attack: attack.name,
)
def test_little_memory_makes_more_pieces_and_the_same_guess(
    attack: Attack, tiny64: Target, observe: Observe, computed: list[Bench | None]
) -> None:
    seen, found, pieces = limited(attack, batches_of(tiny64, observe)), [], []
    for left in (1e12, 3e6):
        computed.clear()
        found.append(
            [guess.sentences for guess in attack.reconstruct(seen, made(Narrow, tiny64, left=left))]
        )
        pieces.append(len(computed))
    assert found[0] == found[1]
    assert pieces[1] > 2 * pieces[0]


@pytest.mark.parametrize(
    ("attack", "name"),
    [
        (EnergyAttack(), "The search over words"),
        (LampCos(), "Gradient matching"),
        (SpanContinuous(), "span_continuous"),
        (Span(), "span"),
    ],
    ids=lambda part: getattr(part, "name", ""),
)
def test_what_does_not_fit_even_once_is_refused_by_name(
    attack: Attack, name: str, tiny: Target, observe: Observe
) -> None:
    with pytest.raises(
        GradleakError,
        match=rf"^{name} needs about .* are left of the memory it may use. Allow more with",
    ):
        attack.reconstruct(
            limited(attack, batches_of(tiny, observe)), made(Narrow, tiny, left=10.0)
        )


def test_the_portfolio_goes_on_without_a_member_that_has_no_room(
    tiny: Target, observe: Observe
) -> None:
    seen = batches_of(tiny, observe)[:1]
    needed = Energy(seen).bytes(2, 7, slope=True)
    (found,) = Portfolio(restarts=0, steps=0).reconstruct(seen, made(Narrow, tiny, left=needed / 4))
    assert [stage.attack for stage in found.stages] == ["span"]


def saved_bytes(function: Callable[[], Tensor]) -> int:
    """What autograd keeps for the way back, every storage once."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = function()
    del kept
    return sum(sizes.values())


@pytest.mark.parametrize("architecture", ["Bert", "Roberta", "Albert", "GPT2", "Llama"])
@pytest.mark.parametrize("texts", [["the cat is red ."], ["the cat is red .", "my dog was bad !"]])
def test_a_candidate_takes_no_more_than_is_planned_for_it(
    architecture: str, texts: list[str], random_target: Callable[..., Target], observe: Observe
) -> None:
    target = random_target(architecture)
    seen = observe(target, texts, [1] * len(texts))
    assert seen.knows.lengths is not None
    # So many that the model's own tables weigh little
    shape, many = (len(texts), max(seen.knows.lengths)), 50
    batch = target.probe(shape[0], shape[1], torch.Generator().manual_seed(0))
    wide = Batch(
        embeddings=batch.embeddings.expand(1, many, -1, -1, -1).clone().requires_grad_(),  # type: ignore[union-attr]
        mask=batch.mask.expand(1, many, -1, -1),
        labels=batch.labels.expand(1, many, *batch.labels.shape),
    )
    for matcher in (for_observations([seen], Cosine()), for_observations([seen], L2L1())):
        kept = saved_bytes(lambda matcher=matcher: matcher.distances(wide, slice(0, 1)))
        assert (
            many * matcher.bytes(*shape, slope=True) / 20
            < kept
            < many * matcher.bytes(*shape, slope=True)
        )
    energy = Energy([seen])
    kept = saved_bytes(lambda: energy.score(wide, slice(0, 1)))
    assert (
        many * energy.bytes(*shape, slope=True) / 20
        < kept
        < many * energy.bytes(*shape, slope=True)
    )


def test_gradients_take_more_than_passes_and_slopes_more_than_scores(
    tiny: Target, observe: Observe
) -> None:
    seen = batches_of(tiny, observe)[:1]
    energy, matcher = Energy(seen), for_observations(seen, Cosine())
    assert isinstance(matcher, Matcher)
    costs = [
        energy.bytes(2, 7),
        energy.bytes(2, 7, slope=True),
        matcher.bytes(2, 7),
        matcher.bytes(2, 7, slope=True),
    ]
    assert costs[0] < costs[1] and costs[2] < costs[3] and matcher.bytes(2, 14) > 2 * costs[2]


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """How often a function is called from here on."""
    calls, whole = [0], getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return whole(*args, **kwargs)

    monkeypatch.setattr(owner, name, noted)
    return calls
