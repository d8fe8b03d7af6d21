"""How likely what was seen is for any candidate sentence, given the rest of the batch: exactly,
for gradients that were clipped and noised.

What arrives is y = m + noise, with one Gaussian spread on every entry and m the mean of a batch's
gradients, each clipped (DP-SGD), all clipped together (client-level), or none. So log p(y | m) =
(⟨m, y⟩ − ‖m‖²/2)/spread² up to what all candidates share. Of a candidate that replaces one sentence
of the batch, ⟨m, y⟩ and ‖m‖² follow from a few sums of its own gradient: its products with y and
with the sum over the others, its square in what is seen, and its square in all that trains, which
is what a clip goes by. None of them needs a gradient to be built.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.defense import Channel, Defense, Survivors, want_each_example
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.protocol import Protocol
from gradleak.core.specs import to_string
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.matching.chunking import BESIDE, GRADIENTS, Chunks, cost_of
from gradleak.matching.exact import gradients_of

AT_ONCE = {"cpu": 128}  # sentences: more are no faster on a core
OBSERVED = "observed"
OTHERS = "others"
Tensors = Mapping[str, Tensor]  # by part


@dataclass(frozen=True)
class NoisyChannel:
    """What defenses leave of a batch's gradients: scaled down to a norm, then Gaussian noise."""

    noise_std: float  # on every entry of what arrives
    clip: float | None = None  # a norm, over all tensors that train
    clips_each: bool = False  # every example by itself, before the mean
    scale: float = 1.0  # of what is sent, in units of the gradient

    def factors(
        self, whole_squares: Float[Tensor, "*candidates"], each: bool
    ) -> Float[Tensor, "*candidates"]:
        """Returns what clipping multiplies gradients of such squares by, of single examples or of
        whole batches."""
        if self.clip is None or each is not self.clips_each:
            return torch.ones_like(whole_squares)
        return (self.clip / whole_squares.clamp_min(1e-300).sqrt()).clamp(max=1.0)


def read_channel(
    defenses: Sequence[Defense], protocol: Protocol, batch_size: int, rounds: int = 1
) -> NoisyChannel:
    """Returns the channel that defenses in this order are; refuses by name what is no clipping
    followed by Gaussian noise.

    Of the same batch in several rounds, while the model stands still, the mean of what was seen
    says all that they say: it has 1/√rounds of the noise.
    """
    if protocol.dropout or protocol.sizes_lost or not protocol.is_one_gradient(batch_size):
        raise GradleakError(
            f"No exact likelihood is known for {to_string(protocol)}: what it sends is not one"
            " gradient without dropout. Use --protocol fedsgd."
        )
    clip, noise = None, Channel()
    for defense in defenses:
        channel = defense.channel()
        if (why := _find_obstacle(channel)) is not None:
            raise GradleakError(f"No bound is computed through {to_string(defense)}: {why}.")
        if channel.clip is not None and (clip is not None or noise.noisy):
            raise GradleakError(
                f"No bound is computed through {to_string(defense)}: it clips what was clipped or"
                " noised before, so that what arrives is not Gaussian around a known mean."
            )
        clip = clip if channel.clip is None else channel.clip
        noise = noise.then(channel)
    if not noise.noisy:
        raise GradleakError(
            "Nothing is noised here, so that every word that gives another update is told apart:"
            " nothing below everything bounds an attack. Bounds are for dp_sgd, client_dp,"
            " gaussian_noise and chains of clipping and noise."
        )
    return NoisyChannel(
        noise.noise_std_for(batch_size) / rounds**0.5,
        clip,
        want_each_example(defenses),
        protocol.gradient_scale(batch_size),
    )


def _find_obstacle(channel: Channel) -> str | None:
    if channel.quantisation_levels is not None:
        return (
            "the scale of every bucket arrives to the last digit, and only words with the very same"
            " scales could have made it"
        )
    if channel.signs_only:
        return "signs arrive without noise, and only words with the very same signs fit"
    if channel.survivors is not Survivors.ALL:
        return "entries are left out by a rule that depends on the gradient"
    if channel.rounding or channel.smallest_step:
        return "rounding is no Gaussian noise"
    return None


