"""The network that turns features of an update into words.

In this order: features are scaled, a body gives each token a state, a table with a row for every
word reads the states. Labels, where there are any, are read off one state of the whole.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.attacks.learning_to_invert.features import average_in_groups
from gradleak.attacks.learning_to_invert.medium import (
    Network,
    ReadingScore,
    SeenClients,
    assign_slots,
)
from gradleak.attacks.learning_to_invert.training import multiply_in
from gradleak.core.attack import Bench, Reconstruction
from gradleak.core.prior import Prior
from gradleak.core.target import Target

SHORTEST_SPREAD = 1e-12
LOGITS_AT_ONCE = {"cuda": 420_000_000, "cpu": 60_000_000}  # numbers
CLIENTS_AT_ONCE = 8  # of which all logits are held, when words are read
LEAST_SHARE = 1e-38  # a word less likely than this costs no more: 87 nats
# Rows of a table come in so many: products of 2-byte numbers with 50,257 take a GPU three times as
# long as with 50,304.
ALIGNED = {"cuda": 64, "cpu": 1}


class Scaling(nn.Module):
    """Shifts and scales every feature to mean 0 and spread 1, as measured before training."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))

    @torch.no_grad()
    def measure(
        self, features: Float[Tensor, "clients features"], groups: Sequence[int] | None = None
    ) -> None:
        """Finds mean and spread; neighbours in a group share a spread."""
        self.get_buffer("mean").copy_(features.mean(0))
        spread = (
            measure_rare_spread(features)
            if groups is None
            else average_in_groups(features.std(0), groups)
        )
        # A feature that never moves says nothing.
        spread = torch.where(spread > SHORTEST_SPREAD, spread, torch.inf)
        self.get_buffer("spread").copy_(spread)

    def forward(
        self, features: Float[Tensor, "clients features"]
    ) -> Float[Tensor, "clients features"]:
        return (features - self.get_buffer("mean")) / self.get_buffer("spread")


def measure_rare_spread(
    features: Float[Tensor, "clients features"],
) -> Float[Tensor, "features"]:
    """Returns the root of each feature's variance by client in whose update it is not zero.

    In pruned updates most are zero. Divided by the spread over all clients, a feature that few have
    would be as large as it is rare. What none of these clients has may be another's: it is taken to
    be like the median.
    """
    having = features.count_nonzero(0)
    # E x² over all clients is the share that has it times E x² over those.
    share = (having / len(features)).clamp_min(1 / len(features))
    spread = features.std(0) / share.sqrt()
    moving = spread[spread > SHORTEST_SPREAD]
    return torch.where(having == 0, moving.median(), spread) if len(moving) else spread


class Perceptron(nn.Module):
    """The paper's body: features → 600 → ReLU → 1000 a token → ReLU."""

    def __init__(self, features: int, tokens: int, first: int, second: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, first), nn.Linear(first, tokens * second)
        self.tokens, self.width, self.summary_width = tokens, second, first

    def forward(self, features: Float[Tensor, "clients features"]) -> tuple[Tensor, Tensor]:
        """Returns a state for each token [clients, tokens, width], and one of the whole."""
        whole = self.first(features).relu()
        return self.second(whole).relu().unflatten(1, (self.tokens, self.width)), whole


