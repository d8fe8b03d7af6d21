"""An answer from what an update says outright: its words, in an order that is likely beforehand. No search for a match."""

from collections.abc import Sequence

from gradleak.attacks import evidence
from gradleak.attacks.search.likelihood import order_by_prior
from gradleak.core.attack import Bench, Sentences
from gradleak.core.observation import Observation

MOST = 20_000  # words times places: for more the prior is not asked for an order


def say_outright(observation: Observation, bench: Bench) -> Sentences | None:
    """Sentences made of the words whose rows of the word embeddings moved; none where those are not seen."""
    words = evidence.bag_of_words(observation)
    if words is None or not words.values:
        return None
    lengths = _lengths(observation, len(words.values))
    if not bench.out_of_time and len(words.values) * sum(lengths) <= MOST:
        return order_by_prior(bench.prior, observation.target, words.values, lengths, beams=1)
    return _in_turn(observation, words.values, lengths)


def say_nothing(observation: Observation) -> Sentences:
    """As many sentences as there are known to be, without a word in them."""
    vocabulary = observation.target.vocabulary
    return ((*vocabulary.prefix, *vocabulary.suffix),) * (observation.knows.batch_size or 1)


def _lengths(observation: Observation, words: int) -> Sequence[int]:
    """As known, or as long as the positions say, or with room for every word once."""
    if observation.knows.lengths is not None:
        return observation.knows.lengths
    size, vocabulary = observation.knows.batch_size or 1, observation.target.vocabulary
    longest = evidence.longest_length(observation)
    if longest is not None:
        return longest.values * size
    return (-(-words // size) + len(vocabulary.prefix) + len(vocabulary.suffix),) * size


def _in_turn(observation: Observation, words: Sequence[int], lengths: Sequence[int]) -> Sentences:
    vocabulary = observation.target.vocabulary
    sentences, at = [], 0
    for length in lengths:
        frame, fixed = vocabulary.frame(length)
        for place in range(length):
            if not fixed[place]:
                frame[place], at = words[at % len(words)], at + 1
        sentences.append(tuple(frame))
    return tuple(sentences)
