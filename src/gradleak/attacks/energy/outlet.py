"""What comes after a model's last layer knows of a sentence, and of words put into it.

The first linear layer there is fed one vector h a sentence. Its gradient is δhᵀ, so that what was
seen of it is h under noise, and a pass forward says how well a candidate's h fits: the gradient of
what comes after needs no pass back through the layers.

The lexicon has the h of every word alone. What another word at a place would do to h is taken to be
the difference of the two words' own: a few products rank the vocabulary at a place. Of sentences
that are still wrong this is a better guide than their exact likelihood, which in a wrong sentence
asks for a wrong word.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.target import Target
from gradleak.matching.chunking import GRADIENTS, cost_of, pieces
from gradleak.matching.exact import OuterSums, gradients_of
from gradleak.matching.inputs import ModuleInputs, module_of
from gradleak.matching.kinds import Kind, call_shapes, kind_of
from gradleak.matching.noisy_channel import NoisyChannel

AT_ONCE = 128  # sentences: more are no faster on a core
# Of a difference of h: what a word does among others is less than what it does alone
SHARE_ALONE = 0.7


@dataclass(frozen=True)
class Outlet:
    """The first linear layer that is fed one vector a sentence, and all that comes after it."""

    part: Part  # its weight
    names: tuple[str, ...]  # of the parts seen from there on


def find_outlet(target: Target, visible: Sequence[str]) -> Outlet | None:
    """Returns it where its weight is seen; none of models that feed tokens on one by one."""
    order = list(shapes := call_shapes(target))
    seen = [part for part in target.parts if part.name in set(visible)]
    last = max((order.index(name) for name in order if _is_of_layer(target, name)), default=-1)
    for number, name in enumerate(order):
        if number <= last or set(shapes[name]) != {2}:
            continue
        if kind_of(target.module.get_submodule(name)) is not Kind.LINEAR:
            continue
        after = [part for part in seen if module_of(part) in order[number:]]
        for part in after:
            if part.parameter == f"{name}.weight" and part.cut is None:
                return Outlet(part, tuple(one.name for one in after))
    return None


def _is_of_layer(target: Target, module: str) -> bool:
    parts = (*target.parts, *target.frozen_parts)
    return any(part.layer is not None and module_of(part) == module for part in parts)


@dataclass(frozen=True, eq=False)
class Lexicon:
    """What every word alone makes of the outlet's input, less the mean of all."""

    words: Int[Tensor, "words"]
    vectors: Float[Tensor, "words width"]
    squares: Float[Tensor, "words"]
    rows: Int[Tensor, "vocabulary"]  # where each word stands

    def shift(
        self,
        slopes: Float[Tensor, "chains width"],
        curvatures: Float[Tensor, "chains"],
        now: Int[Tensor, "chains"],
    ) -> Float[Tensor, "chains words"]:
        """Returns what the likelihood gains, by slope and curvature, with each word for another."""
        own = self.vectors[self.rows[now]]
        along = slopes @ self.vectors.T - (slopes * own).sum(1, keepdim=True)
        apart = self.squares - 2 * own @ self.vectors.T + own.square().sum(1, keepdim=True)
        return SHARE_ALONE * along - SHARE_ALONE**2 / 2 * curvatures[:, None] * apart


_LEXICONS: "WeakKeyDictionary[Target, dict[str, Lexicon]]" = WeakKeyDictionary()


def read_lexicon(target: Target, outlet: Outlet, bench: Bench) -> Lexicon | None:
    """Returns the lexicon, made once for a model; none where time ends before it is made."""
    kept = _LEXICONS.setdefault(target, {})
    if outlet.part.name in kept:
        return kept[outlet.part.name]
    vocabulary = target.vocabulary
    words = vocabulary.allowed.nonzero()[:, 0]
    frame, special = vocabulary.frame(vocabulary.frame_length + 1)
    place, inputs = special.index(False), ModuleInputs(target, [outlet.part])
    cost = cost_of(target)

    def piece(some: slice, _: slice) -> Tensor:
        ids = torch.tensor(frame, device=words.device).repeat(len(words[some]), 1)
        ids[:, place] = words[some]
        mask = target.attention_mask([len(frame)]).expand(len(ids), -1)
        batch = Batch(ids=ids, mask=mask, labels=target.any_labels(*ids.shape))
        with torch.no_grad(), roughly(target):
            return inputs(batch)[module_of(outlet.part)].to(target.dtype)[:, None]

    tokens = len(frame)
    held, work = cost.bytes(1, tokens, GRADIENTS), cost.work(1, tokens, 1)
    chunks = pieces(bench, words.device, held, work, 4 * AT_ONCE)
    missing = target.vocabulary.embeddings.new_full(outlet.part.shape[1:], torch.inf)
    vectors = chunks.run_pairs(piece, len(words), 1, missing)[:, 0]
    if not bool(vectors.isfinite().all()):
        return None
    vectors = vectors - vectors.mean(0)
    rows = torch.zeros(len(vocabulary.allowed), dtype=torch.int64, device=words.device)
    rows[words] = torch.arange(len(words), device=words.device)
    kept[outlet.part.name] = Lexicon(words, vectors, vectors.square().sum(1), rows)
    return kept[outlet.part.name]


