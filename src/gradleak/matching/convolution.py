"""A convolution is a linear layer over patches, with places of the picture for tokens: so it has
the same closed forms."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def patches(
    module: nn.Module, pictures: Float[Tensor, "examples channels height width"]
) -> Float[Tensor, "examples places inputs"]:
    """What the kernel sees at every place it is put.

    A copy of a view, where torch's own unfold on a GPU takes the examples one by one.
    """
    assert isinstance(module, nn.Conv2d)
    (rows, columns), (down, right), (high, wide) = (
        module.kernel_size,
        module.dilation,
        module.stride,
    )
    if not isinstance(module.padding, str):  # "valid" is none
        above, left = module.padding
        pictures = F.pad(pictures, (left, left, above, above))
    windows = pictures.unfold(2, down * (rows - 1) + 1, high).unfold(
        3, right * (columns - 1) + 1, wide
    )
    # [examples, channels, places down, places right, rows, columns]
    windows = windows[..., ::down, ::right]
    return windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def channel_terms(
    module: nn.Module,
    parameter: str,
    inputs: Tensor,
    delta: Float[Tensor, "examples channels *places"],
) -> Float[Tensor, "examples *places channels"]:
    """What is summed over places for the gradient of a bias (δ) or of a norm's weight (δ∘x̂),
    channels last."""
    if parameter.endswith("weight"):
        delta = delta * _normalised(module, inputs)
    return delta.movedim(1, -1)


def _normalised(module: nn.Module, inputs: Tensor) -> Tensor:
    """A norm's inputs as its weight finds them."""
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(inputs, module.num_groups, eps=module.eps)
    assert isinstance(module, nn.BatchNorm2d)
    return F.batch_norm(inputs, module.running_mean, module.running_var, eps=module.eps)
