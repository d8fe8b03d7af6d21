"""What the update says outright, each with how exact it is: read in milliseconds, before any search."""

from gradleak.attacks.evidence.finding import Finding
from gradleak.attacks.evidence.labels import labels
from gradleak.attacks.evidence.lengths import distinct_tokens, longest_length
from gradleak.attacks.evidence.words import bag_of_words, special_tokens
from gradleak.core.observation import Observation

__all__ = ["Finding", "bag_of_words", "distinct_tokens", "findings", "labels", "longest_length", "special_tokens"]

READERS = (labels, longest_length, distinct_tokens, bag_of_words, special_tokens)


def findings(observation: Observation) -> tuple[Finding, ...]:
    """Everything that can be read; what is not seen, or cannot be told from rounding or noise, is left out."""
    return tuple(found for read in READERS if (found := read(observation)) is not None)
