"""What an update says outright: labels, lengths and words that need no search."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.target import Target

ABOVE_FLOOR = 10.0  # a row this many times above the quiet rows' size was touched by the batch
ABOVE_ROUNDING = 1e-6  # of the largest row: what lies under it is rounding


@dataclass(frozen=True)
class Finding:
    """Numbers read off an update, and whether they are certain or an estimate."""

    values: tuple[int, ...]
    exact: bool
    source: str


def labels(observation: Observation) -> Finding | None:
    """Labels from the head's bias gradient, which is the mean of (probabilities − one-hot label); none if it is not seen.

    One example: the label is the only negative entry (Zhao et al. 2020). More: class counts, given what the model predicts
    on ordinary text, which a fresh head predicts for anything.
    """
    gradient = _seen(observation, "head_bias")
    if gradient is None or observation.knows.batch_size is None:
        return None
    size = observation.knows.batch_size
    if size == 1:
        return Finding((int(gradient.argmin()),), exact=not _noisy(observation), source="sign of the head's bias gradient")
    expected = (_typical_probabilities(observation.target) - gradient) * size
    counts = _whole_counts(expected, size)
    found = tuple(label for label, count in enumerate(counts) for _ in range(count))
    return Finding(found, exact=False, source="counts from the head's bias gradient")


def longest_length(observation: Observation) -> Finding | None:
    """The number of positions the batch used, from the rows of the position embeddings; none if they are not seen.

    For one sentence that is its length; for more, the length of the longest.
    """
    rows = _seen(observation, "position_embedding")
    if rows is None:
        return None
    touched = int(_touched(rows, _noisy(observation)).sum())
    exact = observation.knows.batch_size == 1 and not _noisy(observation)
    return Finding((touched,), exact=exact, source="rows of the position embeddings") if touched else None


def words(observation: Observation) -> Finding | None:
    """The set of words in the batch, from the rows of the word embeddings; none if they are not seen."""
    rows = _seen(observation, "word_embedding")
    if rows is None:
        return None
    found = tuple(int(word) for word in _touched(rows, _noisy(observation)).nonzero()[:, 0])
    return Finding(found, exact=not _noisy(observation), source="rows of the word embeddings")


def _seen(observation: Observation, group: str) -> Tensor | None:
    names = [name for name in observation.target.groups[group] if name in observation.update.tensors]
    return observation.update.tensors[names[0]][0] if names else None


def _noisy(observation: Observation) -> bool:
    return any(defense.channel().noise_std > 0 for defense in observation.knows.defenses or ())


def _touched(rows: Float[Tensor, "rows width"], noisy: bool) -> Bool[Tensor, "rows"]:
    norms = torch.linalg.vector_norm(rows, dim=1)
    floor = norms.quantile(0.25) if noisy else 0.0  # most rows are untouched, hence of the size of the noise
    touched: Tensor = (norms > ABOVE_FLOOR * floor) & (norms > ABOVE_ROUNDING * norms.max())
    return touched


@torch.no_grad()
def _typical_probabilities(target: Target) -> Float[Tensor, "classes"]:
    words = target.vocabulary.allowed.nonzero()[:, 0]
    ids = words[torch.linspace(0, len(words) - 1, 64, device=words.device).long()].view(8, 8)
    frame = [torch.tensor(part, device=ids.device).expand(8, -1) for part in (target.vocabulary.prefix, target.vocabulary.suffix)]
    ids = torch.cat([frame[0].long(), ids, frame[1].long()], dim=1)
    batch = Batch(ids=ids, mask=torch.ones_like(ids).bool(), labels=torch.zeros(8, dtype=torch.int64, device=ids.device))
    return target.probabilities(batch).mean(0)


def _whole_counts(expected: Float[Tensor, "classes"], total: int) -> list[int]:
    """Whole numbers that add up to the total, by largest remainder."""
    wished = expected.clamp_min(0).tolist()
    counts = [int(value) for value in wished]
    by_remainder = sorted(range(len(wished)), key=lambda label: counts[label] - wished[label])
    for place in range(max(0, total - sum(counts))):
        counts[by_remainder[place % len(counts)]] += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts
