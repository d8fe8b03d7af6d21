"""How often anybody could be right at a word: an oracle that is told all the others decides it by
Bayes.

Told the labels, the length, the channel and every other word of the batch, the oracle takes the
likeliest word by prior × likelihood. For secrets drawn from the prior no function of the update,
and of no more side information than that, is right more often (docs/bounds.md). Its list of words
always holds the true one, and may leave others out: that only makes it right more often.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.prior import Prior
from gradleak.core.target import Vocabulary

# Nats that two words may differ by for no reason but rounding: such ties count as right
TIE = 1e-6
SCREENED = 2  # times the list's length that is looked at more closely

# log p(seen | each sentence, the rest of the batch), up to one number for all
Score = Callable[[Int[Tensor, "candidates tokens"]], Float[Tensor, "candidates"]]


@dataclass(frozen=True)
class WordList:
    """Words that may stand at one place, the true one first, and what the prior says of each, the
    rest of the sentence given."""

    words: Int[Tensor, "words"]
    log_prior: Float[Tensor, "words"]  # adds up to one over the list
    is_whole: bool  # no word that may stand there is left out


@dataclass(frozen=True)
class WordOdds:
    """What the oracle makes of one word; beside it, what it would without the update."""

    is_right: bool
    posterior: float  # of the true word
    largest: float  # of the word it takes: how often it is right, by its own account
    is_right_without: bool
    prior: float
    largest_prior: float
    is_whole: bool  # the list is the whole vocabulary

    @property
    def bits(self) -> float:
        """Returns how much likelier the update made the true word."""
        return (math.log(max(self.posterior, 1e-300)) - math.log(max(self.prior, 1e-300))) / (
            math.log(2)
        )


@dataclass(frozen=True)
class SentenceOdds:
    """What the oracle makes of every word of one secret."""

    words: tuple[WordOdds, ...]

    def mean(self, value: Callable[[WordOdds], float]) -> float:
        return sum(map(value, self.words)) / len(self.words)

    @property
    def is_right(self) -> bool:
        """Whether every word is right at once: where the likeliest sentence is the secret, each
        of its words is the likeliest at its place."""
        return all(word.is_right for word in self.words)

    @property
    def is_right_without(self) -> bool:
        return all(word.is_right_without for word in self.words)


@torch.no_grad()
def list_words(
    prior: Prior,
    vocabulary: Vocabulary,
    sentence: Int[Tensor, "tokens"],
    place: int,
    most: int | None,
) -> WordList:
    """Returns the words that the prior finds likeliest at one place, or all; the true one first.

    A list that is not whole is what stands out among twice as many, which a glance at what comes
    before chose.
    """
    allowed = vocabulary.allowed.nonzero()[:, 0]
    others = allowed[allowed != sentence[place]]
    is_whole = most is None or most > len(others)
    if most is not None and not is_whole:
        quick = prior.screen_words(sentence, place, others)
        others = others[quick.topk(min(SCREENED * most, len(others))).indices]
    words = torch.cat([sentence[place : place + 1], others])
    scores = prior.score_words(sentence, place, words).double()
    if most is not None and not is_whole:
        kept = torch.cat([scores.new_zeros(1).long(), 1 + scores[1:].topk(most - 1).indices])
        words, scores = words[kept], scores[kept]
    return WordList(words, scores.log_softmax(0), is_whole)


def decide(words: WordList, log_likelihood: Float[Tensor, "words"]) -> WordOdds:
    """Returns what Bayes makes of the update's likelihood for each word of a list."""
    posterior = (words.log_prior + log_likelihood.double()).log_softmax(0)
    return WordOdds(
        is_right=bool(posterior[0] >= posterior.max() - TIE),
        posterior=float(posterior[0].exp()),
        largest=float(posterior.max().exp()),
        is_right_without=bool(words.log_prior[0] >= words.log_prior.max() - TIE),
        prior=float(words.log_prior[0].exp()),
        largest_prior=float(words.log_prior.max().exp()),
        is_whole=words.is_whole,
    )


def free_places(vocabulary: Vocabulary, ids: Sequence[int], length: int) -> list[int]:
    """Returns the places of a framed sentence where a word of the client's stands."""
    first, last = len(vocabulary.prefix), length - len(vocabulary.suffix)
    return [place for place in range(first, last) if ids[place] not in vocabulary.specials]


@dataclass(frozen=True)
class SentenceLists:
    """The lists of all places of one example, and its sentence with each of their words."""

    words: tuple[WordList, ...]
    ids: Int[Tensor, "candidates tokens"]  # one list after the other


def list_sentences(
    batch: Batch,
    example: int,
    length: int,
    vocabulary: Vocabulary,
    prior: Prior,
    most: int | None,
) -> SentenceLists:
    """Returns the words that may stand at each place of an example's own."""
    if batch.ids is None:
        raise GradleakError("The oracle of words is for texts; this batch holds pictures.")
    row, words, ids = batch.ids[example], [], []
    for place in free_places(vocabulary, row.tolist(), length):
        words.append(list_words(prior, vocabulary, row[:length], place, most))
        ids.append(row.repeat(len(words[-1].words), 1))
        ids[-1][:, place] = words[-1].words
    if not words:
        raise GradleakError("A secret has no word of its own: only special tokens.")
    return SentenceLists(tuple(words), torch.cat(ids))


def decide_all(lists: SentenceLists, log_likelihood: Float[Tensor, "candidates"]) -> SentenceOdds:
    """Returns what Bayes makes of every word of one example."""
    pieces = torch.split(log_likelihood, [len(one.words) for one in lists.words])
    return SentenceOdds(
        tuple(decide(one, piece) for one, piece in zip(lists.words, pieces, strict=True))
    )


def ask_oracle(
    batch: Batch,
    example: int,
    length: int,
    vocabulary: Vocabulary,
    prior: Prior,
    score: Score,
    most: int | None,
) -> SentenceOdds:
    """Returns what the oracle makes of each word of one example of a batch; all that may stand
    at all its places is scored in one go."""
    lists = list_sentences(batch, example, length, vocabulary, prior, most)
    return decide_all(lists, score(lists.ids))
