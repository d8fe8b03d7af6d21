"""Observations under hypotheses, laid out as one tensor: the rows a search works on together.

Candidates of all rows are scored in passes of as many as fit (`score_in_passes`).
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.search.hypotheses import MOST_HYPOTHESES, Assumptions, Hypothesis
from gradleak.core.attack import Bench, Sentences
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.matching import Matcher
from gradleak.matching.chunking import BESIDE, Chunks, fastest, pieces

Item = TypeVar("Item")
Ids = Int[Tensor, "rows examples tokens"]
Candidates = Int[Tensor, "rows candidates examples tokens"]

CERTAIN = 1e3  # a logit so far above the others' that its word has all of the weight
# Ours: no paper says how embeddings are to be read as labels. At a word's own embedding, others at
# a cosine of 0.3 (GPT-2's mean is near that), the word has 0.96 of the weight among GPT-2's 50,257;
# a smaller number leaves no slope away from a word.
TEMPERATURE = 0.05
MARKS = ".,?!'-:;()\""
WORDS_AT_ONCE = 4096  # embeddings that are held against the whole vocabulary in one product
TOKENS_AT_ONCE = {"cuda": 200_000, "cpu": 4_000}  # on a CPU larger passes are no faster


@dataclass(frozen=True)
class SearchProblem:
    """One observation under one hypothesis."""

    observation: Observation
    hypothesis: Hypothesis
    number: int  # which hypothesis of its observation, and which try: names its random stream


@dataclass(frozen=True, eq=False)
class Rows:
    """Problems side by side, padded to one shape."""

    target: Target
    problems: tuple[SearchProblem, ...]
    labels: Int[Tensor, "rows examples"] | None  # none where a candidate's tokens are its labels
    mask: Bool[Tensor, "rows examples tokens"]
    frame: Ids  # special tokens in place, padding elsewhere
    fixed: Bool[Tensor, "rows examples tokens"]  # places a search must not touch
    words: Int[Tensor, "words"]  # what may be guessed inside a sentence
    free_labels: bool = False  # whether each place has, after its embedding, a logit for every word

    @property
    def observations(self) -> list[Observation]:
        return [problem.observation for problem in self.problems]

    @property
    def width(self) -> int:
        """How many numbers a search moves at each place."""
        return self.target.hidden_size + (self.target.classes if self.free_labels else 0)

    def split(
        self, numbers: Float[Tensor, "*lead width"]
    ) -> tuple[Float[Tensor, "*lead hidden"], Float[Tensor, "*lead logits"]]:
        """Returns the embeddings and the label logits (none unless labels are free) of places."""
        hidden = self.target.hidden_size
        return numbers[..., :hidden], numbers[..., hidden:]

    def batch(
        self,
        numbers: Float[Tensor, "rows candidates examples tokens width"],
        rows: slice = slice(None),
    ) -> Batch:
        """Returns candidates as a batch, cut to the longest sentence of these rows."""
        kept, logits = self.split(numbers[..., : self._longest(rows), :])
        if self.free_labels:
            labels = logits.softmax(-1)
        elif self.labels is None:
            labels = soften_tokens(self.target, kept)
        else:
            labels = self._expand_labels(rows, kept)
        return Batch(embeddings=kept, mask=self._expand_mask(rows, kept), labels=labels)

    def token_batch(self, ids: Candidates, rows: slice = slice(None)) -> Batch:
        """Returns candidates of whole words as a batch: where tokens are labels, the words are."""
        kept = ids[..., : self._longest(rows)]
        labels = kept if self.labels is None else self._expand_labels(rows, kept)
        embeddings = self.target.embed(kept)
        return Batch(embeddings=embeddings, mask=self._expand_mask(rows, kept), labels=labels)

    def special_numbers(self) -> Float[Tensor, "rows examples tokens width"]:
        """Returns the numbers of special tokens, which are put back after every step."""
        embeddings = self.target.embed(self.frame)
        if not self.free_labels:
            return embeddings
        logits = embeddings.new_zeros(*self.frame.shape, self.target.classes)
        return torch.cat([embeddings, logits.scatter_(-1, self.frame[..., None], CERTAIN)], dim=-1)

    def take(self, places: Int[Tensor, "some"]) -> "Rows":
        """Returns some of the rows, or some of them several times."""
        return replace(
            self,
            problems=tuple(self.problems[place] for place in places.tolist()),
            labels=None if self.labels is None else self.labels[places],
            mask=self.mask[places],
            frame=self.frame[places],
            fixed=self.fixed[places],
        )

    def list_free_places(self) -> list[tuple[Int[Tensor, "rows"], Bool[Tensor, "rows"]]]:
        """Returns free places in turn, and which rows have that many; others repeat their last."""
        fixed = self.fixed.flatten(1)
        order, counts = fixed.to(torch.uint8).argsort(dim=1, stable=True), (~fixed).sum(1)
        turns = []
        for number in range(int(counts.max())):
            places = order.gather(1, (counts - 1).clamp_max(number)[:, None])[:, 0]
            turns.append((places, number < counts))
        return turns

    def sentences(self, ids: Int[Tensor, "examples tokens"], row: int) -> Sentences:
        """Returns the token ids of one row without its padding."""
        lengths = self.problems[row].hypothesis.lengths
        pairs = zip(ids.tolist(), lengths, strict=True)
        return tuple(tuple(sentence[:length]) for sentence, length in pairs)

    def decode_some(self, ids: Ids, most: int = 6) -> list[str]:
        """Returns the texts of a few rows, in their observations' own order: to be looked at."""
        order = sorted(range(len(ids)), key=lambda row: self.problems[row].observation.index)
        shown = [sentence for row in order[:most] for sentence in self.sentences(ids[row], row)]
        return [self.target.decode(sentence) for sentence in shown]

    def _longest(self, rows: slice) -> int:
        return int(max(max(problem.hypothesis.lengths) for problem in self.problems[rows]))

    def _expand_mask(self, rows: slice, kept: Tensor) -> Tensor:
        return self.mask[rows, None, :, : kept.shape[3]].expand(*kept.shape[:2], -1, -1)

    def _expand_labels(self, rows: slice, kept: Tensor) -> Tensor:
        assert self.labels is not None
        return self.labels[rows, None].expand(*kept.shape[:2], -1)


