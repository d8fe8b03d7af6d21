"""Observations under hypotheses, laid out as one tensor: the rows a search works on together."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.search.hypotheses import MOST, Assumptions, Hypothesis
from gradleak.attacks.search.token_labels import soft_tokens
from gradleak.core.attack import Sentences
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.observation import Observation
from gradleak.core.target import Target

CERTAIN = 1e3  # a logit so far above the others' that its word has all of the weight


@dataclass(frozen=True)
class Problem:
    """One observation under one hypothesis."""

    observation: Observation
    hypothesis: Hypothesis
    number: int  # which hypothesis of its observation, and which try: names its random stream


@dataclass(frozen=True, eq=False)
class Rows:
    """Problems side by side, padded to one shape."""

    target: Target
    problems: tuple[Problem, ...]
    labels: Int[Tensor, "rows examples"] | None  # none where a candidate's own tokens are its labels
    mask: Bool[Tensor, "rows examples tokens"]
    frame: Int[Tensor, "rows examples tokens"]  # special tokens in place, padding elsewhere
    fixed: Bool[Tensor, "rows examples tokens"]  # places a search must not touch
    words: Int[Tensor, "words"]  # what may be guessed inside a sentence
    free_labels: bool = False  # whether the numbers of a place are its embedding and then a logit of its label for every word

    @property
    def width(self) -> int:
        """How many numbers a search moves at each place."""
        return self.target.hidden_size + (self.target.classes if self.free_labels else 0)

    def split(self, numbers: Float[Tensor, "*lead width"]) -> tuple[Float[Tensor, "*lead hidden"], Float[Tensor, "*lead logits"]]:
        """The embeddings and the label logits (none unless labels are free) that the numbers of places stand for."""
        hidden = self.target.hidden_size
        return numbers[..., :hidden], numbers[..., hidden:]

    def batch(self, numbers: Float[Tensor, "rows candidates examples tokens width"], rows: slice = slice(None)) -> Batch:
        """Candidates [rows, candidates, …] as a batch, cut to the longest sentence of these rows."""
        kept, logits = self.split(numbers[..., : self._longest(rows), :])
        if self.free_labels:
            labels = logits.softmax(-1)
        else:
            labels = soft_tokens(self.target, kept) if self.labels is None else self._classes(rows, kept)
        return Batch(embeddings=kept, mask=self._masks(rows, kept), labels=labels)

    def special_numbers(self) -> Float[Tensor, "rows examples tokens width"]:
        """The numbers of the frame's own tokens: special ones are put back after every step."""
        embeddings = self.target.embed(self.frame)
        if not self.free_labels:
            return embeddings
        logits = embeddings.new_zeros(*self.frame.shape, self.target.classes)
        return torch.cat([embeddings, logits.scatter_(-1, self.frame[..., None], CERTAIN)], dim=-1)

    def token_batch(self, ids: Int[Tensor, "rows candidates examples tokens"], rows: slice = slice(None)) -> Batch:
        """The same for candidates of whole words: where tokens are labels, these are the words."""
        kept = ids[..., : self._longest(rows)]
        labels = kept if self.labels is None else self._classes(rows, kept)
        return Batch(embeddings=self.target.embed(kept), mask=self._masks(rows, kept), labels=labels)

    def _longest(self, rows: slice) -> int:
        return int(max(max(problem.hypothesis.lengths) for problem in self.problems[rows]))

    def _masks(self, rows: slice, kept: Tensor) -> Tensor:
        return self.mask[rows, None, :, : kept.shape[3]].expand(*kept.shape[:2], -1, -1)

    def _classes(self, rows: slice, kept: Tensor) -> Tensor:
        assert self.labels is not None
        return self.labels[rows, None].expand(*kept.shape[:2], -1)

    def take(self, places: Int[Tensor, "some"]) -> "Rows":
        """Some of the rows."""
        kept = tuple(self.problems[place] for place in places.tolist())
        labels = None if self.labels is None else self.labels[places]
        mask, frame, fixed = self.mask[places], self.frame[places], self.fixed[places]
        return Rows(self.target, kept, labels, mask, frame, fixed, self.words, self.free_labels)

    def sentences(self, ids: Int[Tensor, "examples tokens"], row: int) -> Sentences:
        """Token ids of one row without its padding."""
        lengths = self.problems[row].hypothesis.lengths
        return tuple(tuple(sentence[:length]) for sentence, length in zip(ids.tolist(), lengths, strict=True))


