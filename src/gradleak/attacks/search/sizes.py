"""Which guesses are searched together: more places mean more candidates, which short ones need not share."""

import math
from collections.abc import Sequence

from gradleak.attacks.search.rows import Problem

ALIKE = 1.35  # numbers of tokens within this ratio are searched together
FAR_ALIKE = 1.8  # the same where a pass costs more than what is in it


def size_of(problem: Problem, ratio: float = ALIKE) -> int:
    """The same number for problems of about as many tokens."""
    return math.ceil(math.log(sum(problem.hypothesis.lengths), ratio))


def by_size(groups: Sequence[Sequence[Problem]]) -> list[list[Problem]]:
    """Problems of about the same number of tokens together, each group by itself."""
    sized: dict[tuple[int, int], list[Problem]] = {}
    for number, group in enumerate(groups):
        for problem in group:
            sized.setdefault((number, size_of(problem)), []).append(problem)
    return list(sized.values())


def places_by_size(problems: Sequence[Problem]) -> list[list[int]]:
    """Where problems of roughly the same number of tokens stand."""
    sized: dict[int, list[int]] = {}
    for place, problem in enumerate(problems):
        sized.setdefault(size_of(problem, FAR_ALIKE), []).append(place)
    return list(sized.values())
