"""A model that the user holds: opened as a copy, in the precision it has, or refused by name."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.targets.in_memory import InMemory, hash_weights, open_in_memory, unwrap

CPU = torch.device("cpu")


def test_a_copy_has_the_weights_and_none_of_the_hooks(tiny: Target) -> None:
    model: Any = copy.deepcopy(tiny.module).train().requires_grad_(True)
    model.bert.pooler.requires_grad_(False)
    model.register_forward_hook(lambda *_: 1 / 0)
    opened = open_in_memory(model, tiny.tokenizer, CPU)
    assert hash_weights(opened.module) == hash_weights(model)
    assert not any("pooler" in name for name in opened.parameters)
    mine = {value.data_ptr() for value in model.state_dict().values()}
    assert not mine & {value.data_ptr() for value in opened.module.state_dict().values()}
    assert model.training and not opened.module.training


def test_half_precision_is_copied_in_single_and_double_stays(tiny: Target) -> None:
    for dtype, found in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        model = copy.deepcopy(tiny.module).to(dtype)
        opened = open_in_memory(model.requires_grad_(True), tiny.tokenizer, CPU)
        assert opened.dtype == found
        assert hash_weights(opened.module) == hash_weights(model)


def test_a_change_of_one_weight_changes_the_hash(tiny: Target) -> None:
    model: Any = copy.deepcopy(tiny.module)
    with torch.no_grad():
        model.classifier.bias[0] += 1e-6
    assert hash_weights(model) != hash_weights(tiny.module)


def test_only_wrappers_are_taken_off(tiny: Target) -> None:
    assert unwrap(nn.DataParallel(nn.DataParallel(tiny.module))) is tiny.module
    assert unwrap(tiny.module) is tiny.module
    two = nn.Module()
    two.module, two.other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert unwrap(two) is two


def test_strange_models_are_refused_by_what_they_are(tiny: Target, random_model: Any) -> None:
    def refused(message: str, model: Any) -> None:
        with pytest.raises(GradleakError, match=message):
            open_in_memory(model, tiny.tokenizer, CPU)

    refused("a Linear without a config", nn.Linear(2, 2))
    refused("a dict without a config", {})
    refused("and this is a BertModel", tiny.module.bert)
    grown: Any = copy.deepcopy(tiny.module)
    grown.extra = nn.Linear(2, 2)
    refused("the copy lacks extra", grown)
    with pytest.raises(GradleakError, match="save_pretrained"):
        InMemory("BertForSequenceClassification", "a" * 64).open(CPU)
