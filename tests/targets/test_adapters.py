"""Models with adapters of peft: copied whole, matched by name, prompts refused by theirs."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradleak
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.targets import resolve_target
from gradleak.targets.adapters import Lora
from gradleak.targets.in_memory import hash_weights, open_in_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"])
def test_prompts_are_refused_by_name(tiny: Target, kind: str) -> None:
    model: Any = copy.deepcopy(tiny.module)
    model.peft_config = {"default": SimpleNamespace(peft_type=kind)}
    with pytest.raises(GradleakError, match=f"{kind} of peft"):
        open_in_memory(model, tiny.tokenizer, CPU)


def test_several_adapters_and_other_kinds_are_refused(tiny: Target) -> None:
    model: Any = copy.deepcopy(tiny.module)
    model.peft_config = {"default": SimpleNamespace(peft_type="IA3")}
    with pytest.raises(GradleakError, match="IA3, and gradleak audits LoRA"):
        open_in_memory(model, tiny.tokenizer, CPU)
    lora = SimpleNamespace(peft_type="LORA")
    model.peft_config = {"one": lora, "two": lora}
    with pytest.raises(GradleakError, match=r"2 adapters \(one, two\)"):
        open_in_memory(model, tiny.tokenizer, CPU)


@pytest.fixture
def wrapped(tiny: Target) -> Any:
    peft = pytest.importorskip("peft", reason="adapters need peft, the extra lora")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4)
    return peft.get_peft_model(copy.deepcopy(tiny.module), config)


def test_a_copy_has_the_adapters_and_computes_the_same(tiny: Target, wrapped: Any) -> None:
    opened = open_in_memory(wrapped, tiny.tokenizer, CPU)
    assert hash_weights(opened.module) == hash_weights(wrapped)
    ids = torch.tensor([[2, 10, 11, 12, 3]])
    torch.testing.assert_close(opened.module(ids).logits, wrapped.eval()(ids).logits)
    modules = {part.module for part in opened.parts}
    assert modules == {"adapter_in", "adapter_out", "head"}
    assert {part.module for part in opened.frozen_parts} >= {"query", "key", "value"}


def test_what_a_wrapped_model_sends_is_matched_by_its_names(tiny: Target, wrapped: Any) -> None:
    wrapped.eval()
    ids = torch.tensor([[2, 10, 11, 12, 3]])
    wrapped(input_ids=ids, labels=torch.tensor([1])).loss.backward()
    sent = {name: one.grad for name, one in wrapped.named_parameters() if one.grad is not None}
    seen = gradleak.observe(wrapped, tiny.tokenizer, sent, lengths=[5])
    assert len(seen.update.tensors) == len(sent)
    saved = {name.replace(".default", ""): one for name, one in sent.items()}  # as peft saves them
    again = gradleak.observe(wrapped, tiny.tokenizer, saved, lengths=[5])
    for name, tensor in seen.update.tensors.items():
        assert torch.equal(tensor, again.update.tensors[name])


def test_a_folder_of_adapters_is_a_target(
    tiny: Target, wrapped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.module.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    tiny.tokenizer.save_pretrained(tmp_path / "base")  # type: ignore[attr-defined]
    wrapped.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    wrapped.save_pretrained(tmp_path / "adapters")
    spec = resolve_target(str(tmp_path / "adapters"))
    assert isinstance(spec, Lora)
    assert hash_weights(spec.open(CPU).module) == hash_weights(wrapped)
