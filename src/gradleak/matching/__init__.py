"""The gradient engine: distances between an observed update and the gradients of candidate
batches, many at once."""

from gradleak.matching.distances import L2L1, Cosine, Distance, SquaredL2
from gradleak.matching.factored import for_observations
from gradleak.matching.matcher import Matcher, distance_of_nothing

__all__ = [
    "L2L1",
    "Cosine",
    "Distance",
    "Matcher",
    "SquaredL2",
    "distance_of_nothing",
    "for_observations",
]
