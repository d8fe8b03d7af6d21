"""Labels of a language model as numbers of their own: a text's words are then read off what it is said to predict.

A label tied to the embedding of its place (`token_labels.py`) has next to no slope once it is near a word, and among tens of
thousands of words a search ends at the first it meets. Learning to Invert's baseline gives every place a logit for each word
instead and moves these beside the embeddings; the labels are their softmax. Predictions show through most of the gradient, so
that labels are found soon, whatever the embeddings do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gradleak.attacks.gradient_matching.starts import OneGaussian, Start
from gradleak.attacks.search.descent import Adam, WarmUp
from gradleak.attacks.search.rows import Problem
from gradleak.core.attack import Bench
from gradleak.matching.chunking import ROOM

MOST = 512  # texts searched together: a step of so many fills a GPU, and its recorded pieces stay within what is planned for them
HELD = 10  # tensors of all numbers held at once: now, best and special ones, slopes, two moments, and what a step makes of them


@dataclass(frozen=True)
class FreeLabels:
    """How embeddings and logits begin and move where they move together (TAG in Learning to Invert, after its released code)."""

    start: Start
    optimiser: Adam

    @staticmethod
    def of(steps: int, learning_rate: float) -> "FreeLabels":
        """The released numbers: a rate that rises over a twentieth of the steps and falls to zero, slopes of norm one at most."""
        return FreeLabels(OneGaussian(std=0.1, largest=0.1), Adam(learning_rate, WarmUp(steps), clip_norm=1.0))

    def rows_at_once(self, problems: Sequence[Problem], bench: Bench) -> int:
        """How many problems may be searched together: a logit for every word of every place is much where words are many."""
        target = problems[0].observation.target
        places = max(len(problem.hypothesis.lengths) * max(problem.hypothesis.lengths) for problem in problems)
        bytes_a_row = HELD * places * (target.hidden_size + target.classes) * target.dtype.itemsize
        return max(1, min(MOST, int(ROOM * bench.memory_left(target.device) / bytes_a_row)))
