"""Step 3a: sentences whose positions hold several words at once, until one is left at each.

The first layer's span says which words stand at a position in one sentence or another, not which of
them belong together. What a token feeds onwards lies in the next span only if it read its own
sentence. So the words of a blend get weights, which follow the slope of the weighted mean miss: a
blend that leans towards one sentence slides into it.

For that the first layer is written out here. Attention is a weighted mean of what it reads, so a
token can read several words at each position at once, every one with its weight. With one word a
position this is the model's own pass.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gradleak.attacks.span.choose import Choices
from gradleak.attacks.span.row_space import FITS, Check
from gradleak.core.attack import TokenIds
from gradleak.core.batch import Batch
from gradleak.core.target import Target
from gradleak.matching.inputs import ModuleInputs, first_inputs, module_of

AGREES = 1e-4  # relative difference from the model's own pass: rounding leaves 1e-6
ATTENTION_MODULES = ("query", "key", "value", "attention_output")

FIRST_KEPT = 24  # words a position that blends begin with, at most
LIKELY = 0.02  # of a position's likeliest word, for a word to be among them
KEPT = 4  # words a position after all words were held against a blend
ROUNDS = 3
STEPS = 40
STEP_SIZE = 0.3  # in the logarithm of weights
# The power of the words' likelihood that a blend begins with: it leads astray where it is wrong.
FLATTENED = 0.3
SPREAD = 0.5  # of the random beginning, which decides what sentence a blend slides into
SHARPNESS = 7.0  # weights after a round, per decade of miss
CLEARLY = 0.1  # decades by which another end must fit better
READERS_AT_ONCE = 2**14
ANY, NONE = -1, -2  # in a sentence's frame: any word stands there, and no word does

# Whether to go on, after so many steps and with such a score: False where the time is up.
KeepGoing = Callable[[int, float], bool]


@dataclass(frozen=True, eq=False)
class PostNormAttention:
    """The first half of a layer that adds what attention read to its input, and then normalises."""

    inputs: ModuleInputs  # of the first layer
    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module
    norm: nn.Module
    heads: int

    def compute_affinities(
        self, readers: Float[Tensor, "readers width"], read: Float[Tensor, "words width"]
    ) -> Float[Tensor, "heads readers words"]:
        """Says how much each reader would look at each word, before the words' weights."""
        queries, keys = self._split_heads(self.query(readers)), self._split_heads(self.key(read))
        products = queries @ keys.mT / queries.shape[-1] ** 0.5
        # A shift of a reader's row cancels in the mean that attend() takes; exp() stays in range.
        affinities: Tensor = (products - products.amax(-1, keepdim=True)).exp()
        return affinities

    def compute_values(
        self, read: Float[Tensor, "words width"]
    ) -> Float[Tensor, "heads words size"]:
        """Computes what a reader takes from each word."""
        return self._split_heads(self.value(read))

    def attend(
        self,
        readers: Float[Tensor, "readers width"],
        affinities: Float[Tensor, "heads readers words"],
        values: Float[Tensor, "heads words size"],
        weights: Float[Tensor, "blends words"],
    ) -> Float[Tensor, "blends readers width"]:
        """Computes what readers feed onwards when they read words with weights."""
        count, (heads, words, size) = len(weights), values.shape
        # A column of ones beside the values sums the weights, by which the mean is divided.
        counted = torch.cat([values, values.new_ones(heads, words, 1)], dim=-1)
        weighted = counted[:, :, None] * weights.mT[None, :, :, None]
        read = (affinities @ weighted.flatten(2)).view(heads, len(readers), count, size + 1)
        context = read[..., :-1] / read[..., -1:].clamp_min(1e-20)
        context = context.permute(2, 1, 0, 3).flatten(2)
        onwards: Tensor = self.norm(self.output(context) + readers)
        return onwards

    def _split_heads(self, rows: Float[Tensor, "rows width"]) -> Float[Tensor, "heads rows size"]:
        return rows.view(len(rows), self.heads, -1).transpose(0, 1)


@torch.no_grad()
def write_out_attention(check: Check) -> PostNormAttention | None:
    """Writes out the first layer so that it gives what the model gives; none where that fails."""
    words = check.target.vocabulary.allowed.nonzero()[:5, 0]
    wanted = check.compute_inputs([tuple(words.tolist())])
    for attention in _read_first_layer(check.target):
        readers = _feed(attention.inputs, words)
        if readers.shape != wanted.shape:
            return None
        affinities = attention.compute_affinities(readers, readers)
        alone = readers.new_ones(1, len(words))
        made = attention.attend(readers, affinities, attention.compute_values(readers), alone)[0]
        if float((made - wanted).norm() / wanted.norm()) < AGREES:
            return attention
    return None


