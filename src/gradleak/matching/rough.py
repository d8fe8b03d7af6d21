"""Products of fewer digits, where noise hides more than these."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from gradleak.core.observation import Observation


@contextmanager
def rough_products(observations: Sequence[Observation]) -> Iterator[None]:
    """Within it float32 products on a GPU keep 10 bits, if all that was seen is known to be noisy; that is many times faster."""
    before = torch.get_float32_matmul_precision()
    if all(observation.channel.noisy for observation in observations):
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
