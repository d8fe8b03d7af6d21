"""The engine leaves a model as it found it, and refuses one that mixes examples."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.matching import Cosine, for_observations
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.tiny import tiny_tokenizer


def hooks(module: nn.Module) -> list[object]:
    return [
        hook
        for part in module.modules()
        for table in (
            part._forward_hooks,
            part._forward_pre_hooks,
            part._backward_hooks,
            part._backward_pre_hooks,
        )
        for hook in table.values()
    ]


@pytest.fixture(params=["Bert", "MPNet"])
def target(request: pytest.FixtureRequest, random_target: Callable[..., Target]) -> Target:
    return random_target(request.param)


@pytest.fixture
def batch(
    target: Target, make_private: Callable[..., Any], add_axes: Callable[[Batch, int], Batch]
) -> Batch:
    private = add_axes(make_private(target).batch, 2)
    return replace(private, ids=None, embeddings=target.embed(private.ids).requires_grad_())


@pytest.mark.parametrize("plain", [False, True])
def test_a_pass_leaves_no_hook_no_grad_and_the_same_parameters(
    target: Target, batch: Batch, observe: Callable[..., Observation], plain: bool
) -> None:
    before = {
        name: (parameter, parameter.clone()) for name, parameter in target.module.named_parameters()
    }
    for_observations([observe(target)], Cosine(), plain=plain).distances(batch).sum().backward()
    assert not hooks(target.module)
    after = dict(target.module.named_parameters())
    assert list(after) == list(before)
    for name, (parameter, value) in before.items():
        assert after[name] is parameter
        assert torch.equal(parameter, value)
        assert parameter.grad is None
        assert not parameter.requires_grad


def test_a_pass_that_fails_leaves_no_hook_either(
    target: Target, batch: Batch, observe: Callable[..., Observation]
) -> None:
    matcher = for_observations([observe(target)], Cosine())
    seen_inside: list[int] = []

    def fail(*_: object) -> None:
        seen_inside.append(len(hooks(target.module)))
        raise RuntimeError("in the middle of it")

    handle = target.module.register_forward_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="in the middle of it"):
            matcher.distances(batch)
    finally:
        handle.remove()
    assert seen_inside[0] > 1  # the engine's hooks were there
    assert not hooks(target.module)


def test_batch_norm_is_refused_in_training_mode_only(
    random_model: Callable[..., Any], observe: Callable[..., Observation]
) -> None:
    model = random_model("Bert")
    model.bert.pooler.activation = nn.BatchNorm1d(32)
    target = TextClassifier("normed", model, tiny_tokenizer())
    observation = observe(target)
    for_observations([observation], Cosine())
    model.bert.pooler.activation.train()
    with pytest.raises(
        GradleakError, match=r"bert\.pooler\.activation is a BatchNorm in training mode.*call eval"
    ):
        for_observations([observation], Cosine())
