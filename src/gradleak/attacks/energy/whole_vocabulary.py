"""Words through known Gaussian noise: every word of the vocabulary is a candidate at every place.

Noise of many times the gradient hides spans, and slopes point nowhere; the likelihood of whole
sentences (`matching/noisy_channel.py`) still knows the secret. Chains of sentences begin at draws
from the prior. At each place the words are tried that lexicon (`outlet.py`) and prior like best,
and the words of the other chains, by the likelihood of what comes after the last layer; then words
are exchanged, moved, and taken out while a likely one goes in elsewhere. The best chain is polished
in the same ways by the whole update and the prior. Work is counted in sentences scored, not in
seconds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.energy.outlet import (
    Budget,
    Chains,
    LateLikelihood,
    find_outlet,
    make_batch,
    read_lexicon,
)
from gradleak.attacks.search.matched import find_labels
from gradleak.core.attack import Bench, TokenIds
from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.matching.noisy_channel import Likelihood, NoisyChannel, read_channel

DRAWS = 32  # sentences of the prior, the best of which chains begin at
CHAINS = 4
SWEEPS = 4
ROUNDS = 8  # at most; each begins at other draws
WORDS = 32  # tried at a place because lexicon and prior like them
WIDE = 128  # the same for the last guess, where it is known to be wrong; and as many by lexicon
FEW = 256  # words that are all tried, where a vocabulary has no more
POOLED = 16  # and because other chains have them
# Standard deviations by which what the outlet is fed may miss what was seen of it
MISSES = 2.5
# By which draws of the prior miss it where it tells sentences apart
TELLS = 30.0
MOVED = 2  # chains whose words are moved after a sweep, and how often
CLEARED = 0.34  # of a chain's words that are drawn anew where another is the same
PAIRED, SECOND = 12, 8  # words tried at the first of two places, and at the second for each of them
FILLED = 6  # words tried in a gap
ASKED = 6  # sentences of which the prior is asked
WEIGHED = 8  # sentences at most that are held against the whole update at a place
WORTH = 0.01  # of all nats: no more is hoped of the whole update for one that lags behind so far
LEAST_WORTH = 20.0  # nats
EXACT = 4  # sentences by what comes after the last layer that one by the whole update costs
# The lexicon is wrong by about so much of all the nats there are
LEXICON_ERROR = 0.01


def read_known_noise(observation: Observation) -> NoisyChannel | None:
    """Returns the channel where the likelihood of one sentence of known length is known exactly."""
    knows = observation.knows
    if observation.target.labels_are_tokens or knows.batch_size != 1 or knows.lengths is None:
        return None
    try:
        return read_channel(knows.defenses or (), observation.protocol, 1)
    except GradleakError:
        return None


def can_search(observation: Observation) -> bool:
    """Returns whether the whole vocabulary can be searched through the noise."""
    if read_known_noise(observation) is None or observation.target.labels_are_open:
        return False
    return find_outlet(observation.target, tuple(observation.update.tensors)) is not None


def measure_visibility(observation: Observation) -> float:
    """Returns the square of the gradient that was seen, in spreads of the noise's own square."""
    tensors = observation.update.tensors.values()
    entries = sum(one.numel() for one in tensors)
    square = float(torch.stack([one.double().square().sum() for one in tensors]).sum())
    return (square / observation.noise_std**2 - entries) / math.sqrt(2 * entries)


# Sentences that are like a chain's, and by how much the prior is known to like each better
Change = Callable[[Chains], tuple[Tensor, Tensor | float]]


def measure_surprise(observation: Observation, batch: Batch) -> Float[Tensor, "examples"]:
    """Returns −log p(seen | sentence) in nats, up to one number for all; exactly."""
    channel = read_known_noise(observation)
    assert channel is not None
    assert batch.ids is not None
    return -Likelihood(observation, batch, 0, channel)(batch.ids)


@dataclass(frozen=True)
class Found:
    """The best sentence of a search, by the whole update and the prior."""

    sentence: TokenIds
    label: int
    score: float  # log-likelihood and log prior, in nats, up to one number for all
    has_failed: bool  # what was seen of the outlet is not met, where it tells sentences apart
    scored: int = 0  # sentences


