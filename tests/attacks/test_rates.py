"""The trials by which an inverter's learning rate is found."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gradleak.attacks.learning_to_invert.training import TrainingSchedule, find_learning_rate
from gradleak.core.attack import Bench
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.priors.picture_priors import OnePicture

BLACK = OnePicture(torch.zeros(3, 8, 8))  # a prior that these attacks do not ask


class Weight(nn.Module):
    """Learns to be zero."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(1))
        self.steps = 0

    def loss(self, step: int) -> Tensor:
        self.steps += 1
        return self.value.square().sum()

    def judge(self) -> float:
        return float(self.value.square().sum())


def tried(
    model: Weight,
    rates: tuple[float, ...],
    steps: int,
    longest: int,
    checkpoint: Path | None = None,
    seed: int = 0,
) -> float:
    schedules = [TrainingSchedule(steps, rate, 0.0) for rate in rates]
    bench = Bench(Streams.root("attacker", 0), BLACK, checkpoint=checkpoint)
    return find_learning_rate(
        model, model.loss, model.judge, schedules, bench, {"seed": seed}, "it", longest
    )


def test_a_trial_that_learns_is_made_once_and_leaves_the_model_as_it_was() -> None:
    model = Weight()
    assert tried(model, (0.1, 0.001), steps=3, longest=100) == 0.1
    assert model.steps == 2 * 3 and float(model.value) == 1.0


def test_trials_that_learn_hardly_anything_are_made_longer() -> None:
    model = Weight()
    assert tried(model, (0.01, 0.001), steps=2, longest=100) == 0.01
    # Adam moves by its rate a step: after 8 of them the square is down by 15 %
    assert model.steps == 2 * (2 + 4 + 8)


def test_but_no_longer_than_is_allowed() -> None:
    model = Weight()
    assert tried(model, (1e-5, 1e-6), steps=2, longest=5) == 1e-5
    assert model.steps == 2 * (2 + 4 + 5)


def test_a_fit_that_is_cut_makes_none_of_its_trials_twice(tmp_path: Path) -> None:
    rates, checkpoint = (0.1, 0.05, 0.001), tmp_path / "fit.checkpoint"
    model, loss = Weight(), Weight.loss
    calm = tried(Weight(), rates, steps=3, longest=3)

    def cut(step: int) -> Tensor:
        if model.steps == 7:  # in the third trial
            raise KeyboardInterrupt
        return loss(model, step)

    model.loss = cut  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        tried(model, rates, 3, 3, checkpoint)
    again = Weight()
    assert tried(again, rates, 3, 3, checkpoint) == calm and again.steps == 3
    other = Weight()
    # Trials of another fit are none of its
    assert tried(other, rates, 3, 3, checkpoint, seed=1) == calm and other.steps == 9


def test_rates_that_all_diverge_are_refused() -> None:
    model = Weight()
    with pytest.raises(GradleakError, match="it diverged at every learning rate"):
        tried(model, (1e38, 1e39), steps=3, longest=3)
