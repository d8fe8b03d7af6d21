"""How an inverter of pictures is taught."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.learning_to_invert.picture_inverter import PictureInverter

LABEL_WEIGHT = 0.01  # of the labels' cross-entropy; for the loss to be read by, since pictures and labels share no weights


@dataclass(frozen=True, eq=False)
class PictureLesson:
    """Features of some clients, of every inverter its own, and what they held."""

    features: Float[Tensor, "inverters clients features"]
    pixels: Float[Tensor, "inverters clients slots channels height width"]
    labels: Int[Tensor, "inverters clients slots"]


@dataclass(frozen=True, eq=False)
class Errors:
    """What is left to learn, of every inverter."""

    squared: Float[Tensor, "inverters"]
    labels: Float[Tensor, "inverters"]  # cross-entropy
    variation: Float[Tensor, "inverters"]  # of the guess
    labels_right: Float[Tensor, "inverters"]  # a share

    def loss(self, variation_weight: float) -> Float[Tensor, ""]:
        """Equation 2 of the paper, of all inverters together, with the total variation its section 5 proposes."""
        return (self.squared + LABEL_WEIGHT * self.labels + variation_weight * self.variation).sum()


def errors_of(model: PictureInverter, lesson: PictureLesson, dtype: torch.dtype) -> Errors:
    """Each picture of a batch is held against the slot it is nearest to."""
    with torch.autocast(lesson.features.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
        guessed, scores = model(lesson.features)
    guessed, scores, pixels, labels = guessed.float(), scores.float(), lesson.pixels.float(), lesson.labels
    if model.slots > 1:
        order = nearest_slots(guessed, pixels)
        pixels = pixels.gather(2, order[..., None, None, None].expand_as(pixels))
        labels = labels.gather(2, order)
    surprise = F.cross_entropy(scores.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
    right = (scores.argmax(-1) == labels).float()
    variation = sum(guessed.diff(dim=axis).abs().flatten(1).mean(1) for axis in (-1, -2))
    assert isinstance(variation, Tensor)
    squared = (guessed - pixels).square().flatten(1).mean(1)
    return Errors(squared, surprise.flatten(1).mean(1), variation, right.flatten(1).mean(1))


@torch.no_grad()
def nearest_slots(guessed: Tensor, pixels: Tensor) -> Int[Tensor, "inverters clients slots"]:
    """For each slot the picture it is nearest to, each picture once (Hungarian)."""
    from scipy.optimize import linear_sum_assignment

    slots = guessed.shape[2]
    costs = torch.cdist(guessed.flatten(3), pixels.flatten(3)).square().flatten(0, 1).cpu().numpy()
    chosen = np.stack([linear_sum_assignment(cost)[1] for cost in costs])
    return torch.from_numpy(chosen).to(pixels.device).view(*pixels.shape[:2], slots)