class VocabularySearch:
    """Searches one observation."""

    def __init__(self, observation: Observation, bench: Bench, candidates: int) -> None:
        channel = read_known_noise(observation)
        outlet = find_outlet(observation.target, tuple(observation.update.tensors))
        assert channel is not None
        assert outlet is not None
        assert observation.knows.lengths is not None
        self.observation, self.bench, self.channel = observation, bench, channel
        self.target, self.prior, self.outlet = observation.target, bench.words, outlet
        self.length = observation.knows.lengths[0]
        frame, special = self.target.vocabulary.frame(self.length)
        self.frame = torch.tensor(frame, device=self.target.device)
        self.free = [place for place, fixed in enumerate(special) if not fixed]
        self.budget = Budget(candidates)
        self.late = LateLikelihood(observation, outlet, channel, self.budget)
        self.streams = bench.streams_of(observation).child("whole vocabulary")
        self.label, self.tells = 0, False

    @property
    def is_over(self) -> bool:
        return self.budget.left <= 0 or self.bench.out_of_time

    @torch.no_grad()
    def run(self, starts: Sequence[TokenIds] = ()) -> Found | None:
        """Returns the best sentence of several rounds; none where time ends before there is one.

        It ends when what was seen of the outlet is met and a round that began elsewhere finds
        nothing better.
        """
        lexicon = read_lexicon(self.target, self.outlet, self.bench)
        if lexicon is None or not self.free:
            return None
        self.lexicon, best = lexicon, None
        for number in range(ROUNDS):
            if number and self.is_over:
                break
            if best is not None:  # what is not known to be wrong is left to be found again
                starts = (best.sentence,) if best.has_failed else ()
            chains = self._begin(number, starts)
            generator = self.streams.child("order", number).generator()
            for _ in range(SWEEPS):
                if self.is_over:
                    break
                chains = self._sweep(chains, generator)
                if self._is_met(chains):
                    break
            found = self._polish(chains)
            self._report(found)
            if best is None or found.score > best.score:
                best = found
            elif not best.has_failed:
                break
        return best and replace(best, scored=self.budget.spent)

    def _report(self, found: Found) -> None:
        spent, whole = self.budget.spent, self.budget.spent + max(0, self.budget.left)
        texts = [self.target.decode(found.sentence)]
        self.bench.progress.report(spent, whole, -found.score, texts)

    def _begin(self, number: int, starts: Sequence[TokenIds]) -> Chains:
        """Returns chains at the likeliest of the prior's draws, with the label that they say."""
        streams = [self.streams.child("draw", number, place) for place in range(DRAWS)]
        drawn = self.prior.draw([self.length] * DRAWS, streams)
        ids = torch.tensor([*drawn, *map(list, starts)], device=self.target.device)
        if number == 0:
            known = find_labels(self.observation)
            labels = range(self.target.classes) if known is None else known[:1]
            tried = {label: self.late(ids, label) for label in labels}
            self.label = max(tried, key=lambda label: float(tried[label].nats.max()))
            chains = tried[self.label]
            self.tells = float(chains.misses.median()) > TELLS
        else:
            chains = self.late(ids, self.label)
        return chains.take(chains.nats.topk(min(CHAINS, len(ids))).indices)

    # Chains, by what comes after the last layer

    def _sweep(self, chains: Chains, generator: torch.Generator) -> Chains:
        turns = torch.randperm(len(self.free), generator=generator).tolist()
        for place in (self.free[turn] for turn in turns):
            if self.is_over:
                return chains
            chains = self._try_words(chains, place, generator)
        order = chains.nats.argsort(descending=True)
        moved = [self._move_words(chains.take(row[None])) for row in order[:MOVED]]
        moved[0] = self._refill(moved[0])
        return self._part(join([*moved, chains.take(order[MOVED:])]), generator)

    def _part(self, chains: Chains, generator: torch.Generator) -> Chains:
        """Returns chains of which no two are the same: a third of a repeated one's words is drawn
        anew."""
        _, back = torch.unique(chains.ids, dim=0, return_inverse=True)
        repeated = [row for row in range(len(back)) if bool((back[:row] == back[row]).any())]
        if not repeated or self.is_over:
            return chains
        name = int(torch.randint(2**31, (1,), generator=generator))
        streams = [self.streams.child("part", name, row) for row in repeated]
        drawn = torch.tensor(self.prior.draw([self.length] * len(repeated), streams))
        gone = torch.rand(drawn.shape, generator=generator) < CLEARED
        places = torch.tensor(repeated)
        ids = torch.where(gone.to(chains.ids.device), drawn.to(chains.ids), chains.ids[places])
        kept = torch.tensor([row for row in range(len(back)) if row not in repeated])
        return join([chains.take(kept), self.late(ids, self.label)])

    def _propose(
        self, chains: Chains, place: int, pool: Int[Tensor, "pool"], wide: bool = False
    ) -> tuple[Int[Tensor, "chains words"], Float[Tensor, "chains words"]]:
        """Returns words for a place, those that are there first, and the prior's nats of each given
        what stands before it."""
        lexicon, now = self.lexicon, chains.ids[:, place]
        before = self._read_before(chains.ids, place)
        gains = lexicon.shift(chains.slopes, chains.curvatures, now)
        liked = gains / self._spread(chains) + before[:, lexicon.words]
        count = liked.shape[1] if liked.shape[1] <= FEW else WIDE if wide else WORDS
        best = lexicon.words[liked.topk(count, dim=1).indices]
        if wide:  # what the prior did not expect here may be what is missing
            best = torch.cat([best, lexicon.words[gains.topk(count, dim=1).indices]], dim=1)
        words = torch.cat([now[:, None], best, pool.expand(len(now), -1)], dim=1)
        return words, before.gather(1, words)

    def _spread(self, chains: Chains) -> Float[Tensor, "chains 1"]:
        return (LEXICON_ERROR * chains.nats[:, None]).clamp_min(1.0)

    def _read_before(self, ids: Int[Tensor, "chains tokens"], place: int) -> Tensor:
        """Returns log-likelihoods of every word at a place; evenly where a prior does not write."""
        found = self.prior.next_words(ids[:, :place]) if place else None
        if found is None:
            return torch.zeros(len(ids), len(self.target.vocabulary.allowed), device=ids.device)
        return found

    def _try_words(self, chains: Chains, place: int, generator: torch.Generator) -> Chains:
        """Puts at one place of each chain the word that is best with what stands before it."""
        pool = torch.unique(chains.ids[:, self.free])
        pool = pool[torch.randperm(len(pool), generator=generator)[:POOLED].to(pool.device)]
        words, before = self._propose(chains, place, pool)
        tried = self.late(put(chains.ids, place, words), self.label)
        scores = tried.nats.view(words.shape) + before
        chosen = scores.argmax(1) + words.shape[1] * torch.arange(len(words), device=words.device)
        return tried.take(chosen)

    def _move_words(self, chain: Chains) -> Chains:
        for _ in range(MOVED):
            if self.is_over:
                break
            better = self._choose(chain, list_moves(chain.ids[0], self.free))
            if better is None:
                break
            chain = better
        return chain

    def _refill(self, chain: Chains) -> Chains:
        """Takes each word out in turn and tries likely ones in the gap that is opened elsewhere."""
        if self.is_over:
            return chain
        better = self._choose(chain, self._list_refilled(chain.ids[0]))
        return chain if better is None else better

    def _list_refilled(self, ids: Int[Tensor, "tokens"]) -> Int[Tensor, "changed tokens"]:
        first, last = self.free[0], self.free[-1]
        shorter = torch.stack([torch.cat([ids[:place], ids[place + 1 :]]) for place in self.free])
        made = []
        for place in range(first, last + 1):
            # Whichever later word is taken out, the same stands before
            starts, back = torch.unique(shorter[:, :place], dim=0, return_inverse=True)
            before = self._read_before(starts, place)[:, self.lexicon.words]
            likely = self.lexicon.words[before.topk(min(FILLED, before.shape[1]), dim=1).indices]
            for words in likely[back].T:
                made.append(torch.cat([shorter[:, :place], words[:, None], shorter[:, place:]], 1))
        return torch.cat(made)

    def _choose(self, chain: Chains, ids: Int[Tensor, "changed tokens"]) -> Chains | None:
        """Returns the best of changed sentences, by the prior too, where it is better."""
        if not len(ids):
            return None
        tried = self.late(ids, self.label)
        ahead = tried.take(tried.nats.topk(min(ASKED, len(ids))).indices)
        scores = torch.cat([chain.nats, ahead.nats]) - self._weigh_prior(
            torch.cat([chain.ids, ahead.ids])
        )
        best = int(scores.argmax())
        return None if best == 0 else ahead.take(torch.tensor([best - 1]))

    def _weigh_prior(self, ids: Int[Tensor, "sentences tokens"]) -> Float[Tensor, "sentences"]:
        """Returns the prior's nats of whole sentences, as the attack's penalty counts them."""
        lengths = torch.full((len(ids),), ids.shape[1], device=ids.device)
        return self.prior.nll(ids, lengths).double() * ids.shape[1]

    # Polish, by the whole update

    def _is_met(self, chains: Chains) -> bool:
        """Returns whether the likeliest chain meets what was seen of the outlet."""
        return self.tells and float(chains.misses[chains.nats.argmax()]) < MISSES

    def _polish(self, chains: Chains) -> Found:
        """Improves the best chain word by word and by moves, until nothing helps."""
        best = (chains.nats - self._weigh_prior(chains.ids)).argmax()
        chain = chains.take(best[None])
        batch = make_batch(self.target, chain.ids, self.label)
        likelihood = Likelihood(self.observation, batch, 0, self.channel)
        score = float(self._weigh(chain.ids, likelihood))
        for _ in range(SWEEPS):
            before = score
            for change in self._list_changes():
                if self.is_over:
                    break
                chain, score = self._improve(chain, score, change, likelihood)
            if score <= before or self.is_over:
                break
        sentence = tuple(chain.ids[0].tolist())
        return Found(sentence, self.label, score, self.tells and not self._is_met(chain))

    def _list_changes(self) -> Sequence[Change]:
        return [
            *(partial(self._list_words, place=place) for place in self.free),
            *(partial(self._list_pairs, place=place) for place in self.free[:-1]),
            lambda chain: (list_moves(chain.ids[0], self.free), 0.0),
            lambda chain: (self._list_refilled(chain.ids[0]), 0.0),
        ]

    def _list_words(self, chain: Chains, place: int) -> tuple[Tensor, Tensor | float]:
        is_wrong = self.tells and not self._is_met(chain)
        words, before = self._propose(chain, place, chain.ids[0, :0], wide=is_wrong)
        return put(chain.ids, place, words[:, 1:]), (before - before[:, :1])[0, 1:]

    def _list_pairs(self, chain: Chains, place: int) -> tuple[Tensor, Tensor]:
        """Returns the sentence with two words in a row exchanged for others."""
        words, before = self._propose(chain, place, chain.ids[0, :0])
        count = min(1 + PAIRED, words.shape[1])
        first, after = put(chain.ids, place, words[:, :count]), place + 1
        second = self._read_before(first, after)
        gains = self.lexicon.shift(chain.slopes, chain.curvatures, chain.ids[:, after])
        liked = gains / self._spread(chain) + second[:, self.lexicon.words]
        count = min(SECOND, liked.shape[1])
        others = self.lexicon.words[liked.topk(count, dim=1).indices]
        made = first[:, None].repeat(1, count, 1)
        made[:, :, after] = others
        likelier = (before - before[:, :1])[0, : len(first), None] + second.gather(1, others)
        likelier = likelier - second[0, chain.ids[0, after]]
        return made[1:].flatten(0, 1), likelier[1:].flatten()

    def _improve(
        self, chain: Chains, score: float, change: Change, likelihood: Likelihood
    ) -> tuple[Chains, float]:
        """Takes the best of some changed sentences by the whole update, if it is better."""
        ids, likelier = change(chain)
        if not len(ids):
            return chain, score
        tried = self.late(ids, self.label)
        ahead = tried.nats + likelier
        best = ahead.topk(min(WEIGHED, len(ids))).indices
        hoped = max(LEAST_WORTH, WORTH * float(chain.nats))
        best = best[ahead[best] > chain.nats - hoped]
        if not len(best):
            return chain, score
        found = self._weigh(ids[best], likelihood)
        if float(found.max()) <= score:
            return chain, score
        return tried.take(best[found.argmax()][None]), float(found.max())

    def _weigh(self, ids: Tensor, likelihood: Likelihood) -> Float[Tensor, "sentences"]:
        self.budget.spend(EXACT * len(ids))
        return likelihood(ids) - self._weigh_prior(ids)


