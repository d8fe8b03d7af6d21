"""Putting words together to sentences where a token sees only those before it: prefixes grow word by word.

What a deeper layer is fed at a position depends on the prefix alone, so a wrong word shows at once.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.span.checks import Check, Sentence
from gradleak.attacks.span.scan import Pairs
from gradleak.matching.linear_algebra import count_rank, decompose, find_singular_values

NEW = 1e-4  # what unit inputs must have outside of others to count as a direction of their own


class Prefixes:
    """Grows the sentences of one observation."""

    def __init__(self, check: Check, pairs: Pairs, beam: int, by_position: bool) -> None:
        self.check, self.pairs, self.beam, self.by_position = check, pairs, beam, by_position
        self.directions = 0  # of the deeper layer that the sentences use

    def grow(self, longest: int, going_on: Callable[[int, float], bool]) -> list[Sentence]:
        """Sentences whose every prefix fits and that cannot be made longer, with at most `beam` alive at a time."""
        alive: list[Sentence] = [()]
        ended: list[Sentence] = []
        for place in range(longest):
            words = self.pairs.at(place if self.by_position else 0).tolist()
            longer = [(*prefix, word) for prefix in alive for word in words]
            if not longer or not going_on(place, 0.0):
                break
            grown = self._fitting(longer)
            parents = {sentence[:-1] for sentence in grown}
            ended += [prefix for prefix in alive if prefix and prefix not in parents]
            alive = grown
        return self._needed([*ended, *(prefix for prefix in alive if prefix)])

    def _fitting(self, prefixes: Sequence[Sentence]) -> list[Sentence]:
        distances = self._last_distances(prefixes)
        return [prefixes[row] for row in distances.argsort().tolist() if distances[row] < self.check.space.holds][: self.beam]

    def _needed(self, sentences: list[Sentence]) -> list[Sentence]:
        """Only sentences that add directions: a first word said over and over feeds the same all along, and fits for ever."""
        kept: list[Sentence] = []
        left = {sentence: _unit(self.check.inputs_of([sentence])) for sentence in sentences}
        while left:
            ranks = {sentence: _dimensions(inputs) for sentence, inputs in left.items()}
            best = max(ranks, key=lambda sentence: (ranks[sentence], -len(sentence)))
            if ranks[best] == 0:
                break
            kept.append(best)
            self.directions += ranks[best]
            basis = decompose(left.pop(best)).right[: ranks[best]]
            left = {sentence: inputs - (inputs @ basis.mT) @ basis for sentence, inputs in left.items()}
        return kept

    def _last_distances(self, prefixes: Sequence[Sentence]) -> Float[Tensor, "prefixes"]:
        """How far the input of each prefix's last word is outside of the span."""
        found = []
        for start in range(0, len(prefixes), 512):
            piece = prefixes[start : start + 512]
            fed = self.check.inputs_of(piece).view(len(piece), len(piece[0]), -1)[:, -1]
            found.append(self.check.space.distances(fed))
        return torch.cat(found)


def _unit(inputs: Float[Tensor, "inputs width"]) -> Float[Tensor, "inputs width"]:
    return torch.nn.functional.normalize(inputs.double(), dim=-1)


def _dimensions(inputs: Float[Tensor, "inputs width"]) -> int:
    return int(count_rank(find_singular_values(inputs), NEW))


@torch.no_grad()
def reads_ahead(check: Check) -> bool:
    """Whether a token's deeper inputs depend on the words after it."""
    words = check.target.vocabulary.allowed.nonzero()[:4, 0].tolist()
    one, other = (check.inputs_of([(*words[:2], last)])[0] for last in words[2:])
    return not torch.allclose(one, other, rtol=1e-5, atol=1e-6)
