"""Discrete rounds: between continuous steps, words change places where that makes gradient and language fit better."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.gradient_matching.descent import AdamState
from gradleak.attacks.gradient_matching.moves import reorderings
from gradleak.attacks.gradient_matching.passes import rows_in_passes
from gradleak.attacks.gradient_matching.problems import Rows, nearest_tokens
from gradleak.core.attack import Bench
from gradleak.matching import Matcher

if TYPE_CHECKING:
    from gradleak.attacks.gradient_matching.loop import Search


@dataclass(frozen=True)
class DiscreteRounds:
    """When and how words are reordered (LAMP, section 4.3)."""

    every: int = 75  # steps between rounds
    begin: float = 0.1  # share of the steps before the first round
    candidates: int = 200  # orders tried for each sentence in a round
    prior_weight: float = 0.2
    rounds_at_end: int = 0  # instead of alternating: so many rounds after the last step
    moments_follow: bool = True  # the optimiser's moments move with the words; the released code leaves them behind

    def due(self, taken: int, steps: int) -> bool:
        """Whether a round follows that many steps."""
        return not self.rounds_at_end and taken >= self.begin * steps and taken % self.every == 0

    def round(self, search: "Search", state: AdamState, number: int) -> None:
        """One round over every sentence of every row: the best of the candidate orders is taken."""
        rows, embeddings = search.rows, search.embeddings
        ids = nearest_tokens(rows, embeddings)
        for sentence in range(embeddings.shape[1]):
            orders = candidate_orders(rows, search.bench, self.candidates, number, sentence, "round").to(embeddings.device)
            scores = order_scores(search, embeddings, ids, orders, sentence, self.prior_weight)
            chosen = orders[torch.arange(len(orders), device=orders.device), scores.argmin(1)]
            moving = [embeddings, state.first, state.second] if self.moments_follow else [embeddings]
            for tensor in moving:
                tensor[:, sentence] = _taken(tensor[:, sentence], chosen)
            ids[:, sentence] = ids[:, sentence].gather(1, chosen)


def order_scores(
    search: "Search",
    embeddings: Float[Tensor, "rows examples tokens hidden"],
    ids: Int[Tensor, "rows examples tokens"],
    orders: Int[Tensor, "rows candidates tokens"],
    sentence: int,
    prior_weight: float,
) -> Float[Tensor, "rows candidates"]:
    """Matching distance plus weighted prior of every candidate order of one sentence."""
    rows, count = search.rows, orders.shape[1]

    def matched(piece: slice) -> Tensor:
        candidates = embeddings[piece, None].expand(-1, count, -1, -1, -1).clone()
        candidates[:, :, sentence] = _taken(embeddings[piece, sentence][:, None].expand(-1, count, -1, -1), orders[piece])
        return search.matcher.distances(rows.batch(candidates, piece), piece)

    scores = rows_in_passes(rows, count).run(matched, len(rows.problems))
    if prior_weight == 0:
        return scores
    reordered = ids[:, sentence, None].expand(-1, count, -1).gather(2, orders)
    nll = sentence_nll(search.bench, rows, reordered, sentence)
    # The mean over all tokens of the batch: one sentence counts by its length.
    return scores + prior_weight * nll * _share(rows, sentence)[:, None]


def sentence_nll(
    bench: Bench, rows: Rows, ids: Int[Tensor, "rows candidates tokens"], sentence: int
) -> Float[Tensor, "rows candidates"]:
    """The prior's mean negative log-likelihood of a token for every candidate of one sentence; duplicates are scored once."""
    lengths = torch.tensor([problem.hypothesis.lengths[sentence] for problem in rows.problems], device=ids.device)
    keyed = torch.cat([ids, lengths[:, None, None].expand(-1, ids.shape[1], 1)], dim=-1).flatten(0, 1)
    distinct, back = torch.unique(keyed, dim=0, return_inverse=True)
    return bench.prior.nll(distinct[:, :-1], distinct[:, -1]).to(rows.target.dtype)[back].view(ids.shape[:2])


def token_scores(
    search: "Search", ids: Int[Tensor, "rows candidates examples tokens"], matcher: Matcher, prior_weight: float
) -> Float[Tensor, "rows candidates"]:
    """Matching distance plus weighted prior of candidates given as tokens."""
    rows = search.rows

    def matched(piece: slice) -> Tensor:
        return matcher.distances(rows.batch(rows.target.embed(ids[piece]), piece), piece)

    scores = rows_in_passes(rows, ids.shape[1]).run(matched, len(rows.problems))
    if prior_weight == 0:
        return scores
    for sentence in range(ids.shape[2]):
        nll = sentence_nll(search.bench, rows, ids[:, :, sentence], sentence)
        scores = scores + prior_weight * nll * _share(rows, sentence)[:, None]
    return scores


def candidate_orders(
    rows: Rows, bench: Bench, count: int, number: int, sentence: int, purpose: str
) -> Int[Tensor, "rows candidates tokens"]:
    """Candidate orders of one sentence of every row, each row from its own stream; special and padding places stay."""
    width = rows.mask.shape[-1]
    orders = torch.arange(width).repeat(len(rows.problems), count, 1)
    before, after = len(rows.target.vocabulary.prefix), len(rows.target.vocabulary.suffix)
    for row, problem in enumerate(rows.problems):
        stream = bench.streams_of(problem.observation).child(purpose, problem.number, number, sentence)
        free = problem.hypothesis.lengths[sentence] - before - after
        orders[row, :, before : before + free] = before + reorderings(free, count, stream.generator())
    return orders


def _taken(
    values: Float[Tensor, "*lead tokens hidden"], orders: Int[Tensor, "*lead tokens"]
) -> Float[Tensor, "*lead tokens hidden"]:
    return values.gather(-2, orders[..., None].expand(*orders.shape, values.shape[-1]))


def _share(rows: Rows, sentence: int) -> Float[Tensor, "rows"]:
    lengths = [problem.hypothesis.lengths for problem in rows.problems]
    return torch.tensor([one[sentence] / sum(one) for one in lengths], device=rows.target.device, dtype=rows.target.dtype)