def _read_first_layer(target: Target) -> Iterator[PostNormAttention]:
    """Yields the ways to read the first layer: one for each normalisation it has."""
    parts = {
        part.module: part
        for part in target.parts
        if part.layer == 1 and part.module in ATTENTION_MODULES and part.cut is None
    }
    heads = int(getattr(target.module.config, "num_attention_heads", 0))
    if len(parts) < len(ATTENTION_MODULES) or not heads or target.attend_padding:
        return
    names = [module_of(parts[module]) for module in ATTENTION_MODULES]
    query, key, value, output = (target.module.get_submodule(name) for name in names)
    layer = _find_common_module(names).rpartition(".")[0]
    for norm in target.module.get_submodule(layer).modules():
        if isinstance(norm, nn.LayerNorm):
            inputs = ModuleInputs(target, [parts["query"]])
            yield PostNormAttention(inputs, query, key, value, output, norm, heads)


def _find_common_module(names: Sequence[str]) -> str:
    apart = [name.split(".") for name in names]
    levels = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*apart, strict=False))
    return ".".join(level[0] for level in levels)


def _feed(inputs: ModuleInputs, words: Int[Tensor, "words"]) -> Float[Tensor, "words width"]:
    """Computes what the first layer is fed for a sentence of these words."""
    labels = inputs.target.any_labels(1, len(words))
    batch = Batch(torch.ones_like(words, dtype=torch.bool)[None], labels, ids=words[None])
    return next(iter(inputs(batch).values()))[0]


@dataclass(frozen=True, eq=False)
class Entries:
    """Words at positions, those that frame a sentence included."""

    words: Int[Tensor, "entries"]
    places: Int[Tensor, "entries"]
    inputs: Float[Tensor, "entries width"]  # of the first layer

    def take(self, rows: Int[Tensor, "chosen"]) -> "Entries":
        """Returns some of them."""
        return Entries(self.words[rows], self.places[rows], self.inputs[rows])

    def group_by_place(self) -> list[Int[Tensor, "_"]]:
        """Returns the rows of each position that has any, first position first."""
        places = sorted(set(self.places.tolist()))
        return [(self.places == place).nonzero()[:, 0] for place in places]


@dataclass(frozen=True, eq=False)
class Blends:
    """Blends after some steps, and the heaviest word of each at every position."""

    read: Entries
    weights: Float[Tensor, "blends entries"]
    sentences: list[TokenIds]


