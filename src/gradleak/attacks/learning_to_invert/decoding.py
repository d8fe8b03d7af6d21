"""Words from an inverter's scores, alone or joined with what a prior thinks of the sentence."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.prior import Prior


@torch.no_grad()
def with_prior(
    scores: Float[Tensor, "tokens words"], prior: Prior, weight: float, beams: int, candidates: int
) -> Int[Tensor, "tokens"]:
    """The sentence of the highest log-likelihood under the inverter plus `weight` times that under the prior.

    A beam goes from left to right; each place offers the inverter's likeliest words.
    """
    likely, words = scores.log_softmax(-1).topk(min(candidates, scores.shape[-1]), dim=-1)
    found, seen = words[0][:beams, None], likely[0][:beams]  # what the inverter says; the prior says nothing of one word
    for place in range(1, len(scores)):
        longer = torch.cat([found.repeat_interleave(words.shape[1], 0), words[place].repeat(len(found))[:, None]], dim=1)
        read = seen.repeat_interleave(words.shape[1]) + likely[place].repeat(len(found))
        lengths = torch.full((len(longer),), place + 1, device=longer.device)
        joined = read - weight * prior.nll(longer, lengths) * place  # a mean over the words after the first
        best = joined.topk(min(beams, len(joined))).indices
        found, seen = longer[best], read[best]
    return found[0]
