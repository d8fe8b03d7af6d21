"""Which slot of an inverter learns which text of a batch: an update says nothing of their order."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.learning_to_invert.inverter import TextInverter


@torch.no_grad()
def matched(
    model: TextInverter,
    states: Float[Tensor, "clients slots tokens width"],
    label_scores: Float[Tensor, "clients slots classes"] | None,
    ids: Int[Tensor, "clients slots tokens"],
    labels: Int[Tensor, "clients slots"] | None,
) -> Int[Tensor, "clients slots"]:
    """For each slot the text that it is nearest to, each text once: the assignment of least total cross-entropy (Hungarian)."""
    from scipy.optimize import linear_sum_assignment

    costs = np.stack([_costs(model, one, rows).cpu().numpy() for one, rows in zip(states, ids, strict=True)])
    if label_scores is not None and labels is not None:
        pairs = -label_scores.log_softmax(-1).gather(2, labels[:, None, :].expand(-1, label_scores.shape[1], -1))
        costs = costs + pairs.cpu().numpy()
    chosen = np.stack([linear_sum_assignment(cost)[1] for cost in costs])
    return torch.from_numpy(chosen).to(ids.device)


def _costs(model: TextInverter, states: Tensor, ids: Tensor) -> Float[Tensor, "slots slots"]:
    """The cross-entropy of every text of one client in every slot."""
    surprise = -model.words.logits(states).log_softmax(-1)  # [slots, tokens, words]
    return torch.stack([surprise.gather(2, row.expand(len(ids), -1)[..., None])[..., 0].sum(1) for row in ids], dim=1)
