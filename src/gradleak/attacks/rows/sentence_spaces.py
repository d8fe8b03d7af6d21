"""Step 2: what tells one sentence of a batch from another, whatever else is in the batch.

A classifier reads its answer at one token, [CLS] say. So in its last layer only that token of each
sentence has a gradient, and the gradient of a matrix there is Σ_s δ_s x_sᵀ over sentences, not over
tokens: its rows span as many directions as the batch has sentences. A sentence of the batch feeds
an input that lies in this span, up to rounding; another does not. So sentences can be tried one by
one, with nothing known of the rest of the batch, as long as there are fewer of them than the layer
is wide (383 for MiniLM), however many tokens they have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.span.row_space import RowSpace, find_row_space_by_fall, read_row_space
from gradleak.core.attack import TokenIds
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.target import Target
from gradleak.matching.inputs import ModuleInputs, linear_parts, module_of
from gradleak.matching.kinds import capture_calls, find_slopes

SENTENCES_AT_ONCE = 64  # of one length or nearly, in a pass
SMALLEST = 1e-14  # of a squared miss in single precision: what lies under it is rounding
PROBED = (3, 6)  # sentences and tokens of the pass that shows where gradients are
HOLDS = 8.0  # expected errors that the input of a true sentence may lie outside of the span


@dataclass(frozen=True, eq=False)
class SentenceSpaces:
    """The spans of what single tokens of the sentences were fed, by module."""

    target: Target
    parts: tuple[Part, ...]
    spaces: tuple[RowSpace, ...]
    outside: tuple[Float[Tensor, "_ _"], ...]  # in the model's own precision
    at_end: bool  # the token is a sentence's last, not its first
    inputs: ModuleInputs

    @property
    def rank(self) -> int:
        """How many different sentences the batch has."""
        return max(space.rank for space in self.spaces)

    @torch.no_grad()
    def score(self, sentences: Sequence[TokenIds]) -> Float[Tensor, "sentences"]:
        """Returns how far sentences are outside: the mean over modules of the miss in decades."""
        order = sorted(range(len(sentences)), key=lambda place: len(sentences[place]))
        found = torch.zeros(len(sentences), dtype=torch.float64)
        for start in range(0, len(order), SENTENCES_AT_ONCE):
            some = order[start : start + SENTENCES_AT_ONCE]
            ids, lengths = self._lay_out([sentences[place] for place in some])
            found[some] = self._measure(ids, lengths).double().cpu()
        return found

    def compute_slopes(
        self, sentences: Sequence[TokenIds]
    ) -> Float[Tensor, "sentences tokens hidden"]:
        """Computes the gradient of the scores by the word embeddings."""
        ids, lengths = self._lay_out(sentences)
        with torch.enable_grad():
            embeddings = self.target.embed(ids).detach().requires_grad_()
            total = self._measure(ids, lengths, embeddings).sum()
        return torch.autograd.grad(total, embeddings)[0]

    @torch.no_grad()
    def hold(self, sentences: Sequence[TokenIds]) -> list[bool]:
        """Says of each sentence whether what it feeds lies in every span, as far as rounding lets
        one see."""
        ids, lengths = self._lay_out(sentences)
        held = torch.ones(len(sentences), dtype=torch.bool, device=ids.device)
        for space, fed in zip(self.spaces, self.feed(ids, lengths), strict=True):
            held &= space.measure_distances(fed) < HOLDS
        return held.tolist()

    def without(self, left: Mapping[str, Float[Tensor, "_ _"]]) -> "SentenceSpaces":
        """Returns the spans of what is left of the gradients."""
        dtype = self.target.dtype
        spaces = tuple(
            _cut(find_row_space_by_fall(left[part.name], dtype), self.rank - 1)
            for part in self.parts
        )
        return _make(self.target, self.parts, spaces, self.at_end)

    def feed(
        self, ids: Tensor, lengths: Tensor, embeddings: Tensor | None = None
    ) -> list[Float[Tensor, "sentences _"]]:
        """Computes what each module is fed at the one token of each sentence."""
        mask = _mask(lengths, ids.shape[1])
        labels = self.target.any_labels(*ids.shape)
        batch = Batch(mask, labels, ids if embeddings is None else None, embeddings)
        made = self.inputs(batch)
        at = lengths - 1 if self.at_end else torch.zeros_like(lengths)
        rows = torch.arange(len(ids), device=ids.device)
        return [made[module_of(part)][rows, at] for part in self.parts]

    def _measure(
        self, ids: Tensor, lengths: Tensor, embeddings: Tensor | None = None
    ) -> Float[Tensor, "sentences"]:
        each = zip(self.outside, self.feed(ids, lengths, embeddings), strict=True)
        misses = [(fed @ out).square().sum(-1) / fed.square().sum(-1) for out, fed in each]
        return torch.stack([(miss + SMALLEST).log10() / 2 for miss in misses]).mean(0)

    def _lay_out(
        self, sentences: Sequence[TokenIds]
    ) -> tuple[Int[Tensor, "sentences tokens"], Int[Tensor, "sentences"]]:
        width, pad = max(map(len, sentences)), self.target.vocabulary.pad
        rows = [[*sentence, *[pad] * (width - len(sentence))] for sentence in sentences]
        lengths = torch.tensor([*map(len, sentences)])
        return torch.tensor(rows).to(self.target.device), lengths.to(self.target.device)


def open_sentence_spaces(observation: Observation) -> SentenceSpaces | None:
    """Opens the spans of an observation; none where no module reads one token a sentence, or none
    of their spans is exact: noise, a hidden last layer, more sentences than the layer is wide."""
    target = observation.target
    if target.labels_are_tokens or target.attend_padding or not target.padding_is_free:
        return None
    parts, at_end = find_single_token_parts(target, tuple(observation.update.tensors))
    kept, spaces = list[Part](), list[RowSpace]()
    for part in parts:
        space = read_row_space(observation, [part])
        if space.exact:
            kept.append(part)
            spaces.append(space)
    if not kept:
        return None
    # What ffn_out is fed says no more than the others, and takes most of a layer to compute.
    cheap = [place for place, part in enumerate(kept) if part.module != "ffn_out"]
    kept = [kept[place] for place in cheap] or kept
    spaces = [spaces[place] for place in cheap] or spaces
    # A module whose span misses a direction that another has seen would refuse true sentences.
    most = max(space.rank for space in spaces)
    whole = [place for place, space in enumerate(spaces) if space.rank == most]
    parts, exact = tuple(kept[place] for place in whole), tuple(spaces[place] for place in whole)
    return _make(target, parts, exact, at_end)


def find_single_token_parts(target: Target, names: Sequence[str]) -> tuple[tuple[Part, ...], bool]:
    """Finds the linear weights of which one token a sentence has a gradient, each input once, and
    whether that token is the last."""
    parts = [part for part in linear_parts(target, names) if part.cut is None]
    examples, tokens = PROBED
    modules = {module_of(part): target.module.get_submodule(module_of(part)) for part in parts}
    generator = torch.Generator().manual_seed(0)  # numbers of no meaning: any would do
    with torch.enable_grad(), capture_calls(modules, examples) as calls:
        total = target.losses(target.probe(examples, tokens, generator)).sum()
        slopes = find_slopes(total, calls)
    found, ends = list[Part](), set[bool]()
    for part in parts:
        uses = slopes.get(module_of(part), ())
        if len(uses) != 1 or uses[0][1].shape[:2] != (examples, tokens):
            continue
        alive = uses[0][1].flatten(2).any(2)  # [examples, tokens]
        for at_end in (False, True):
            place = tokens - 1 if at_end else 0
            if bool(alive[:, place].all()) and int(alive.sum()) == examples:
                found.append(part)
                ends.add(at_end)
    return (tuple(found), ends.pop()) if len(ends) == 1 else ((), False)


def _make(
    target: Target, parts: tuple[Part, ...], spaces: tuple[RowSpace, ...], at_end: bool
) -> SentenceSpaces:
    outside = tuple(space.outside.to(target.device, target.dtype).contiguous() for space in spaces)
    return SentenceSpaces(target, parts, spaces, outside, at_end, ModuleInputs(target, parts))


def _cut(space: RowSpace, rank: int) -> RowSpace:
    """Returns a space of so many directions, its strongest."""
    missing = rank - space.rank
    strengths = space.strengths[:rank]
    if missing > 0:
        strengths = torch.cat([strengths, strengths[-1:].expand(missing)])
    return RowSpace(space.directions, strengths, space.noise, space.rounding, space.exact)


def _mask(lengths: Int[Tensor, "rows"], width: int) -> Bool[Tensor, "rows width"]:
    return torch.arange(width, device=lengths.device) < lengths[:, None]