@dataclass(frozen=True, eq=False)
class CandidateSums:
    """What a channel's likelihood needs of the gradients of candidates."""

    # With each reference, over the tensors that it has
    along: Mapping[str, Float[Tensor, "candidates"]]
    seen: Float[Tensor, "candidates"]  # squares, over what is seen
    whole: Float[Tensor, "candidates"]  # and over all that trains


class GradientSums:
    """Computes such sums for candidates of one model and one view, many sentences in a pass."""

    def __init__(self, target: Target, visible: Sequence[str], needs_whole: bool) -> None:
        self.target, shown = target, set(visible)
        self.seen = [part for part in target.parts if {part.name, part.parameter} & shown]
        parts = list(target.parts) if needs_whole else self.seen
        self.names = tuple(part.name for part in parts)
        self.gradients = gradients_of(target, self.names)
        self._cost = cost_of(target)

    def __call__(self, batch: Batch, references: Mapping[str, Tensors]) -> CandidateSums:
        """Returns the sums of each example of a batch; each is taken for a candidate by itself."""
        count, tokens = batch.mask.shape
        size = int(BESIDE / max(1.0, self._cost.bytes(1, tokens, GRADIENTS)))
        size = min(size, AT_ONCE.get(self.target.device.type, size))
        rows = Chunks(size, device=self.target.device).run_pairs(
            lambda some, _: self._sum(batch[some], references)[:, None],
            count,
            1,
            torch.zeros(2 + len(references), dtype=torch.float64, device=self.target.device),
        )[:, 0]
        along = {name: rows[:, 2 + place] for place, name in enumerate(references)}
        return CandidateSums(along, rows[:, 0], rows[:, 1])

    def _sum(
        self, batch: Batch, references: Mapping[str, Tensors]
    ) -> Float[Tensor, "candidates sums"]:
        found = self.gradients.of(batch, double=False, sums=self.target.dtype)
        shown = {part.name for part in self.seen}
        sums = torch.zeros(
            len(batch.mask), 2 + len(references), dtype=torch.float64, device=batch.mask.device
        )
        with torch.no_grad():
            for name, gradients in found.items():
                square = gradients.pair_up(gradients).double()
                sums[:, 1] += square
                if name in shown:
                    sums[:, 0] += square
                for place, reference in enumerate(references.values()):
                    if name in reference:
                        sums[:, 2 + place] += gradients.along(reference[name]).double()
        return sums

    def cut(self, update: Update) -> dict[str, Tensor]:
        """Returns what is seen in an update by part."""
        return dict(_cut(self.seen, update.tensors))