def problems_of(observations: Sequence[Observation], assumptions: Assumptions, attempt: int = 0) -> list[list[Problem]]:
    """All problems in groups that may share a pass: by kind of defense, and by length where padding is read."""
    return [group for alike in by_kind(observations) for group in _groups(alike, assumptions, attempt)]


def by_kind(observations: Sequence[Observation]) -> list[list[Observation]]:
    """Observations whose defenses call for the same attack together."""
    groups: dict[Channel, list[Observation]] = {}
    for observation in observations:
        groups.setdefault(observation.channel.kind, []).append(observation)
    return list(groups.values())


def _groups(observations: Sequence[Observation], assumptions: Assumptions, attempt: int) -> list[list[Problem]]:
    problems = [
        Problem(observation, hypothesis, number + MOST * attempt)
        for observation in observations
        for number, hypothesis in enumerate(assumptions.hypotheses(observation))
    ]
    # Longest first, so that neighbours have little padding between them.
    problems.sort(key=lambda problem: -max(problem.hypothesis.lengths))
    if observations[0].target.padding_is_free:
        return [problems]
    by_length = itertools.groupby(problems, key=lambda problem: max(problem.hypothesis.lengths))
    return [list(group) for _, group in by_length]


def lay_out(problems: Sequence[Problem], specials_inside: bool = False, free_labels: bool = False) -> Rows:
    """Problems as rows of one shape."""
    target = problems[0].observation.target
    width, examples = max(max(problem.hypothesis.lengths) for problem in problems), len(problems[0].hypothesis.lengths)
    frame = torch.full((len(problems), examples, width), target.vocabulary.pad)
    fixed, mask = torch.ones_like(frame).bool(), torch.zeros_like(frame).bool()
    for row, problem in enumerate(problems):
        attended = target.attention_mask(problem.hypothesis.lengths)
        mask[row, :, : attended.shape[1]] = attended.cpu()
        for place, length in enumerate(problem.hypothesis.lengths):
            ids, special = target.vocabulary.frame(length)
            frame[row, place, :length] = torch.tensor(ids)
            fixed[row, place, :length] = torch.tensor(special)
    device = target.device
    labels = [problem.hypothesis.labels for problem in problems]
    classes = None if target.labels_are_tokens else torch.tensor(labels).to(device)
    allowed = target.vocabulary.allowed.clone()
    if specials_inside:
        allowed[list(target.vocabulary.specials)] = True
    words = allowed.nonzero()[:, 0]
    return Rows(target, tuple(problems), classes, mask.to(device), frame.to(device), fixed.to(device), words, free_labels)


def nearest_tokens(rows: Rows, numbers: Float[Tensor, "rows examples tokens width"]) -> Int[Tensor, "rows examples tokens"]:
    """The allowed word whose embedding points most nearly the same way; special tokens stay where they are.

    Where labels are free, the word of the largest logit instead, but for the first of a text: nothing predicts that.
    """
    vocabulary = rows.target.vocabulary
    embeddings, logits = rows.split(numbers)
    words = rows.words
    directions = torch.nn.functional.normalize(vocabulary.embeddings[words], dim=-1)
    flat = torch.nn.functional.normalize(embeddings.detach(), dim=-1).flatten(0, -2)
    nearest = torch.cat([words[(part @ directions.T).argmax(-1)] for part in torch.split(flat, 4096)])
    found = nearest.view(embeddings.shape[:-1])
    if rows.free_labels:
        found[..., 1:] = words[logits.detach()[..., 1:, words].argmax(-1)]
    return torch.where(rows.fixed, rows.frame, found)


def side_by_side(batches: Sequence[Batch]) -> Batch:
    """Batches of token ids as one [observations, 1 candidate, examples, tokens], padded to one width."""
    width = max(batch.mask.shape[-1] for batch in batches)

    def padded(rows: Tensor | None) -> Tensor:
        assert rows is not None
        return torch.nn.functional.pad(rows, (0, width - rows.shape[-1]))[None]

    classes = all(batch.labels.shape == batch.lead for batch in batches)
    return Batch(
        ids=torch.stack([padded(batch.ids) for batch in batches]),
        mask=torch.stack([padded(batch.mask) for batch in batches]),
        labels=torch.stack([batch.labels[None] if classes else padded(batch.labels) for batch in batches]),
    )
