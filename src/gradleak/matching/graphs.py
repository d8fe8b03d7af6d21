"""CUDA graphs: a pass of thousands of small kernels, recorded once and launched as one."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

WARM_UP = 3  # runs before recording, as PyTorch asks: libraries set themselves up on first use

Function = Callable[[Tensor], tuple[Tensor, Tensor]]


class ScalarsInPlace(TorchFunctionMode):
    """Makes `torch.tensor(0.0, device="cuda")` a fill on the card, not a copy from the host, which
    a graph cannot record.

    transformers builds attention masks that way.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and isinstance(args[0], (bool, int, float)):
            return torch.full((), args[0], dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        return func(*args, **kwargs)


class Recorded:
    """A function of one tensor of fixed shape, replayed from a CUDA graph."""

    def __init__(self, function: Function, example: Tensor) -> None:
        self.input = example.detach().clone()
        side = torch.cuda.Stream(example.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(example.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                function(self.input)
        torch.cuda.current_stream(example.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with ScalarsInPlace(), torch.cuda.graph(self.graph):
            self.outputs = function(self.input)

    def __call__(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The function's results, to be used before the next call: they lie in the graph's own
        memory."""
        self.input.copy_(value)
        self.graph.replay()
        return self.outputs


def record(function: Function, example: Tensor) -> Function:
    """The function as a CUDA graph, or as it is (with the reason, once) where it cannot be
    recorded."""
    try:
        return Recorded(function, example)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.synchronize(example.device)
        warnings.warn(
            f"Running without a CUDA graph, which is slower: {str(error).splitlines()[0]}",
            stacklevel=2,
        )
        return function
