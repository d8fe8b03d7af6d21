"""Features turned to their own directions, the strong ones taken down.

Of a gradient nearly all variance is the label's (on LeNet 95 % lies in ten directions); what tells pictures apart is small beside
it, and steps along all features at once go mostly astray. Since it is linear, an MLP after it can learn what it could before.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.matching.linear_algebra import find_eigenvectors

POWER = 0.25  # of a direction's variance, by which it is divided; 0.5 would make noise as large as signal and learns worse
WEAKEST = 1e-7  # of the largest variance: rounding, no signal


def decorrelated(
    features: Float[Tensor, "clients features"],
    groups: Sequence[int] | None,
    directions: int,
    noise: Float[Tensor, "features"] | None = None,
) -> tuple[Float[Tensor, "features"], Float[Tensor, "features directions"]]:
    """What to subtract from features, and what to multiply them with, as measured on some clients.

    Features come without the noise that will be on them, and are first scaled: each alone or in groups, or to noise of spread 1,
    whereupon the strongest directions are those that stand out of it. Results have spread 1 in the mean; surplus ones are zero.
    """
    centre = features.mean(0)
    scaled = scaling(features, groups) if noise is None else 1 / noise
    centred = ((features - centre) * scaled).double()
    clients, size = centred.shape
    few = clients < size
    variances, vectors = find_eigenvectors((centred @ centred.mT if few else centred.mT @ centred) / clients)
    kept = min(directions, len(variances))
    variances, vectors = variances.flip(0)[:kept], vectors.flip(1)[:, :kept]
    sound = variances > WEAKEST * variances[0].clamp_min(1e-300)
    if few:
        vectors = centred.mT @ vectors / (clients * variances.where(sound, torch.inf)).sqrt()
    seen = variances.where(sound, 0) + (0 if noise is None else 1)
    turned = vectors * torch.where(sound, seen.pow(-POWER), 0)
    turned = turned / seen.pow(1 - 2 * POWER).where(sound, 0).mean().clamp_min(1e-300).sqrt()
    whole = features.new_zeros(size, directions)
    whole[:, :kept] = (turned * scaled.double()[:, None]).to(features.dtype)
    return centre, whole


def scaling(
    features: Float[Tensor, "clients features"], groups: Sequence[int] | None, noise: Float[Tensor, "features"] | None = None
) -> Float[Tensor, "features"]:
    """One over the spread of every feature, or of its group, with the noise that will be on it; zero for what never moves."""
    spread = features.std(0) if noise is None else torch.hypot(features.std(0), noise)
    if groups is not None:
        pieces = torch.split(spread, list(groups))
        spread = torch.cat([piece.square().mean().sqrt().expand(len(piece)) for piece in pieces])
    return torch.where(spread > 1e-12, 1 / spread, 0)
