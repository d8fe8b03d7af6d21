"""A convolution is a linear layer over patches, with places of the picture for tokens: so it has the same closed forms."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def patches(
    module: nn.Module, pictures: Float[Tensor, "examples channels height width"]
) -> Float[Tensor, "examples places inputs"]:
    """What the kernel sees at every place it is put."""
    assert isinstance(module, nn.Conv2d)
    padding = 0 if isinstance(module.padding, str) else module.padding  # "valid" is none
    unfolded = F.unfold(pictures, module.kernel_size, module.dilation, padding, module.stride)
    return unfolded.mT


def channel_terms(
    module: nn.Module, parameter: str, inputs: Tensor, delta: Float[Tensor, "examples channels *places"]
) -> Float[Tensor, "examples *places channels"]:
    """What is summed over places for the gradient of a bias (δ) or of a norm's weight (δ∘x̂), channels last."""
    if parameter.endswith("weight"):
        delta = delta * _normalised(module, inputs)
    return delta.movedim(1, -1)


def _normalised(module: nn.Module, inputs: Tensor) -> Tensor:
    """A norm's inputs as its weight finds them."""
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(inputs, module.num_groups, eps=module.eps)
    assert isinstance(module, nn.BatchNorm2d)
    return F.batch_norm(inputs, module.running_mean, module.running_var, eps=module.eps)