def _cut(parts: Sequence[Part], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for part in parts:
        if part.name in tensors:
            yield part.name, tensors[part.name][0]
        else:
            yield part.name, part.of(tensors[part.parameter][0])


class Likelihood:
    """How likely an observation is for candidates in place of one example of a batch whose other
    examples, and all labels, are given."""

    def __init__(
        self, observation: Observation, batch: Batch, place: int, channel: NoisyChannel
    ) -> None:
        """`batch` are words [examples, tokens]; those of the example at `place` do not count."""
        self.channel, self.batch, self.place = channel, batch, place
        target = observation.target
        _refuse_other_content(batch)
        refuse_other_losses(target, batch)
        self.sums = GradientSums(
            target, tuple(observation.update.tensors), channel.clip is not None
        )
        self.references: dict[str, Tensors] = {OBSERVED: self.sums.cut(observation.update)}
        others = sum_others(target, batch, place, channel)
        if others is not None:
            seen = {part.name for part in self.sums.seen}
            self.references[OTHERS] = {name: others[name] for name in seen}
            hidden = {name: tensor for name, tensor in others.items() if name not in seen}
            if hidden and channel.clip is not None and not channel.clips_each:
                self.references["hidden others"] = hidden
        # Squares of the sum over the others, over what is seen and over all; products with y
        self.others = tuple(
            float(_multiply(self.references[one], self.references[other]))
            if {one, other} <= set(self.references)
            else 0.0
            for one, other in (
                (OTHERS, OTHERS),
                ("hidden others", "hidden others"),
                (OTHERS, OBSERVED),
            )
        )

    def candidates(self, ids: Int[Tensor, "candidates tokens"]) -> Batch:
        """Returns sentences in the place of the example, one candidate each, with its label."""
        row = self.batch[self.place : self.place + 1]
        return replace(
            row,
            ids=ids,
            mask=row.mask.expand(len(ids), -1),
            labels=(
                ids
                if self.sums.target.labels_are_tokens
                else row.labels.expand(len(ids), *row.labels.shape[1:])
            ),
        )

    def __call__(self, ids: Int[Tensor, "candidates tokens"]) -> Float[Tensor, "candidates"]:
        """Returns log p(seen | candidate, the rest) in nats, up to one number for all."""
        found = self.sums(self.candidates(ids), self.references)
        inner, squares = self.project(found)
        return (inner - squares / 2) / self.channel.noise_std**2

    def project(
        self, found: CandidateSums, reference: str = OBSERVED
    ) -> tuple[Float[Tensor, "candidates"], Float[Tensor, "candidates"]]:
        """Returns ⟨m, y⟩ and ‖m‖² of the mean that each candidate would have sent."""
        channel, zero = self.channel, torch.zeros_like(found.seen)
        examples = len(self.batch.mask)
        own = channel.factors(found.whole, each=True)
        across = found.along.get(OTHERS, zero)
        behind = found.along.get("hidden others", zero)
        seen_others, hidden_others, others_along = self.others
        squares = own.square() * found.seen + 2 * own * across + seen_others
        whole = found.whole + 2 * (across + behind) + seen_others + hidden_others
        share = channel.scale / examples
        together = share * channel.factors(share**2 * whole, each=False)
        inner = own * found.along[reference] + others_along
        return together * inner, together.square() * squares


def sum_others(
    target: Target, batch: Batch, place: int, channel: NoisyChannel
) -> dict[str, Tensor] | None:
    """Returns the sum of the other examples' gradients by part, each clipped where the channel
    clips each; none where there are no others."""
    others = [other for other in range(len(batch.mask)) if other != place]
    if not others:
        return None
    total: dict[str, Tensor] = {}
    for other in others:
        copies = {
            name: value.detach().requires_grad_() for name, value in target.parameters.items()
        }
        with torch.enable_grad():
            loss = target.losses(batch[other : other + 1], copies).sum()
            found = torch.autograd.grad(loss, list(copies.values()), materialize_grads=True)
        square = torch.stack([one.double().square().sum() for one in found]).sum()
        factor = float(channel.factors(square, each=True))
        for name, gradient in zip(copies, found, strict=True):
            total[name] = total.get(name, 0) + factor * gradient
    return dict(_cut(target.parts, {name: tensor[None] for name, tensor in total.items()}))


def _multiply(one: Tensors, other: Tensors) -> Tensor:
    return torch.stack([(one[name].double() * other[name].double()).sum() for name in one]).sum()


def refuse_other_losses(target: Target, batch: Batch) -> None:
    """Refuses what is no mean over texts, each with one class or learnt for its words."""
    weights = target.weigh(batch)
    if target.labels_are_open or bool((weights != weights[0]).any()):
        raise GradleakError(
            "Bounds by words are of batches whose loss is the mean over their texts, each with one"
            " class or learnt for its words: with a mean over tokens use batches of one text."
        )


def _refuse_other_content(batch: Batch) -> None:
    if batch.ids is None:
        raise GradleakError("Bounds by words are for texts; this batch holds pictures.")
