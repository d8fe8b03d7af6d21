"""The network that turns features of an update into words."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.attacks.learning_to_invert.words import linear_cross_entropy

SHORTEST_SPREAD = 1e-12


class Scaling(nn.Module):
    """Shifts and scales every feature to mean 0 and spread 1, as measured once before training."""

    def __init__(self, features: int, groups: Sequence[int] | None = None) -> None:
        super().__init__()
        self.groups = groups  # neighbours that are scaled together, so that they keep their proportions; none: each alone
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))

    @torch.no_grad()
    def measure(self, features: Float[Tensor, "clients features"]) -> None:
        mean, spread = self.get_buffer("mean"), self.get_buffer("spread")
        mean.copy_(features.mean(0))
        if self.groups is None:
            found = _like_the_others(spread_of_those_that_have_it(features), features)
        else:
            pieces = torch.split(features.std(0), list(self.groups))
            found = torch.cat([piece.square().mean().sqrt().expand(len(piece)) for piece in pieces])
        spread.copy_(torch.where(found > SHORTEST_SPREAD, found, torch.inf))  # a feature that never moves says nothing

    def forward(self, features: Float[Tensor, "clients features"]) -> Float[Tensor, "clients features"]:
        mean, spread = self.get_buffer("mean"), self.get_buffer("spread")
        return (features - mean) / spread


def spread_of_those_that_have_it(features: Float[Tensor, "clients features"]) -> Float[Tensor, "features"]:
    """The root of each feature's variance by client in whose update it is not zero: in pruned ones most are.

    Divided by the spread over all clients, a feature that few have would be as large as it is rare.
    """
    share = features.count_nonzero(0) / len(features)
    return features.std(0) / share.clamp_min(1 / len(features)).sqrt()


def _like_the_others(found: Float[Tensor, "features"], features: Float[Tensor, "clients features"]) -> Float[Tensor, "features"]:
    """What none of these clients has may be another's: it is taken to be like the median."""
    moving = found[found > SHORTEST_SPREAD]
    return torch.where(features.count_nonzero(0) == 0, moving.median(), found) if len(moving) else found


class Perceptron(nn.Module):
    """The paper's body: features → 600 → ReLU → 1000 a token → ReLU."""

    def __init__(self, features: int, tokens: int, first: int, second: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, first), nn.Linear(first, tokens * second)
        self.tokens, self.width, self.summary = tokens, second, first

    def forward(self, features: Float[Tensor, "clients features"]) -> tuple[Tensor, Tensor]:
        """A state for each token [clients, tokens, width], and one of the whole."""
        whole = self.first(features).relu()
        return self.second(whole).relu().unflatten(1, (self.tokens, self.width)), whole


class ByPosition(nn.Module):
    """A body for factors: each token from its rows of all matrices, by weights that positions share and some of their own."""

    def __init__(
        self, blocks: Sequence[tuple[int, int]], others: int, unmixing: Sequence[Tensor], slots: int, width: int
    ) -> None:
        super().__init__()
        self.blocks, self.slots, self.width, self.summary = list(blocks), slots, width, width
        self.tokens = slots * len(unmixing[0])
        self.unmixing = nn.ParameterList(nn.Parameter(one.clone()) for one in unmixing)
        content = sum(size for _, size in blocks)
        self.shared, self.straight = nn.Linear(content, slots * width), nn.Linear(content, slots * width)
        self.own = nn.Parameter(torch.zeros(len(unmixing[0]), content, 2 * slots * width))
        self.others = nn.Linear(others, slots * width)
        self.second = nn.Linear(width, width)

    def forward(self, features: Float[Tensor, "clients features"]) -> tuple[Tensor, Tensor]:
        sizes = [places * content for places, content in self.blocks]
        *pieces, others = torch.split(features, [*sizes, features.shape[1] - sum(sizes)], dim=1)
        rows = torch.cat(
            [unmix @ piece.view(-1, *shape) for unmix, piece, shape in zip(self.unmixing, pieces, self.blocks, strict=True)],
            dim=2,
        )
        weights = torch.cat([self.shared.weight, self.straight.weight]).mT + self.own
        both = torch.bmm(rows.transpose(0, 1), weights).transpose(0, 1)  # [clients, positions, 2 · slots · width]
        bent, straight = both.chunk(2, dim=2)
        shape = (*bent.shape[:2], self.slots, self.width)
        hidden = (bent + self.shared.bias + self.others(others)[:, None]).view(shape).relu()
        states = self.second(hidden) + (straight + self.straight.bias).view(shape)
        return states.transpose(1, 2).flatten(1, 2), hidden.mean((1, 2))


class Words(nn.Module):
    """Reads states as words: by a table that is learnt, as in the paper, or by one that is known."""

    def __init__(self, width: int, shares: Float[Tensor, "words"], known: Float[Tensor, "words size"] | None) -> None:
        super().__init__()
        words = len(shares)
        self.bias = nn.Parameter((shares + 1 / words**2).log())  # what is likely before anything is seen
        self.reduce: nn.Module = nn.Identity()
        if known is None:
            self.table: Tensor = nn.Linear(width, words, bias=False).weight
        else:
            self.reduce = nn.Linear(width, known.shape[1])
            self.register_buffer("table", known, persistent=False)

    def loss(self, reduced: Float[Tensor, "*rows size"], truth: Int[Tensor, "*rows"], dtype: torch.dtype) -> Float[Tensor, ""]:
        return linear_cross_entropy(reduced.flatten(0, -2), self.table, self.bias, truth.flatten(), dtype)

    def logits(self, reduced: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows words"]:
        return reduced.float() @ self.table.mT + self.bias


class TextInverter(nn.Module):
    """Scaling, a body, and a table with a row for each word by which the state of each token is read."""

    def __init__(self, scaling: Scaling, body: Perceptron | ByPosition, words: Words, slots: int, classes: int | None) -> None:
        super().__init__()
        self.scaling, self.body, self.words, self.slots = scaling, body, words, slots
        self.labels = None if classes is None else nn.Linear(body.summary, slots * classes)

    def forward(self, features: Tensor) -> tuple[Float[Tensor, "clients slots tokens width"], Tensor | None]:
        """States to be read as words, and scores of each slot's label where the target has labels."""
        states, whole = self.body(self.scaling(features))
        labels = None if self.labels is None else self.labels(whole).unflatten(1, (self.slots, -1))
        return states.unflatten(1, (self.slots, -1)), labels
