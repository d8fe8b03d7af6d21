"""The optimisers against PyTorch's own."""

import itertools

import pytest
import torch

from gradleak.attacks.search.descent import Constant, Linear, RowAdam, StepDecay, WarmUp
from gradleak.core.streams import Streams


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_steps_are_those_of_adamw(weight_decay: float) -> None:
    start = torch.randn(3, 4, generator=Streams.root("descent", 0).generator(), dtype=torch.float64)
    ours, theirs = start.clone(), start.clone().requires_grad_()
    state = RowAdam(0.01, Linear(100), epsilon=1e-6, weight_decay=weight_decay).begin(ours)
    reference = torch.optim.AdamW([theirs], lr=0.01, eps=1e-6, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(reference, lambda step: 1 - step / 100)
    for _ in range(20):
        state.step(ours, ours.cos())
        theirs.grad = theirs.detach().cos()
        reference.step()
        schedule.step()
    assert torch.allclose(ours, theirs.detach(), rtol=1e-12)


def test_schedules_fall_as_their_names_say() -> None:
    assert Constant().factor(10_000) == 1
    assert StepDecay(0.5, 50).factor(49) == 1 and StepDecay(0.5, 50).factor(150) == 0.125
    assert (
        Linear(100).factor(0) == 1
        and Linear(100).factor(75) == 0.25
        and Linear(100).factor(200) == 0
    )
    rising = [WarmUp(100).factor(step) for step in range(101)]
    assert rising[0] == 0.2 and rising[4] == 1 == max(rising) and rising[100] == 0
    assert all(after < before for before, after in itertools.pairwise(rising[5:]))
    assert WarmUp(1).factor(0) == 1  # a single step is taken whole
