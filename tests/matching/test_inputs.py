"""What linear layers are fed, against a plain forward pass and against the gradient it explains."""

from collections.abc import Callable

import pytest
import torch

from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.matching.inputs import ModuleInputs, first_inputs, linear_parts, matrix_of, module_of
from gradleak.matching.kinds import capture_calls

TEXTS = ("the cat is red .", "my dog was bad !")


def batch_of(target: Target) -> Batch:
    ids = torch.tensor(target.encode(TEXTS))
    return Batch(ids=ids, mask=torch.ones_like(ids).bool(), labels=torch.tensor([0, 1]))


@pytest.mark.parametrize("architecture", ["Bert", "Roberta", "GPT2", "Llama"])
def test_inputs_are_those_of_a_whole_pass_and_no_hook_stays(
    random_target: Callable[..., Target], architecture: str
) -> None:
    target = random_target(architecture, torch.float64)
    parts = linear_parts(target, list(target.parameters))
    made = ModuleInputs(target, parts)(batch_of(target))
    modules = {module_of(part): target.module.get_submodule(module_of(part)) for part in parts}
    with capture_calls(modules, examples=2) as calls:
        target.losses(batch_of(target))
    assert set(made) == set(modules)
    for name, inputs in made.items():
        torch.testing.assert_close(inputs, calls[name][0].inputs)
    assert not any(
        module._forward_pre_hooks or module._forward_hooks for module in target.module.modules()
    )


@pytest.mark.parametrize("architecture", ["Bert", "Roberta", "GPT2", "Llama"])
def test_a_gradient_has_its_rows_in_the_span_of_the_inputs(
    random_target: Callable[..., Target], observe: Callable[..., Observation], architecture: str
) -> None:
    target = random_target(architecture, torch.float64)
    update = observe(target, TEXTS).update
    for part in linear_parts(target, list(update.tensors)):
        inputs = next(iter(ModuleInputs(target, [part])(batch_of(target)).values())).flatten(0, 1)
        rows = matrix_of(target, part, update.tensors[part.name])[0]
        inside = rows @ torch.linalg.pinv(inputs) @ inputs
        torch.testing.assert_close(inside, rows, rtol=1e-6, atol=1e-9 * float(rows.abs().max()))


@pytest.mark.parametrize("architecture", ["Bert", "Roberta", "GPT2", "Llama"])
def test_the_first_layer_is_fed_each_word_by_itself(
    random_target: Callable[..., Target], architecture: str
) -> None:
    target = random_target(architecture, torch.float64)
    part = next(part for part in linear_parts(target, list(target.parameters)) if part.layer == 1)
    inputs = ModuleInputs(target, [part])
    ids = torch.tensor(target.encode(TEXTS[:1])[0])
    alone = first_inputs(inputs, ids, len(ids))
    (together,) = inputs(
        Batch(ids=ids[None], mask=torch.ones(1, len(ids)).bool(), labels=torch.tensor([0]))
    ).values()
    torch.testing.assert_close(alone[torch.arange(len(ids)), torch.arange(len(ids))], together[0])


def test_what_is_no_linear_layer_is_refused_by_name(tiny: Target) -> None:
    norm = next(part for part in tiny.parts if part.module == "layernorm")
    with pytest.raises(GradleakError, match="is not a linear layer"):
        ModuleInputs(tiny, [norm])
