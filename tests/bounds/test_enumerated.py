"""Where every sentence can be listed: what the bounds say against what is so.

A tiny model, few words, three places: secrets and noise are drawn from the prior and the channel,
and Bayes is done by brute force over all sentences.
"""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from gradleak.bounds.ceiling import ceiling_of, walk_chain
from gradleak.bounds.information import most_bits, most_success
from gradleak.bounds.oracle import SentenceOdds, ask_oracle
from gradleak.core.batch import Batch
from gradleak.core.defense import protect_in_turn
from gradleak.core.observation import Knowledge, Observation, Round
from gradleak.core.prior import Prior
from gradleak.core.streams import Streams
from gradleak.core.target import Target, Vocabulary
from gradleak.core.update import Update
from gradleak.defenses.differential_privacy import DpSgd
from gradleak.matching.noisy_channel import Likelihood, NoisyChannel, read_channel
from gradleak.protocols.fedsgd import FedSGD
from gradleak.targets.tiny import Tiny

PLACES = 3
SPREADS = 4.0  # standard errors that two means may differ by


class Pairs(Prior):
    """Each word depends on the one before it; everything is drawn once, from a seed."""

    def __init__(self, words: Tensor, frame: tuple[Tensor, Tensor]) -> None:
        generator = torch.Generator().manual_seed(5)
        self.words, (self.prefix, self.suffix) = words, frame
        table = 1.5 * torch.randn(len(words) + 1, len(words), generator=generator).double()
        self.table = table.log_softmax(1)  # the last row begins a sentence
        self.rank = torch.full((int(words.max()) + 1,), -1)
        self.rank[words] = torch.arange(len(words))

    def log_probability(self, ids: Tensor) -> Tensor:
        ranks = self.rank[ids[:, len(self.prefix) : ids.shape[1] - len(self.suffix)]]
        before = torch.cat([torch.full_like(ranks[:, :1], len(self.words)), ranks[:, :-1]], dim=1)
        return self.table[before, ranks].sum(1)

    def nll(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return -self.log_probability(ids) / lengths

    def likely(self, length: int, streams: Streams) -> list[int]:
        raise NotImplementedError

    def draw(self, lengths, streams):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def likely_length(self) -> int:
        return PLACES


@dataclass(frozen=True, eq=False)
class World:
    """All sentences, what each would send, and how likely each is."""

    target: Target
    vocabulary: Vocabulary
    prior: Pairs
    ids: Tensor  # [sentences, tokens]
    means: Tensor  # [sentences, entries], clipped
    log_prior: Tensor
    std: float
    defense: DpSgd

    @property
    def ranks(self) -> Tensor:
        first = len(self.vocabulary.prefix)
        return self.prior.rank[self.ids[:, first : first + PLACES]]

    def number(self, ids: Tensor) -> Tensor:
        """The numbers of sentences."""
        first = len(self.vocabulary.prefix)
        ranks = self.prior.rank[ids[:, first : first + PLACES]]
        powers = len(self.prior.words) ** torch.arange(PLACES - 1, -1, -1)
        return (ranks * powers).sum(1)

    def draw(self, generator: torch.Generator) -> tuple[int, Tensor]:
        """A secret, and the log-likelihood of every sentence under what it sent."""
        truth = int(torch.multinomial(self.log_prior.exp(), 1, generator=generator))
        noise = torch.randn(self.means.shape[1], generator=generator, dtype=torch.float64)
        seen = self.means[truth] + self.std * noise
        inner = self.means @ seen
        return truth, (inner - self.means.square().sum(1) / 2) / self.std**2


def make_world(words: int, noise_multiplier: float) -> World:
    target = Tiny(layers=1, hidden=8, heads=1).open(torch.device("cpu"), torch.float64)
    whole = target.vocabulary
    chosen = whole.allowed.nonzero()[:, 0][:words]
    allowed = torch.zeros_like(whole.allowed)
    allowed[chosen] = True
    vocabulary = replace(whole, allowed=allowed)
    frame = torch.tensor(whole.prefix), torch.tensor(whole.suffix)
    prior = Pairs(chosen, frame)
    sentences = [
        [*whole.prefix, *one, *whole.suffix]
        for one in itertools.product(chosen.tolist(), repeat=PLACES)
    ]
    ids = torch.tensor(sentences)
    defense = DpSgd(clip=0.5, noise_multiplier=noise_multiplier)
    quiet = [defense.without_noise()]
    nobody = [Streams.root("nobody", 0)]
    rows = []
    for sentence in ids:
        sent = FedSGD().update(target, make_batch(sentence)[None], per_example=True)
        sent = protect_in_turn(quiet, sent, nobody)
        rows.append(flatten(target, ids, sent))
    log_prior = prior.log_probability(ids)
    assert float(log_prior.exp().sum()) == pytest.approx(1)
    return World(
        target,
        vocabulary,
        prior,
        ids,
        torch.stack(rows),
        log_prior,
        0.5 * noise_multiplier,
        defense,
    )


def flatten(target: Target, ids: Tensor, sent: Update) -> Tensor:
    """Everything that any of these sentences moves, in one row: noise elsewhere tells nothing."""
    moved = {
        **dict.fromkeys(target.groups["word_embedding"], ids.unique()),
        **dict.fromkeys(target.groups["position_embedding"], torch.arange(ids.shape[1])),
    }
    return torch.cat(
        [
            (tensor[0][moved[name]] if name in moved else tensor[0]).flatten()
            for name, tensor in sent.tensors.items()
        ]
    )


def make_batch(sentence: Tensor) -> Batch:
    ids = sentence[None]
    return Batch(ids=ids, mask=torch.ones_like(ids).bool(), labels=torch.zeros(1).long())


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(words=5, noise_multiplier=0.02)


@dataclass(frozen=True)
class Draws:
    """What came of many draws: shares of right words of everybody, one number a draw."""

    oracle: Tensor
    oracle_sure: Tensor
    oracle_whole: Tensor
    bayes: Tensor
    map_whole: Tensor
    climber: Tensor
    blind: Tensor
    bits: Tensor
    chains: Tensor  # [draws, sweeps]
    odds: list[SentenceOdds]


def run_draws(world: World, count: int) -> Draws:
    generator = torch.Generator().manual_seed(11)
    words = len(world.prior.words)
    ranks = world.ranks
    blind = ranks[world.log_prior.argmax()]
    found: dict[str, list[float]] = {
        name: []
        for name in "oracle oracle_sure oracle_whole bayes map_whole climber blind bits".split()
    }
    odds, chains = [], []
    for _ in range(count):
        truth, likelihood = world.draw(generator)
        joint = world.log_prior + likelihood
        posterior = joint.softmax(0)

        def score(ids: Tensor, likelihood: Tensor = likelihood) -> Tensor:
            return likelihood[world.number(ids)]

        told = ask_oracle(
            make_batch(world.ids[truth]),
            0,
            world.ids.shape[1],
            world.vocabulary,
            world.prior,
            score,
            None,
        )
        odds.append(told)
        right = ranks[truth]
        shares = torch.stack(
            [
                torch.zeros(words).double().index_add(0, ranks[:, p], posterior)
                for p in range(PLACES)
            ]
        )
        climbed = climb(world, joint, generator)
        found["oracle"].append(told.mean(lambda word: word.is_right))
        found["oracle_sure"].append(told.mean(lambda word: word.largest))
        found["oracle_whole"].append(float(told.is_right))
        found["bayes"].append(agree(shares.argmax(1), right))
        found["map_whole"].append(float(int(joint.argmax()) == truth))
        found["climber"].append(agree(ranks[climbed], right))
        found["blind"].append(agree(blind, right))
        evidence = joint.logsumexp(0)
        found["bits"].append(float(likelihood[truth] - evidence) / math.log(2))
        chains.append(
            walk_chain(
                world.ids[truth],
                world.ids.shape[1],
                range(len(world.vocabulary.prefix), len(world.vocabulary.prefix) + PLACES),
                world.vocabulary,
                world.prior,
                score,
                sweeps=4,
                generator=generator,
            )
        )
    return Draws(
        **{name: torch.tensor(values).double() for name, values in found.items()},
        chains=torch.tensor(chains).double(),
        odds=odds,
    )


def climb(world: World, joint: Tensor, generator: torch.Generator) -> int:
    """An attack that knows no more than the update: word after word from a random start."""
    words = len(world.prior.words)
    at = int(torch.randint(len(joint), (1,), generator=generator))
    powers = [words**power for power in range(PLACES)]
    for _ in range(4):
        for power in powers:
            digit = at // power % words
            options = [at + (other - digit) * power for other in range(words)]
            at = max(options, key=lambda one: float(joint[one]))
    return at


def agree(one: Tensor, other: Tensor) -> float:
    return float((one == other).double().mean())


def is_at_most(less: Tensor, more: Tensor) -> bool:
    """Of means over the same draws, up to chance."""
    excess = less - more
    return float(excess.mean()) <= SPREADS * float(excess.std()) / math.sqrt(len(excess)) + 1e-9


def check(world: World, draws: Draws) -> None:
    """Everything that docs/bounds.md says of these numbers."""
    assert is_at_most(draws.bayes, draws.oracle)
    assert is_at_most(draws.climber, draws.oracle)
    assert is_at_most(draws.blind, draws.oracle)
    assert is_at_most(draws.climber, draws.bayes)
    # Word for word in every single draw: the likeliest sentence being right makes the oracle right
    assert bool((draws.map_whole <= draws.oracle_whole).all())
    # By its own account the oracle is right as often as it is
    assert is_at_most(draws.oracle, draws.oracle_sure)
    assert is_at_most(draws.oracle_sure, draws.oracle)
    words = [word for one in draws.odds for word in one.words]
    sure = [word for word in words if word.largest > 0.7]
    unsure = [word for word in words if word.largest <= 0.7]
    for some in (sure, unsure):
        assert len(some) > 20
        gaps = torch.tensor([word.largest - float(word.is_right) for word in some]).double()
        assert abs(float(gaps.mean())) <= SPREADS * float(gaps.std()) / math.sqrt(len(gaps))
    # The chain that starts at the truth forgets it; its agreement bounds what Bayes gets
    for before, after in itertools.pairwise(range(draws.chains.shape[1])):
        assert is_at_most(draws.chains[:, after], draws.chains[:, before])
    means = draws.chains.mean(0)
    assert float(draws.bayes.mean()) <= ceiling_of(float(means[-1])) + SPREADS * float(
        draws.bayes.std()
    ) / math.sqrt(len(draws.bayes))
    # Information: by brute force, by the spread of what is sent, and by the clip
    told = float(draws.bits.mean())
    error = SPREADS * float(draws.bits.std()) / math.sqrt(len(draws.bits))
    weights = world.log_prior.exp()
    centre = weights @ world.means
    spread = weights @ (world.means - centre).square().sum(1)
    measured = most_bits(math.sqrt(float(spread)) / world.std)
    clipped = most_bits(world.defense.clip / world.std)
    assert told - error <= measured <= clipped + 1e-9
    # Both guarantees, from what the blind guess gets
    chance = float(world.log_prior.exp().max())
    shift = world.defense.clip / world.std
    assert float(draws.map_whole.mean()) <= most_success(chance, shift) + 3 / math.sqrt(
        len(draws.bayes)
    )


def test_everybody_stays_under_the_bounds_where_all_can_be_listed(world: World) -> None:
    draws = run_draws(world, 120)
    check(world, draws)
    # The setting is one in which the update tells something, and not everything
    assert 0.5 < float(draws.bits.mean()) < 4
    without = torch.tensor([one.mean(lambda word: word.is_right_without) for one in draws.odds])
    assert float(without.mean()) + 0.05 < float(draws.oracle.mean()) < 0.98


@pytest.mark.long
def test_the_same_with_20_words_and_1000_draws() -> None:
    world = make_world(words=20, noise_multiplier=0.01)
    draws = run_draws(world, 1000)
    for name in "blind climber bayes oracle oracle_sure map_whole oracle_whole bits".split():
        print(f"{name}: {float(getattr(draws, name).mean()):.3f}")
    print("chain, by sweep:", [round(float(one), 3) for one in draws.chains.mean(0)])
    check(world, draws)


def test_the_kernel_and_the_list_of_all_sentences_give_one_oracle(world: World) -> None:
    truth = 77 % len(world.ids)
    batch = make_batch(world.ids[truth])
    rngs = [Streams.root("client", 3)]
    sent = FedSGD().update(world.target, batch[None], per_example=True)
    sent = protect_in_turn([world.defense], sent, rngs)
    knows = Knowledge(batch.labels, (len(world.ids[truth]),), 1, (world.defense,))
    seen = Observation(0, (Round(world.target, sent),), knows, FedSGD())
    channel = read_channel((world.defense,), seen.protocol, 1)
    flat = flatten(world.target, world.ids, sent)
    likelihood = (world.means @ flat - world.means.square().sum(1) / 2) / world.std**2

    def list_all(ids: Tensor) -> Tensor:
        return likelihood[world.number(ids)]

    asked = [
        ask_oracle(batch, 0, world.ids.shape[1], world.vocabulary, world.prior, score, None)
        for score in (Likelihood(seen, batch, 0, channel), list_all)
    ]
    for one, other in zip(asked[0].words, asked[1].words, strict=True):
        assert one.posterior == pytest.approx(other.posterior, abs=1e-9)
        assert one.largest == pytest.approx(other.largest, abs=1e-9)
        assert one.is_right == other.is_right


@pytest.mark.parametrize("most", [2, 3])
def test_a_shorter_list_never_makes_the_oracle_less_right(world: World, most: int) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(10):
        truth, likelihood = world.draw(generator)
        whole, short = (
            ask_oracle(
                make_batch(world.ids[truth]),
                0,
                world.ids.shape[1],
                world.vocabulary,
                world.prior,
                lambda ids, likelihood=likelihood: likelihood[world.number(ids)],
                count,
            )
            for count in (None, most)
        )
        for one, other in zip(whole.words, short.words, strict=True):
            assert other.is_right >= one.is_right
            assert not other.is_whole
            assert one.is_whole


@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("points", [2, 3, 10])
def test_the_guarantee_holds_for_the_best_attack_on_few_points(
    points: int, noise_multiplier: float
) -> None:
    generator = torch.Generator().manual_seed(points)
    # As far apart as a clip at one allows: the corners of a simplex
    corners = torch.eye(points).double() - 1 / points
    corners /= corners.norm(dim=1, keepdim=True)
    truths = torch.randint(points, (40_000,), generator=generator)
    noise = torch.randn(40_000, points, generator=generator, dtype=torch.float64)
    seen = corners[truths] + noise_multiplier * noise
    right = float(((seen @ corners.T).argmax(1) == truths).double().mean())
    most = most_success(1 / points, 1 / noise_multiplier)
    error = SPREADS * 0.5 / math.sqrt(40_000)
    assert right <= most + error
    if points == 2:  # nothing better can be said: two opposite points reach it
        assert right == pytest.approx(most, abs=error)


def test_many_rounds_are_one_with_less_noise() -> None:
    once, often = NoisyChannel(1.0, 1.0), NoisyChannel(1.0 / math.sqrt(9), 1.0)
    shifts = [channel.clip / channel.noise_std for channel in (once, often) if channel.clip]
    assert most_bits(shifts[1]) == pytest.approx(9 * most_bits(shifts[0]))
    assert most_success(0.1, 0.0) == pytest.approx(0.1)
    assert most_success(0.1, shifts[1]) > most_success(0.1, shifts[0]) > 0.1
    assert most_success(0.0, 1.0) == 0.0
    assert most_success(1.0, 1.0) == 1.0
