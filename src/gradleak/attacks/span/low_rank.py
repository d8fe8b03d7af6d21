"""What adapters of low rank (LoRA) give away of the first layer, and the words that explain it.

LoRA sends the gradients of two thin matrices beside a layer y = W x + s·B (A x): dB = s Σ δ (A x)ᵀ
and dA = s Σ (Bᵀδ) xᵀ. Of rank r they hold at most r directions, fewer than there are tokens, so
that no single word can be held against them. All words together can: every direction that was seen
lies in the span of what the words of the text feed in, and no other words have such a span.

Two places of the first layer, where tokens have not mixed, show such directions.

- *Inputs.* The rows of dA lie in the span of the inputs x_t. Adapters that are fed alike (query and
  value) stand one above the other. At the first step of a training B is zero, and dA with it.
- *Keys.* A query's δ_t is a weighted sum of its head's keys, whose weights add up to zero: softmax
  ignores shifts. So the columns of the query's dB lie, head by head, in the span of the keys less
  one of them, and that holds from the first step on. A head has room for as many words as it is
  wide.

Which few of all words at all positions span the directions is a sparse recovery with several
snapshots. The search takes the word that lies most nearly in what is left of the signal, given
those taken already (rank-aware order-recursive matching pursuit, Davies & Eldar 2012). As soon as
as many are right as there are tokens above the rank, all others fit exactly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.span.account import append_last_words
from gradleak.core.attack import Bench, TokenIds
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.parts import FUSED, Part
from gradleak.core.target import Target
from gradleak.matching.chunking import refuse_without_room
from gradleak.matching.inputs import ModuleInputs, first_inputs, module_of
from gradleak.matching.linear_algebra import decompose, orthonormalise

VECTORS_AT_ONCE = 2**13
ROUNDED = 1e-5  # of the strongest direction: a weaker one is known to a hundredth at best
ABOVE_ERRORS = 4.0  # times what known errors make of a direction
GONE = 1e-3  # of a unit direction: what is left of it is explained
# Log of the share of a word outside of the signal under which it is one of the text's: wrong ones
# stay above −7.
SURE = -11.0
SMALLEST = 1e-7  # of a share, in single precision
EXPLAINED = 1e-4  # of the signal, left by a search that found all words
SWEEPS = 4
DROPPED = 0.3  # of the words, when a search begins again
LENGTHS_TRIED = 3  # where none is known: those at which the closing token fits best


@dataclass(frozen=True, eq=False)
class Signal:
    """Directions that were seen, in every head by itself, and what words feed in there."""

    directions: Float[Tensor, "heads width some"]  # orthonormal, padded with zeros
    fed: "Fed"


@dataclass(frozen=True, eq=False)
class Fed:
    """What every word feeds in at every position: to the layer, or as the key of each head."""

    atoms: Float[Tensor, "positions heads words width"]
    squares: Float[Tensor, "positions heads words"]

    @staticmethod
    def of(atoms: Float[Tensor, "positions heads words width"]) -> "Fed":
        return Fed(atoms, atoms.square().sum(-1))


def has_only_adapters(observation: Observation) -> bool:
    """Returns whether of the first layer adapters are seen, and no whole matrix."""
    parts = [observation.target.part(name) for name in observation.update.tensors]
    first = [part.module for part in parts if part.layer == 1]
    whole = {"query", "key", "value", FUSED}
    return not whole & set(first) and bool({"adapter_in", "adapter_out"} & set(first))


class Words:
    """All words at all positions, as the first layer meets them; made once for many batches."""

    def __init__(self, target: Target, positions: int, bench: Bench) -> None:
        self.target, self.positions, self.bench = target, positions, bench
        vocabulary = target.vocabulary
        self.frame = list(dict.fromkeys([*vocabulary.prefix, *vocabulary.suffix]))
        allowed = vocabulary.allowed.nonzero()[:, 0]
        self.free = len(allowed)  # words that may stand inside a text, and the special ones behind
        self.ids = torch.cat([allowed, torch.tensor(self.frame, dtype=torch.int64).to(allowed)])
        self.inputs = ModuleInputs(target, (_find_query(target),))
        self.heads = int(getattr(target.module.config, "num_attention_heads", 0))
        self.key, self.key_outputs = _find_key(target)

    def column(self, word: int) -> int:
        """Returns where a special token stands among the words."""
        return self.free + self.frame.index(word)

    @cached_property
    def have_positions(self) -> bool:
        """Whether positions are added before the first layer; rotary ones turn keys later."""
        made = first_inputs(self.inputs, self.ids[:1], 2)
        return not torch.allclose(made[0], made[1], rtol=1e-5, atol=1e-7)

    @cached_property
    def as_inputs(self) -> Fed:
        self._refuse_without_room()
        return Fed.of(torch.cat([made[:, None] for made in self._feed()], dim=2))

    @cached_property
    def as_keys(self) -> Fed:
        """Keys less that of the token which begins every text, where there is one."""
        self._refuse_without_room()
        keys = torch.cat([self._make_keys(made) for made in self._feed()], dim=1)
        if self.target.vocabulary.prefix:
            keys = keys - keys[0, self.column(self.target.vocabulary.prefix[0])]
        by_heads = keys.view(*keys.shape[:2], self.heads, -1).transpose(1, 2)
        return Fed.of(by_heads.contiguous())

    def _feed(self) -> Iterator[Float[Tensor, "positions some width"]]:
        with torch.no_grad():
            for some in torch.split(self.ids, max(1, VECTORS_AT_ONCE // self.positions)):
                yield first_inputs(self.inputs, some, self.positions)

    @torch.no_grad()
    def _make_keys(self, fed: Float[Tensor, "*lead width"]) -> Float[Tensor, "*lead outputs"]:
        keys: Tensor = self.key(fed.contiguous())  # Conv1D takes views apart
        outputs = self.key_outputs
        # A fused matrix has queries first, then keys
        return keys[..., outputs : 2 * outputs] if keys.shape[-1] > outputs else keys

    def _refuse_without_room(self) -> None:
        held = 2 * self.positions * len(self.ids) * self.target.hidden_size * 4
        what = "every word at every position of one batch"
        refuse_without_room("span", held, self.bench, self.target.device, what)


class LowRankSearch:
    """Finds the words of one batch from the adapters of the first layer."""

    def __init__(self, observation: Observation, words: Words, bench: Bench, tries: int) -> None:
        self.observation, self.target, self.bench = observation, observation.target, bench
        self.words, self.tries = words, tries
        self.signals = self._read_signals()

    def run(self) -> tuple[tuple[TokenIds, ...], int]:
        """Returns the sentences that explain most, and how many passes over the words it took."""
        self.passes = 0
        best: tuple[float, tuple[TokenIds, ...]] = (float("inf"), ())
        for lengths in self._list_lengths():
            left, sentences = self._search(lengths)
            best = min(best, (left, sentences), key=lambda one: one[0])
            if best[0] < EXPLAINED or self.bench.out_of_time:
                break
        sentences = best[1]
        if self.target.labels_are_tokens:
            sentences = tuple(append_last_words(self.observation, sentences))
        return sentences, self.passes

    def list_words(self, count: int) -> Int[Tensor, "words"]:
        """Returns the words that explain most, so many at most, where positions play no part."""
        self.passes = 0
        fixed = [(0, self.words.column(word)) for word in self.target.vocabulary.prefix]
        chosen = self._choose([0] * count, [None] * count, fixed)
        return self.words.ids[sorted({column for _, column in chosen})]

    # What was seen, and what words feed in

    def _read_signals(self) -> list[Signal]:
        inputs, keys = self._read_inputs(), self._read_keys()
        if inputs is None and keys is None:
            raise GradleakError(
                "The adapters that are seen are fed by no token alone: span needs those of the"
                " first layer's query, or after the first step of its query, key or value."
            )
        found = []
        if inputs is not None:
            found.append(_make_signal(inputs[None], self.words.as_inputs))
        if keys is not None:
            found.append(_make_signal(keys, self.words.as_keys))
        return found

    def _read_inputs(self) -> Float[Tensor, "width some"] | None:
        """Reads the directions of the adapters' A that the layer's inputs feed."""
        target, seen = self.target, self.observation.update.tensors
        rows, errors = [], []
        for name in seen:
            part = target.part(name)
            if part.layer == 1 and part.module == "adapter_in" and _is_fed_first(target, part):
                rows.append(seen[name][0])
                errors.append(self.observation.errors(name))
        return _find_directions(torch.cat(rows).mT, torch.cat(errors).mT) if rows else None

    def _read_keys(self) -> Float[Tensor, "heads width some"] | None:
        """Reads the directions of the query's B, head by head; none where keys are turned by their
        positions, or queries share them."""
        target, seen = self.target, self.observation.update.tensors
        heads = self.words.heads
        for name in seen:
            part = target.part(name)
            if part.layer != 1 or part.module != "adapter_out" or not heads:
                continue
            role = _find_role(target, part)
            if role not in ("query", FUSED) or not self.words.have_positions:
                continue
            matrix, errors = seen[name][0], self.observation.errors(name)
            if role == FUSED:
                matrix, errors = (one.chunk(3)[0] for one in (matrix, errors))
            if len(matrix) % heads or len(matrix) != self.words.key_outputs:
                return None
            each = zip(matrix.chunk(heads), errors.chunk(heads), strict=True)
            found = [_find_directions(*one) for one in each]
            kept = [one for one in found if one is not None]
            if len(kept) < heads:
                return None
            most = max(one.shape[1] for one in kept)
            padded = [torch.nn.functional.pad(one, (0, most - one.shape[1])) for one in kept]
            return torch.stack(padded)
        return None

    # The search

    def _list_lengths(self) -> list[tuple[int, ...]]:
        """Lists the lengths to try: those that are known, or those at which the closing token
        lies most nearly in the signal."""
        known, suffix = self.observation.knows.lengths, self.target.vocabulary.suffix
        if known is not None:
            return [known]
        if not suffix or self.observation.knows.batch_size not in (None, 1):
            raise GradleakError(
                "span needs the lengths of the texts to take adapters apart: grant them (--know"
                " lengths, lengths=)."
            )
        first = self.target.vocabulary.frame_length
        misses = [
            float(self._score(place, [])[self.words.column(suffix[-1])])
            for place in range(first, self.words.positions)
        ]
        best = torch.tensor(misses).argsort()[:LENGTHS_TRIED].tolist()
        return [(place + first + 1,) for place in best]

    def _search(self, lengths: tuple[int, ...]) -> tuple[float, tuple[TokenIds, ...]]:
        """Returns the best sentences of these lengths, and what they leave of the signal."""
        vocabulary, slots, fixed = (
            self.target.vocabulary,
            list[int](),
            dict[tuple[int, int], None](),
        )
        for length in lengths:
            ids, special = vocabulary.frame(length)
            # Of the last token a language model computes nothing that its loss looks at
            for place in range(length - self.target.labels_are_tokens):
                if special[place]:
                    fixed[place, self.words.column(ids[place])] = None
                else:
                    slots.append(place)
        stream = self.bench.streams_of(self.observation).child("low rank", *lengths)
        best: tuple[float, list[tuple[int, int]]] = (float("inf"), [])
        begun = list[tuple[int, int] | None]([None] * len(slots))
        for number in range(self.tries):
            chosen = self._polish(self._choose(slots, list(begun), list(fixed)), list(fixed))
            left = self._measure_left([*fixed, *chosen])
            best = min(best, (left, chosen), key=lambda one: one[0])
            if best[0] < EXPLAINED or self.bench.out_of_time:
                break
            generator = stream.child(number).generator()
            dropped = torch.rand(len(slots), generator=generator) < DROPPED
            begun = [
                None if gone else one for one, gone in zip(best[1], dropped.tolist(), strict=True)
            ]
        return best[0], self._write_out(lengths, best[1])

    def _choose(
        self,
        slots: Sequence[int],
        chosen: list[tuple[int, int] | None],
        fixed: list[tuple[int, int]],
    ) -> list[tuple[int, int]]:
        """Fills the free slots: those that are sure at once, else the best one, and again."""
        while any(one is None for one in chosen) and not self.bench.out_of_time:
            taken = [*fixed, *(one for one in chosen if one is not None)]
            found: dict[int, tuple[float, int]] = {}
            used = set(taken)
            for place in {slot for slot, one in zip(slots, chosen, strict=True) if one is None}:
                scores = self._score(place, taken)[: self.words.free]
                for other, column in used:  # of two texts with one word at one place, one shows
                    if other == place and column < self.words.free:
                        scores[column] = torch.inf
                least = scores.min(0)
                found[place] = float(least.values), int(least.indices)
            best = min(found.values())[0]
            open_slots = set(found)
            for row, (slot, one) in enumerate(zip(slots, chosen, strict=True)):
                score, column = found.get(slot, (0.0, 0))
                if one is None and slot in open_slots and score <= max(best, SURE):
                    chosen[row] = (slot, column)
                    open_slots.discard(slot)  # the next text's word there is another one
        return [one or (slot, 0) for slot, one in zip(slots, chosen, strict=True)]

    def _polish(
        self, chosen: list[tuple[int, int]], fixed: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Puts the best word at each place, beside all others, until that changes nothing."""
        for _ in range(SWEEPS):
            if self._measure_left([*fixed, *chosen]) < EXPLAINED or self.bench.out_of_time:
                break
            before = list(chosen)
            for row, (place, _) in enumerate(chosen):
                others = [one for other, one in enumerate(chosen) if other != row]
                scores = self._score(place, [*fixed, *others])[: self.words.free]
                chosen[row] = (place, int(scores.argmin()))
            if chosen == before:
                break
        return chosen

    def _score(self, place: int, taken: Sequence[tuple[int, int]]) -> Float[Tensor, "words"]:
        """Returns how far each word at a place lies outside of what others leave of the signal: the
        log of a squared sine, averaged over heads."""
        self.passes += 1
        total = torch.zeros(len(self.words.ids), device=self.target.device)
        for signal in self.signals:
            basis = self._span(signal, taken)
            left = _find_left(signal.directions, basis)
            atoms = signal.fed.atoms[place]
            inside = (atoms @ left).square().sum(-1)
            beside = signal.fed.squares[place] - (atoms @ basis).square().sum(-1)
            shares = 1 - inside / beside.clamp_min(SMALLEST * signal.fed.squares[place])
            total += shares.clamp_min(SMALLEST).log().mean(0)
        return total / len(self.signals)

    def _span(
        self, signal: Signal, taken: Sequence[tuple[int, int]]
    ) -> Float[Tensor, "heads width some"]:
        """Returns orthonormal directions of the words that are taken."""
        heads, width = signal.directions.shape[:2]
        columns = [signal.fed.atoms[place, :, word] for place, word in dict.fromkeys(taken)]
        kept = [one for one in columns if float(one.abs().max()) > 0]  # keys less the first's own
        if not kept:
            return signal.directions.new_zeros(heads, width, 0)
        units = torch.nn.functional.normalize(torch.stack(kept, dim=-1), dim=1)
        return orthonormalise(units)

    def _measure_left(self, taken: Sequence[tuple[int, int]]) -> float:
        """Returns the share of the directions that words leave unexplained."""
        shares = []
        for signal in self.signals:
            basis, seen = self._span(signal, taken), signal.directions
            rest = seen - basis @ (basis.mT @ seen)
            shares.append(float(rest.square().sum() / seen.square().sum()))
        return max(shares)

    def _write_out(
        self, lengths: tuple[int, ...], chosen: Sequence[tuple[int, int]]
    ) -> tuple[TokenIds, ...]:
        """Returns sentences of the words in the order of their places."""
        words, found = iter(chosen), []
        for length in lengths:
            ids, special = self.target.vocabulary.frame(length)
            for place in range(length - self.target.labels_are_tokens):
                if not special[place]:
                    ids[place] = int(self.words.ids[next(words)[1]])
            found.append(tuple(ids[: length - self.target.labels_are_tokens]))
        return tuple(found)