def group_problems(
    observations: Sequence[Observation], assumptions: Assumptions, attempt: int = 0
) -> list[list[SearchProblem]]:
    """Returns all problems in groups that may share a pass.

    Those are of one kind of defense, and of one length where the model reads padding.
    """
    groups: list[list[SearchProblem]] = []
    for alike in group_by(observations, lambda observation: observation.channel.kind):
        problems = [
            SearchProblem(observation, hypothesis, number + MOST_HYPOTHESES * attempt)
            for observation in alike
            for number, hypothesis in enumerate(assumptions.list_hypotheses(observation))
        ]
        # Longest first, so that neighbours have little padding between them.
        problems.sort(key=lambda problem: -max(problem.hypothesis.lengths))
        if alike[0].target.padding_is_free:
            groups.append(problems)
            continue
        groups += group_by(problems, lambda one: max(one.hypothesis.lengths))
    return groups


def group_by_size(problems: Sequence[SearchProblem], ratio: float) -> list[list[int]]:
    """Returns the places of problems whose numbers of tokens are alike to within a ratio.

    More places mean more candidates, which short sentences need not share.
    """
    tokens = [sum(problem.hypothesis.lengths) for problem in problems]
    places = range(len(problems))
    return group_by(places, lambda place: math.ceil(math.log(tokens[place], ratio)))


def group_by(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Returns items with one key together, in the order in which they come."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def lay_out(
    problems: Sequence[SearchProblem], specials_inside: bool = False, free_labels: bool = False
) -> Rows:
    """Returns problems as rows of one shape."""
    target, examples = problems[0].observation.target, len(problems[0].hypothesis.lengths)
    width = max(max(problem.hypothesis.lengths) for problem in problems)
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
    allowed = target.vocabulary.allowed.clone()
    if specials_inside:
        allowed[list(target.vocabulary.specials)] = True
    return Rows(
        target,
        tuple(problems),
        None if target.labels_are_tokens else torch.tensor(labels).to(device),
        mask.to(device),
        frame.to(device),
        fixed.to(device),
        allowed.nonzero()[:, 0],
        free_labels,
    )


def stack_batches(batches: Sequence[Batch]) -> Batch:
    """Returns batches of token ids as one [observations, 1 candidate, examples, tokens], padded."""
    width = max(batch.mask.shape[-1] for batch in batches)

    def pad(rows: Tensor | None) -> Tensor:
        assert rows is not None
        return torch.nn.functional.pad(rows, (0, width - rows.shape[-1]))[None]

    classes = all(batch.labels.shape == batch.lead for batch in batches)
    return Batch(
        ids=torch.stack([pad(batch.ids) for batch in batches]),
        mask=torch.stack([pad(batch.mask) for batch in batches]),
        labels=torch.stack(
            [batch.labels[None] if classes else pad(batch.labels) for batch in batches]
        ),
    )