class BlendSearch:
    """Finds sentences among the choices of one observation, many at a time."""

    def __init__(self, attention: PostNormAttention, check: Check, choices: Choices) -> None:
        self.attention, self.check = attention, check
        self.prefix, self.suffix = choices.prefix, choices.suffix
        framing = torch.tensor(sorted({*self.prefix, *self.suffix}), dtype=torch.long)
        here = [torch.cat([words, framing]) for words in choices.words]
        places = [torch.full((len(words),), place) for place, words in enumerate(here)]
        words, place = torch.cat(here), torch.cat(places)
        used, columns = torch.unique(words, return_inverse=True)
        table = first_inputs(attention.inputs, used.to(check.target.device), len(here))
        inputs = table[place, columns]
        self.all = Entries(words.to(table.device), place.to(table.device), inputs)
        self.framing = framing.to(table.device)

    @torch.no_grad()
    def search(
        self,
        choices: Choices,
        lengths: Sequence[int],
        rng: torch.Generator,
        keep_going: KeepGoing,
    ) -> list[TokenIds]:
        """Returns a sentence for each length: one that fits, or the nearest that was found."""
        found: list[TokenIds] = [()] * len(lengths)
        likely = self._take_log_weights(choices)
        noise = torch.randn(len(lengths), len(likely), generator=rng).to(likely)
        starts = FLATTENED * likely + SPREAD * noise
        kept = self._select_best(likely[None], FIRST_KEPT, LIKELY)
        rows, ends = list(range(len(lengths))), list(lengths)
        for _ in range(ROUNDS):
            blends = self._descend(ends, starts, kept, keep_going)
            for row, sentence in zip(rows, blends.sentences, strict=True):
                found[row] = sentence
            scores = self.check.score(blends.sentences)
            left = [place for place, score in enumerate(scores) if score >= FITS]
            if not left or not keep_going(0, min(scores)):
                break
            # What is left begins anew from how well every word would fit beside its blend.
            misses = self._measure_all(blends.read, blends.weights[left])
            ends = self._move_ends(
                misses, [ends[place] for place in left], choices.lengths.tolist()
            )
            starts, rows = -SHARPNESS * misses, [rows[place] for place in left]
            kept = self._select_best(starts, KEPT, 0.0)
        return found

    def _take_log_weights(self, choices: Choices) -> Float[Tensor, "entries"]:
        """Takes logarithms of the choices' weights, in the order of `all`; frames are certain."""
        frame = torch.ones(len(self.framing), dtype=torch.float64)
        weights = [torch.cat([weights, frame]) for weights in choices.weights]
        return torch.cat(weights).log().to(self.all.inputs)

    def _select_best(
        self, scores: Float[Tensor, "blends entries"], count: int, share: float
    ) -> Bool[Tensor, "blends entries"]:
        """Selects the best words of each position that have a share of the best one's likelihood.

        The words of the frame are always among them.
        """
        chosen = torch.isin(self.all.words, self.framing).expand_as(scores).clone()
        inside = scores.masked_fill(chosen, float("-inf"))
        for rows in self.all.group_by_place():
            values, order = inside[:, rows].topk(min(count, len(rows)))
            good = (values - values[:, :1]).exp() >= share
            chosen[:, rows] |= torch.zeros_like(chosen[:, rows]).scatter_(1, order, good)
        return chosen

    def _descend(
        self,
        lengths: Sequence[int],
        starts: Float[Tensor, "blends entries"],
        kept: Bool[Tensor, "_ entries"],
        keep_going: KeepGoing,
    ) -> Blends:
        """Follows the slope of the mean miss for some steps."""
        allowed = self._allow_entries(lengths) & kept
        rows = allowed.any(0).nonzero()[:, 0]
        read, allowed = self.all.take(rows), allowed[:, rows]
        affinities = self.attention.compute_affinities(read.inputs, read.inputs)
        values = self.attention.compute_values(read.inputs)
        logs = starts[:, rows].clone().requires_grad_()
        optimizer = torch.optim.Adam([logs], lr=STEP_SIZE, betas=(0.9, 0.99))
        sizes = torch.tensor(lengths, device=logs.device)
        for step in range(STEPS):
            with torch.enable_grad():
                weights = _normalise(logs, allowed, read.places)
                fed = self.attention.attend(read.inputs, affinities, values, weights)
                # Weights sum to one at each position, so that this is the mean over tokens.
                misses = (weights * self.check.measure_decades(fed)).sum(-1) / sizes
                (logs.grad,) = torch.autograd.grad(misses.sum(), [logs])
            if not keep_going(step, float(misses.min())) or float(misses.max()) < FITS:
                break
            optimizer.step()
        return Blends(read, weights.detach(), _take_heaviest(read, weights, lengths))

    def _allow_entries(self, lengths: Sequence[int]) -> Bool[Tensor, "blends entries"]:
        """Says which entries a sentence of each length may use."""
        frames = torch.full((len(lengths), int(self.all.places.max()) + 1), NONE)
        for row, length in zip(frames, lengths, strict=True):
            row[:length] = ANY
            row[: len(self.prefix)] = torch.tensor(self.prefix, dtype=torch.long)
            row[length - len(self.suffix) : length] = torch.tensor(self.suffix, dtype=torch.long)
        wanted = frames.to(self.all.words)[:, self.all.places]
        inside = ~torch.isin(self.all.words, self.framing)
        return torch.where(wanted == ANY, inside, wanted == self.all.words)

    def _measure_all(
        self, read: Entries, weights: Float[Tensor, "blends entries"]
    ) -> Float[Tensor, "blends all_entries"]:
        """Measures the miss of each word at each position, in decades, if it read the blends."""
        values, found = self.attention.compute_values(read.inputs), []
        for readers in torch.split(self.all.inputs, max(1, READERS_AT_ONCE // len(weights))):
            affinities = self.attention.compute_affinities(readers, read.inputs)
            fed = self.attention.attend(readers, affinities, values, weights)
            found.append(self.check.measure_decades(fed))
        return torch.cat(found, dim=-1)

    def _move_ends(
        self, misses: Float[Tensor, "blends entries"], ends: list[int], lengths: list[int]
    ) -> list[int]:
        """Moves each blend's end to where its closing token fits best, if clearly better."""
        if not self.suffix:
            return ends
        rows = (self.all.words == self.suffix[-1]).nonzero()[:, 0].tolist()
        closing = {int(self.all.places[row]) + 1: row for row in rows}
        found = []
        for row, end in zip(misses.tolist(), ends, strict=True):
            best = min(lengths, key=lambda length: row[closing[length]])
            found.append(best if row[closing[best]] < row[closing[end]] - CLEARLY else end)
        return found


def _normalise(
    logs: Float[Tensor, "blends entries"],
    allowed: Bool[Tensor, "blends entries"],
    places: Int[Tensor, "entries"],
) -> Float[Tensor, "blends entries"]:
    """Turns logarithms into weights that sum to one at every position."""
    parts = logs.clamp(-60, 60).exp() * allowed
    sums = parts.new_zeros(len(parts), int(places.max()) + 1).index_add(1, places, parts)
    return parts / sums[:, places].clamp_min(1e-30)


def _take_heaviest(
    read: Entries, weights: Float[Tensor, "blends entries"], lengths: Sequence[int]
) -> list[TokenIds]:
    groups = read.group_by_place()
    words = torch.stack([read.words[rows[weights[:, rows].argmax(1)]] for rows in groups], dim=1)
    return [tuple(row[:length]) for row, length in zip(words.tolist(), lengths, strict=True)]