def put(
    ids: Int[Tensor, "chains tokens"], place: int, words: Int[Tensor, "chains words"]
) -> Int[Tensor, "all tokens"]:
    """Returns every chain with each of its words at a place."""
    made = ids[:, None].repeat(1, words.shape[1], 1)
    made[:, :, place] = words
    return made.flatten(0, 1)


def list_moves(ids: Int[Tensor, "tokens"], free: Sequence[int]) -> Int[Tensor, "changed tokens"]:
    """Returns a sentence with any two words exchanged, and with any word moved elsewhere."""
    orders = []
    for one in free:
        for other in free:
            order = list(range(len(ids)))
            if one < other:
                exchanged = list(order)
                exchanged[one], exchanged[other] = other, one
                orders.append(exchanged)
            if abs(one - other) > 1:  # of neighbours that is the exchange
                order.insert(other, order.pop(one))
                orders.append(order)
    if not orders:
        return ids[None][:0]
    return ids[torch.tensor(orders, device=ids.device)]


def join(chains: Sequence[Chains]) -> Chains:
    return Chains(
        torch.cat([one.ids for one in chains]),
        torch.cat([one.nats for one in chains]),
        torch.cat([one.fed for one in chains]),
        torch.cat([one.slopes for one in chains]),
        torch.cat([one.curvatures for one in chains]),
    )