def nearest_tokens(rows: Rows, numbers: Float[Tensor, "rows examples tokens width"]) -> Ids:
    """Returns the allowed words whose embeddings point most nearly the same way.

    Special tokens stay where they are. Where labels are free it is the word of the largest logit
    instead, but for the first of a text: nothing predicts that.
    """
    embeddings, logits = rows.split(numbers)
    words = rows.words
    table = rows.target.vocabulary.embeddings[words]
    directions = torch.nn.functional.normalize(table, dim=-1)
    flat = torch.nn.functional.normalize(embeddings.detach(), dim=-1).flatten(0, -2)
    pieces = torch.split(flat, WORDS_AT_ONCE)
    nearest = torch.cat([words[(piece @ directions.T).argmax(-1)] for piece in pieces])
    found = nearest.view(embeddings.shape[:-1])
    if rows.free_labels:
        found[..., 1:] = words[logits.detach()[..., 1:, words].argmax(-1)]
    return torch.where(rows.fixed, rows.frame, found)


def soften_tokens(
    target: Target, embeddings: Float[Tensor, "*lead tokens hidden"]
) -> Float[Tensor, "*lead tokens words"]:
    """Returns, as probabilities, how much each embedding points along each word.

    These are the labels of a language model's candidate text. They are differentiable: a label
    moves with the embedding of its own position, so that guess and prediction are one text.
    """
    directions = torch.nn.functional.normalize(target.vocabulary.embeddings, dim=-1)
    cosines = torch.nn.functional.normalize(embeddings, dim=-1) @ directions.T
    return (cosines / TEMPERATURE).softmax(-1)


def find_filler(target: Target) -> int:
    """Returns the word that stands for none: [MASK], or padding, or the first ordinary word."""
    for number in target.vocabulary.specials:
        if "mask" in target.decode([number], keep_special=True).lower():
            return number
    return int(target.vocabulary.allowed.nonzero()[0, 0])


def find_marks(rows: Rows) -> Int[Tensor, "words"]:
    """Returns tokens of one punctuation mark: slopes miss them, and most sentences have some."""
    decode, words = rows.target.decode, set(rows.words.tolist())
    encoded = [word for mark in MARKS for word in rows.target.encode([mark])[0]]
    marks = {word for word in encoded if word in words and decode([word])}
    return torch.tensor(sorted(marks), device=rows.words.device, dtype=torch.int64)


def score_in_passes(
    bench: Bench,
    rows: Rows,
    matcher: Matcher,
    score: Callable[[slice, slice], Tensor],
    candidates: int,
) -> Float[Tensor, "rows candidates"]:
    """Returns what `score` says of every row's candidates, as many in a pass as fit.

    Those that time did not allow are infinitely far.
    """
    shape, device = rows.mask.shape[1:], rows.target.device
    most = fastest(TOKENS_AT_ONCE, device) / shape.numel()
    chunks = pieces(bench, device, matcher.bytes(*shape), matcher.work(*shape), most)
    missing = torch.tensor(torch.inf, dtype=rows.target.dtype, device=device)
    return chunks.run_pairs(score, len(rows.problems), candidates, missing)


def score_batches(
    observations: Sequence[Observation],
    batches: Sequence[Batch],
    key: Callable[[Observation], Hashable],
    score: Callable[[list[Observation], Batch], Float[Tensor, "some"]],
) -> Float[Tensor, "observations"]:
    """Returns what `score` says of one batch of each observation, those with one key together.

    Where the target reads padding they go one by one.
    """
    alone = not observations[0].target.padding_is_free
    places = range(len(observations))
    groups = group_by(places, lambda place: place if alone else key(observations[place]))
    found: dict[int, Tensor] = {}
    for group in groups:
        seen = [observations[place] for place in group]
        scores = score(seen, stack_batches([batches[place] for place in group]))
        found.update(zip(group, scores, strict=True))
    return torch.stack([found[place] for place in places])


def compute_distances(matcher: Matcher, batch: Batch) -> Float[Tensor, "observations"]:
    """Returns the distance of one batch of each observation, a few observations at a time."""
    each = matcher.bytes(batch.mask.shape[-2], batch.mask.shape[-1])

    def piece(rows: slice) -> Tensor:
        return matcher.distances(batch[rows], rows)[:, 0].detach()

    return Chunks(int(BESIDE / each)).run(piece, len(batch.mask))