@contextmanager
def roughly(target: Target) -> Iterator[None]:
    """Within it products keep 8 bits where the processor is made for that: noise hides the rest.

    So the same search may end elsewhere on another processor; what it ends at is judged in full
    precision.
    """
    device = target.device.type
    # Not a promised part of torch: where it is missing, products keep all their bits
    made_for_it = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    quick = device == "cuda" or made_for_it()
    with torch.autocast(device, torch.bfloat16, enabled=quick and target.dtype is torch.float32):
        yield


@dataclass(eq=False)
class Budget:
    """How many sentences may still be scored."""

    left: int
    spent: int = 0

    def spend(self, count: int) -> None:
        self.left -= count
        self.spent += count


@dataclass(frozen=True, eq=False)
class Chains:
    """Sentences side by side, how likely what comes after the last layer makes them, and what the
    outlet is fed of each."""

    ids: Int[Tensor, "chains tokens"]
    nats: Float[Tensor, "chains"]
    fed: Float[Tensor, "chains width"]
    slopes: Float[Tensor, "chains width"]
    curvatures: Float[Tensor, "chains"]

    @property
    def misses(self) -> Float[Tensor, "chains"]:
        """How far what the outlet is fed is from what was seen of it, in the noise's own spread.

        Of the true sentence its square is that of as many standard normal numbers as it has
        entries.
        """
        squares = self.slopes.double().square().sum(1) / self.curvatures.double().clamp_min(1e-300)
        width = self.slopes.shape[1]
        return (squares - width) / math.sqrt(2 * width)

    def take(self, rows: Tensor) -> "Chains":
        return Chains(
            self.ids[rows],
            self.nats[rows],
            self.fed[rows],
            self.slopes[rows],
            self.curvatures[rows],
        )


class LateLikelihood:
    """How likely sentences make what is seen from the outlet on; a pass forward is most of it.

    Where gradients are clipped, by what is not known here: it is the most that any size makes.
    """

    def __init__(
        self, observation: Observation, outlet: Outlet, channel: NoisyChannel, budget: Budget
    ) -> None:
        self.target, self.outlet, self.channel = observation.target, outlet, channel
        self.budget = budget
        parts = {part.name: part for part in self.target.parts}
        seen = observation.update.tensors
        self.observed = {name: seen[parts[name].name][0] for name in outlet.names}
        self.gradients = gradients_of(self.target, outlet.names)

    def __call__(self, ids: Int[Tensor, "sentences tokens"], label: int) -> Chains:
        self.budget.spend(len(ids))
        found = [self._score(some, label) for some in torch.split(ids, AT_ONCE)]
        return Chains(ids, *(torch.cat(parts) for parts in zip(*found, strict=True)))

    def _score(self, ids: Tensor, label: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch = make_batch(self.target, ids, label)
        with roughly(self.target):
            found = self.gradients.of(batch, double=False, sums=self.target.dtype)
        inner = ids.new_zeros(len(ids), dtype=torch.float64)
        squares = inner.clone()
        for name, gradients in found.items():
            inner += gradients.along(self.observed[name]).double()
            squares += gradients.pair_up(gradients).double()
        size = torch.full_like(inner, self.channel.scale)
        if self.channel.clip is not None:
            size = inner.clamp_min(0) / squares.clamp_min(1e-300)
        variance = self.channel.noise_std**2
        nats = (size * inner - size.square() * squares / 2) / variance
        first = found[self.outlet.part.name]
        assert isinstance(first, OuterSums)
        fed, delta = first.inputs[:, 0], first.deltas[:, 0] * size[:, None].to(first.deltas)
        # Of ⟨δhᵀ, G⟩ − ‖δ‖²‖h‖²/2 with the δ held
        curvatures = delta.square().sum(1) / variance
        slopes = delta @ self.observed[self.outlet.part.name] / variance
        return nats, fed, slopes - curvatures[:, None] * fed, curvatures


def make_batch(target: Target, ids: Int[Tensor, "sentences tokens"], label: int) -> Batch:
    mask = target.attention_mask([ids.shape[1]]).expand(len(ids), -1)
    labels = torch.full((len(ids),), label, device=ids.device)
    return Batch(ids=ids, mask=mask, labels=labels)