def _find_left(
    directions: Float[Tensor, "heads width some"], basis: Float[Tensor, "heads width taken"]
) -> Float[Tensor, "heads width some"]:
    """Returns orthonormal directions of what is left of a signal outside of a basis."""
    rest = directions - basis @ (basis.mT @ directions)
    found = decompose(rest.mT)
    kept = (found.values > GONE)[..., None]
    return (found.right * kept).mT.to(directions)


def _make_signal(directions: Float[Tensor, "heads width some"], fed: Fed) -> Signal:
    return Signal(directions.to(fed.atoms), fed)


def _find_directions(
    columns: Float[Tensor, "width snapshots"], errors: Float[Tensor, "width snapshots"]
) -> Float[Tensor, "width some"] | None:
    """Returns the directions of columns that stand out of rounding and known errors."""
    found = decompose(columns.mT)
    stray = float(errors.double().norm(dim=0).max() + errors.double().norm(dim=1).max())
    kept = found.values > max(ROUNDED * float(found.values[0]), ABOVE_ERRORS * stray)
    return found.right[: len(kept)][kept].mT if bool(kept.any()) else None


def _find_query(target: Target) -> Part:
    """Returns the first layer's query, which nobody need train: it is fed by single tokens."""
    for part in (*target.parts, *target.frozen_parts):
        if part.layer == 1 and part.module == "query":
            return part
    raise GradleakError("This model has no query in its first layer that could be told apart.")


def _find_role(target: Target, part: Part) -> str:
    """Returns which module an adapter stands beside: query, or the whole of a fused matrix."""
    base = part.parameter.partition(".lora_")[0]
    beside = [
        one
        for one in (*target.parts, *target.frozen_parts)
        if one.parameter == f"{base}.base_layer.weight"
    ]
    return FUSED if len(beside) > 1 else (beside[0].module if beside else "")


def _is_fed_first(target: Target, part: Part) -> bool:
    """Whether an adapter is fed by what attention begins with."""
    return _find_role(target, part) in ("query", "key", "value", FUSED)


def _find_key(target: Target) -> tuple[torch.nn.Module, int]:
    """Returns the module that makes the first layer's keys, with its adapters, and how many
    outputs are keys."""
    for part in (*target.parts, *target.frozen_parts):
        if part.layer == 1 and part.module == "key":
            name = module_of(part).removesuffix(".base_layer")
            cut_axis = 0 if part.cut is None else part.cut.axis
            outputs = part.shape[cut_axis] if part.cut is not None else part.shape[0]
            return target.module.get_submodule(name), int(outputs)
    raise GradleakError("This model has no key in its first layer that could be told apart.")
