"""How many words could have made what arrived, where no noise stands between: signs, survivors,
levels and digits are functions of the gradient, so that a word either fits them or does not.

Nothing is weighed here. A word that fits would have sent what cannot be told from what arrived,
and the prior alone chooses among those that fit. Where one word fits, it was the one.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.defense import Channel, Defense, Survivors
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.protocol import Protocol
from gradleak.core.specs import to_string
from gradleak.matching.exact import Gradients
from gradleak.matching.noisy_channel import (
    GradientSums,
    NoisyChannel,
    refuse_other_losses,
    sum_others,
)

# Of a tensor's largest entry: what two computations of one gradient are surely nearer than (float32
# leaves 1e-6), and two words' gradients hardly ever are. Rounding can only make more words fit.
TOLERANCE = 1e-4
CANCELLED = 1e-6  # of the terms that it is a sum of: some gradients are nothing but rounding
AT_ONCE = 128  # sentences in a pass


def read_deterministic(
    defenses: Sequence[Defense], protocol: Protocol, batch_size: int
) -> Channel | None:
    """Returns what at most one defense does to a gradient without adding noise or scaling it down;
    none where words are weighed and not counted."""
    channel = Channel() if not defenses else defenses[0].channel()
    if len(defenses) > 1 or channel.noisy or channel.clip is not None or channel.after_server:
        return None
    if (
        protocol.dropout
        or not protocol.is_one_gradient(batch_size)
        or not protocol.channel(batch_size).exact
    ):
        raise GradleakError(
            f"Words that fit cannot be counted for {to_string(protocol)}: what it sends is not one"
            " gradient without dropout to its last digit. Use --protocol fedsgd."
        )
    return channel


@torch.no_grad()
def count_fitting(
    observation: Observation,
    batch: Batch,
    place: int,
    ids: Int[Tensor, "candidates tokens"],
    channel: Channel,
) -> int:
    """Returns how many candidates in place of one example fit what arrived; the first of them is
    the true one, which does.

    Short tensors are compared first, so that matrices are built for the few words that fit those.
    """
    target = observation.target
    refuse_other_losses(target, batch)
    sums = GradientSums(target, tuple(observation.update.tensors), needs_whole=False)
    seen = sums.cut(observation.update)
    others = sum_others(target, batch, place, NoisyChannel(0.0))
    share = observation.protocol.gradient_scale(len(batch.mask)) / len(batch.mask)
    whole = {part.name for part in sums.seen if part.cut is None}
    row, fitting = batch[place : place + 1], 1
    for some in torch.split(ids[1:], AT_ONCE):
        labels = row.labels.expand(len(some), *row.labels.shape[1:])
        labels = some if target.labels_are_tokens else labels
        made = replace(row, ids=some, mask=row.mask.expand(len(some), -1), labels=labels)
        found = sums.gradients.of(made, double=False, sums=target.dtype)
        left = torch.arange(len(some))
        for name in sorted(found, key=lambda name: seen[name].numel()):
            if channel.quantisation_levels is not None and name not in whole:
                continue  # of a slice no bucket is known
            rest = None if others is None else others[name]
            fits = [_fit(found[name], one, seen[name], rest, share, channel) for one in left]
            left = left[torch.tensor(fits, dtype=torch.bool)]
            if not len(left):
                break
        fitting += len(left)
    return fitting


def _fit(
    gradients: Gradients,
    one: Tensor,
    seen: Tensor,
    others: Tensor | None,
    share: float,
    channel: Channel,
) -> bool:
    alone = gradients.take(one[None])
    made = alone.build(tuple(seen.shape))[0]
    made = share * (made if others is None else made + others)
    slack = abs(share) * CANCELLED * float(alone.summands())
    return bool(fit_tensor(made, seen, channel, slack).all())


def fit_tensor(
    made: Float[Tensor, "*shape"],
    seen: Float[Tensor, "*shape"],
    channel: Channel,
    slack: float = 0.0,
) -> Bool[Tensor, "entries"]:
    """Returns where a gradient could have become what arrived, up to rounding and `slack`."""
    made, seen = made.flatten(), seen.flatten()
    slack = max(slack, TOLERANCE * float(made.abs().max()))
    if channel.quantisation_levels is not None:
        size = channel.quantisation_bucket or len(seen)
        largest, sent = (
            F.pad(one, (0, -len(one) % size)).view(-1, size).abs().amax(1) for one in (made, seen)
        )
        same = ((largest - sent).abs() <= slack).repeat_interleave(size)[: len(seen)]
        steps = (sent / channel.quantisation_levels).repeat_interleave(size)[: len(seen)]
        return same & ((made - seen).abs() <= steps + slack)
    if channel.signs_only:
        fits = (made.sign() == seen.sign()) | (made.abs() <= slack)
    else:
        digits = (channel.rounding * seen.abs()).clamp_min(channel.smallest_step)
        fits = (made - seen).abs() <= digits + slack
    if channel.survivors is Survivors.SEEN:
        fits |= seen == 0  # left out: not compared
    return fits