class ByPosition(nn.Module):
    """A body for factors: it makes each token's state from that token's rows of all matrices.

    Positions share most weights and have some of their own.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[int, int]],
        others: int,
        unmixing: Sequence[Tensor],
        slots: int,
        width: int,
    ) -> None:
        super().__init__()
        self.blocks, self.slots, self.width, self.summary_width = list(blocks), slots, width, width
        self.unmixing = nn.ParameterList(nn.Parameter(one.clone()) for one in unmixing)
        content, positions = sum(size for _, size in blocks), len(unmixing[0])
        self.shared = nn.Linear(content, slots * width)
        self.straight = nn.Linear(content, slots * width)
        self.own = nn.Parameter(torch.zeros(positions, content, 2 * slots * width))
        self.others = nn.Linear(others, slots * width)
        self.second = nn.Linear(width, width)

    def forward(self, features: Float[Tensor, "clients features"]) -> tuple[Tensor, Tensor]:
        """Returns a state for each token [clients, tokens, width], and one of the whole."""
        sizes = [places * content for places, content in self.blocks]
        *pieces, others = torch.split(features, [*sizes, features.shape[1] - sum(sizes)], dim=1)
        blocks = zip(self.unmixing, pieces, self.blocks, strict=True)
        rows = torch.cat([unmix @ piece.view(-1, *shape) for unmix, piece, shape in blocks], dim=2)
        weights = torch.cat([self.shared.weight, self.straight.weight]).mT + self.own
        # [clients, positions, 2 · slots · width]: half goes through a ReLU, half goes on straight
        bent, straight = torch.bmm(rows.transpose(0, 1), weights).transpose(0, 1).chunk(2, dim=2)
        shape = (*bent.shape[:2], self.slots, self.width)
        bent = bent + self.shared.bias + self.others(others)[:, None]
        hidden = bent.view(shape).relu()
        states = self.second(hidden) + (straight + self.straight.bias).view(shape)
        return states.transpose(1, 2).flatten(1, 2), hidden.mean((1, 2))


class WordTable(nn.Module):
    """Reads states as words: by a table that is learnt, as in the paper, or one that is known."""

    def __init__(self, width: int, words: int, known: Float[Tensor, "words size"] | None) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(words))
        self.reduce: nn.Module = nn.Identity()
        if known is None:
            self.table: Tensor = nn.Linear(width, words, bias=False).weight
        else:
            self.reduce = nn.Linear(width, known.shape[1])
            self.register_buffer("table", known, persistent=False)

    def loss(
        self,
        reduced: Float[Tensor, "*rows size"],
        truth: Int[Tensor, "*rows"],
        dtype: torch.dtype,
    ) -> Float[Tensor, ""]:
        """Returns the mean cross-entropy of the words."""
        return linear_cross_entropy(
            reduced.flatten(0, -2), self.table, self.bias, truth.flatten(), dtype
        )

    def score(self, reduced: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows words"]:
        """Returns a logit for every word."""
        return reduced.float() @ self.table.mT + self.bias


def collect_word_vectors(target: Target) -> Float[Tensor, "words size"]:
    """Returns what the attacker knows of every word, in rows of length 1 or so.

    That is its row of the model's embeddings and, in a language model, of its output layer.
    """
    tables = [target.vocabulary.embeddings]
    if target.labels_are_tokens:
        outputs = target.module.get_output_embeddings()  # type: ignore[operator]
        if outputs is not None and outputs.weight.data_ptr() != tables[0].data_ptr():
            tables.append(outputs.weight.detach())
    whole = torch.cat([table.float() for table in tables], dim=1).cpu()
    centred, spread = whole - whole.mean(0), whole.std(0).clamp_min(1e-6)
    return torch.div(centred / spread, whole.shape[1] ** 0.5)


class LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy over a vocabulary, without ever holding all its logits.

    Slopes are computed together with the loss, some rows at a time, and only what is as small as
    the inputs is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, table: Tensor, bias: Tensor, truth: Tensor, dtype: torch.dtype
    ) -> Tensor:
        wants_states, wants_table, wants_bias = ctx.needs_input_grad[:3]
        words, kind = len(table), states.device.type
        missing = -words % ALIGNED.get(kind, 1)
        low_table = F.pad(table.to(dtype), (0, 0, 0, missing))
        # Words that are not there have no share, and so no slope.
        low_bias = F.pad(bias.to(dtype), (0, missing), value=-torch.inf)
        total = states.new_zeros((), dtype=torch.float32)
        slopes = torch.empty_like(states) if wants_states else None
        table_slope = torch.zeros_like(table) if wants_table else None
        bias_slope = torch.zeros_like(bias) if wants_bias else None
        most = max(1, LOGITS_AT_ONCE.get(kind, LOGITS_AT_ONCE["cpu"]) // words)
        for start in range(0, len(states), most):
            piece = slice(start, start + most)
            low_states, right = states[piece].to(dtype), truth[piece, None]
            slope = torch.addmm(low_bias, low_states, low_table.mT).softmax(-1)
            shares = slope.gather(1, right)
            total -= shares.float().clamp_min(LEAST_SHARE).log().sum()
            slope.scatter_(1, right, shares - 1)  # the slope of a logit: its share, less 1 if right
            if bias_slope is not None:
                bias_slope += slope.sum(0, dtype=bias_slope.dtype)[:words]
            if slopes is not None:
                slopes[piece] = slope @ low_table
            if table_slope is not None:
                table_slope += (slope.mT @ low_states)[:words]
        # No graph is kept: backward only scales what is computed here.
        ctx.slopes, ctx.rows = (slopes, table_slope, bias_slope), len(states)
        return total / len(states)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        weight = outer[0] / ctx.rows
        slopes = (None if slope is None else slope.mul_(weight) for slope in ctx.slopes)
        return (*slopes, None, None)


def linear_cross_entropy(
    states: Float[Tensor, "rows width"],
    table: Float[Tensor, "words width"],
    bias: Float[Tensor, "words"],
    truth: Int[Tensor, "rows"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, ""]:
    """Returns the mean cross-entropy of `states @ table.T + bias`.

    Logits are computed in `dtype`, sums in float32.
    """
    given = (states, table, bias, truth, dtype)
    found: Tensor = LinearCrossEntropy.apply(*given)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class WordBeam:
    """How words are chosen by an inverter together with a prior."""

    prior_weight: float  # of its log-likelihood beside the inverter's; 0: the inverter alone
    sentences: int  # kept on the way from left to right, and
    candidates: int  # words tried at each place: the inverter's likeliest

    def search(self, scores: Float[Tensor, "tokens words"], prior: Prior) -> Int[Tensor, "tokens"]:
        """Returns the sentence whose weighted log-likelihoods are highest in sum."""
        likely, words = scores.log_softmax(-1).topk(min(self.candidates, scores.shape[-1]), dim=-1)
        each = words.shape[1]
        # Of the first word the inverter alone has a say: a prior says nothing of a single one.
        found, seen = words[0][: self.sentences, None], likely[0][: self.sentences]
        for place in range(1, len(scores)):
            added = words[place].repeat(len(found))[:, None]
            longer = torch.cat([found.repeat_interleave(each, 0), added], dim=1)
            read = seen.repeat_interleave(each) + likely[place].repeat(len(found))
            lengths = torch.full((len(longer),), place + 1, device=longer.device)
            # The prior gives a mean over the words after the first.
            joined = read - self.prior_weight * prior.nll(longer, lengths) * place
            best = joined.topk(min(self.sentences, len(joined))).indices
            found, seen = longer[best], read[best]
        return found[0]


class TextNetwork(Network):
    """Reads words and, where there are any, labels."""

    measured_with_noise = True

    def __init__(
        self,
        features: int,
        body: Perceptron | ByPosition,
        words: WordTable,
        slots: int,
        classes: int | None,
        padding: int,
        beam: WordBeam,
    ) -> None:
        super().__init__()
        self.scaling, self.body, self.words = Scaling(features), body, words
        self.labels = None if classes is None else nn.Linear(body.summary_width, slots * classes)
        self.slots, self.padding, self.beam = slots, padding, beam

    def start_from(self, blind_guess: Float[Tensor, "words"]) -> None:
        # The bias alone then says what is likely: training begins at the blind guess.
        least = 1 / len(blind_guess) ** 2  # for words that public texts do not hold
        with torch.no_grad():
            self.words.bias.copy_((blind_guess + least).log())

    def measure(
        self,
        features: Float[Tensor, "clients features"],
        groups: Sequence[int] | None,
        noise: Float[Tensor, "features"] | None,
    ) -> None:
        self.scaling.measure(features, groups)

    def forward(
        self, features: Float[Tensor, "clients features"]
    ) -> tuple[Float[Tensor, "clients slots tokens size"], Tensor | None]:
        """Returns states to be read as words, and scores of each slot's label if there are any."""
        states, whole = self.body(self.scaling(features))
        labels = None if self.labels is None else self.labels(whole).unflatten(1, (self.slots, -1))
        return self.words.reduce(states.unflatten(1, (self.slots, -1))), labels

    def loss(self, seen: SeenClients, dtype: torch.dtype) -> Float[Tensor, ""]:
        """Returns the cross-entropy of words, and of labels where there are any (equation 2)."""
        device = seen.features.device.type
        with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16):
            states, scores = self(seen.features)
        ids, labels = self._order(seen, states, scores)
        loss = self.words.loss(states.float(), ids, dtype)
        if scores is not None:
            surprise = F.cross_entropy(scores.float().flatten(0, 1), labels.flatten())
            loss = loss + surprise / ids.shape[-1]
        return loss

    @torch.no_grad()
    def judge(self, seen: SeenClients, dtype: torch.dtype) -> ReadingScore:
        """Counts tokens that are read right; of several texts in a batch, by the nearest slot."""
        right = total = 0
        error = float(self.loss(seen, dtype))
        with multiply_in("float32", seen.features.device):  # as guesses will be read
            states, scores = self(seen.features)
            ids, _ = self._order(seen, states, scores)
            pieces = (torch.split(part, CLIENTS_AT_ONCE) for part in (states, ids))
            for some, truth in zip(*pieces, strict=True):
                counted = truth != self.padding
                right += int(((self.words.score(some).argmax(-1) == truth) & counted).sum())
                total += int(counted.sum())
        return ReadingScore(error, right, total)

    @torch.no_grad()
    def _order(
        self, seen: SeenClients, states: Tensor, scores: Tensor | None
    ) -> tuple[Int[Tensor, "clients slots tokens"], Tensor]:
        """Returns the words and labels of the text that each slot is nearest to."""
        ids, labels = seen.clients.ids, seen.clients.labels
        assert ids is not None
        if self.slots == 1:
            return ids, labels
        costs = torch.stack([self._compare(*pair) for pair in zip(states, ids, strict=True)])
        if scores is not None:
            wanted = labels[:, None, :].expand(-1, self.slots, -1)
            costs = costs - scores.float().log_softmax(-1).gather(2, wanted)
        order = assign_slots(costs)
        if scores is not None:
            labels = labels.gather(1, order)
        return ids.gather(1, order[..., None].expand_as(ids)), labels

    def _compare(self, states: Tensor, ids: Tensor) -> Float[Tensor, "slots slots"]:
        """Returns the cross-entropy of every text of one client in every slot."""
        surprise = -self.words.score(states).log_softmax(-1)  # [slots, tokens, words]
        wanted = (row.expand(len(ids), -1)[..., None] for row in ids)
        return torch.stack([surprise.gather(2, row)[..., 0].sum(1) for row in wanted], dim=1)

    def read(
        self, features: Float[Tensor, "clients features"], bench: Bench
    ) -> list[Reconstruction]:
        states, scores = self(features)
        pieces = torch.split(states, CLIENTS_AT_ONCE)
        ids = torch.cat([self._choose_words(some, bench.words) for some in pieces]).tolist()
        labels = [None] * len(ids) if scores is None else map(tuple, scores.argmax(-1).tolist())
        return [
            Reconstruction(tuple(self._cut(row) for row in rows), labels=classes)
            for rows, classes in zip(ids, labels, strict=True)
        ]

    def _choose_words(
        self, states: Float[Tensor, "clients slots tokens size"], prior: Prior
    ) -> Int[Tensor, "clients slots tokens"]:
        scores = self.words.score(states)
        if not self.beam.prior_weight:
            return scores.argmax(-1)
        rows = [self.beam.search(one, prior) for one in scores.flatten(0, 1)]
        return torch.stack(rows).view(scores.shape[:-1])

    def _cut(self, ids: list[int]) -> tuple[int, ...]:
        """Returns a text up to where its padding begins."""
        return (*ids[:1], *itertools.takewhile(lambda token: token != self.padding, ids[1:]))
