"""What a search that is not told the other words is held against: a chain of guesses that starts at
the truth.

For a secret drawn from the prior the secret is itself one draw from the posterior, given what was
seen. A Gibbs chain that starts there therefore stays in the posterior at every step, and the share
of words in which it agrees with the truth falls, step by step, towards that of two independent
draws (bidirectional Monte Carlo: Grosse, Ghahramani & Adams 2015). Two draws agree at a place with
probability Σ p², so that the likeliest word is right with probability max p ≤ √Σ p².
"""

import math
from collections.abc import Iterable

import torch
from jaxtyping import Int
from torch import Tensor

from gradleak.bounds.oracle import Score, list_words
from gradleak.core.prior import Prior, pick
from gradleak.core.target import Vocabulary


@torch.no_grad()
def walk_chain(
    sentence: Int[Tensor, "tokens"],
    length: int,
    places: Iterable[int],
    vocabulary: Vocabulary,
    prior: Prior,
    score: Score,
    sweeps: int,
    generator: torch.Generator,
) -> list[float]:
    """Returns the share of a sentence's own words that a chain started at it still has after each
    sweep over the places. What stands after its length is padding.

    Every word of the vocabulary is a candidate at each step: with shorter lists the chain would
    not stay in the posterior.
    """
    order, now, shares = list(places), sentence.clone(), []
    for _ in range(sweeps):
        for place in order:
            words = list_words(prior, vocabulary, now[:length], place, None)
            ids = now.repeat(len(words.words), 1)
            ids[:, place] = words.words
            weights = (words.log_prior + score(ids).double()).softmax(0)
            drawn = pick(weights[None], torch.rand(1, generator=generator))
            now[place] = words.words[int(drawn)]
        same = (now[order] == sentence[order]).double()
        shares.append(float(same.mean()))
    return shares


def ceiling_of(agreement: float) -> float:
    """Returns the most words that anybody can have right in the mean, from such a chain's mean
    agreement after any number of sweeps."""
    return math.sqrt(min(max(agreement, 0.0), 1.0))
