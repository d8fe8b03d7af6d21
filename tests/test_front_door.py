"""The front door: capture, reconstruct, score, as users do, and a model that stays as it was."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import gradleak
from gradleak.attacks.span import Span
from gradleak.core.target import Target
from gradleak.records.store import read_record

TEXTS = ["the cat is red .", "call me on monday !"]
LABELS = [0, 1]
FACTS = ("batch_size", "lengths", "labels")


@pytest.fixture
def model(tiny: Target) -> Any:
    """The tiny model as a user holds one: parameters that train, some of it frozen."""
    made = copy.deepcopy(tiny.module).requires_grad_(True)
    made.bert.pooler.requires_grad_(False)
    return made


def differentiate(model: Any, tokenizer: Any, texts: list[str] = TEXTS) -> None:
    read = tokenizer(texts, padding=True, return_tensors="pt")
    model(**read, labels=torch.tensor(LABELS)[: len(texts)]).loss.backward()


def test_an_update_of_ones_own_is_captured_rebuilt_scored_and_kept(
    tiny: Target, model: Any, tmp_path: Path
) -> None:
    update = tmp_path / "update.safetensors"
    model.requires_grad_(True)
    with gradleak.capture(model, update, tokenizer=tiny.tokenizer, know=FACTS[:1]):
        differentiate(model, tiny.tokenizer)
    found = gradleak.reconstruct(update, model=model, tokenizer=tiny.tokenizer)
    assert sorted(guess.text for guess in found) == sorted(tiny_texts(tiny, TEXTS))
    for guess in found:
        assert guess.certified and guess.explains == pytest.approx(1, abs=1e-4)
    record = gradleak.score(found, TEXTS, labels=LABELS, out=tmp_path / "run")
    assert record.worst_case["exact_match"].mean == 1
    (kept,) = (tmp_path / "run").glob("*.json")
    assert read_record(kept).worst_case == record.worst_case


def tiny_texts(tiny: Target, texts: list[str]) -> list[str]:
    """Texts as the tokenizer writes them again."""
    return [tiny.decode(tiny.tokenizer(text)["input_ids"]) for text in texts]


def test_the_same_sentences_give_the_same_guesses_as_measure(tiny: Target, model: Any) -> None:
    model.requires_grad_(True)
    audited = gradleak.measure("tiny", attacks=["span"], limit=3)
    observations = []
    for private in audited.private:
        (example,) = private.examples
        model.zero_grad()
        read = tiny.tokenizer([example.text], return_tensors="pt")
        model(**read, labels=torch.tensor([tiny.class_of(example.label)])).loss.backward()
        gradients = {name: value.grad for name, value in model.named_parameters()}
        observations.append(gradleak.observe(model, tiny.tokenizer, gradients))
    found = gradleak.reconstruct(observations, attacks="span")
    guesses = [one.guess for one in audited.record.attacks["span"].examples]
    assert [guess.text for guess in found] == guesses


def test_texts_are_withheld_unless_asked_for(tiny: Target, model: Any) -> None:
    differentiate(model, tiny.tokenizer)
    gradients = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    found = gradleak.reconstruct(gradleak.observe(model, tiny.tokenizer, gradients), attacks="span")
    for shown in (repr(found), found._repr_html_(), repr(found[0])):
        assert "monday" not in shown and "cat" not in shown
    assert "monday" in found.show() and "cat" in found.show()


def test_every_public_name_works_after_its_namesake_was_imported() -> None:
    """`gradleak.audit` is a package: to import it first takes no name away."""
    program = """
import gradleak.audit, gradleak.captures, gradleak.integrations.pytorch
import inspect, gradleak
for name in gradleak.__all__:
    found = getattr(gradleak, name)
    assert name == "__version__" or callable(found), name
    if inspect.isfunction(found):
        parts = inspect.signature(found)
        assert parts.return_annotation is not inspect.Signature.empty, name
        assert all(one.annotation is not one.empty for one in parts.parameters.values()), name
assert set(gradleak.__all__) <= set(dir(gradleak))

# Without the checks of these tests, which draw numbers of Python's own generator; so does rich, for
# itself, where it is first imported
import random, rich.style, torch
from gradleak.targets.tiny import Tiny
tiny = Tiny().open(torch.device("cpu"))
model = tiny.module.requires_grad_(True)
read = tiny.tokenizer(["the cat is red ."], return_tensors="pt")
model(**read, labels=torch.tensor([0])).loss.backward()
before = random.getstate()
gradients = {name: one.grad for name, one in model.named_parameters()}
found = gradleak.reconstruct(gradleak.observe(model, tiny.tokenizer, gradients), attacks="span")
gradleak.score(found, ["the cat is red ."], labels=[0])
assert random.getstate() == before
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(Path(gradleak.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


HOOKS = (
    "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _state_dict_hooks"
    " _state_dict_pre_hooks _load_state_dict_pre_hooks _load_state_dict_post_hooks"
    " _forward_hooks_with_kwargs _forward_pre_hooks_with_kwargs"
).split()


def describe(model: Any) -> dict[str, Any]:
    """Everything of a model, and of the process, that a user would miss."""
    modules = list(model.named_modules())
    parameters = list(model.named_parameters())
    return {
        "modes": {name: module.training for name, module in modules},
        "hooks": {
            (name, kind): [(key, id(hook)) for key, hook in getattr(module, kind).items()]
            for name, module in modules
            for kind in HOOKS
        },
        "parameters": {name: (id(one), one.data_ptr()) for name, one in parameters},
        "requires_grad": {name: one.requires_grad for name, one in parameters},
        "parameter hooks": {
            name: (
                dict(one._backward_hooks or {}),
                dict(getattr(one, "_post_accumulate_grad_hooks", None) or {}),
            )
            for name, one in parameters
        },
        "gradients": {
            name: None if one.grad is None else (id(one.grad), bits(one.grad))
            for name, one in parameters
        },
        "weights": {name: bits(value) for name, value in model.state_dict().items()},
        "config": model.config.to_json_string(use_diff=False),
        "attention": model.config._attn_implementation,
        "torch": bits(torch.get_rng_state()),
        "cuda": [bits(one) for one in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
        "numpy": [str(part) for part in numpy.random.get_state()],
        "gradients on": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def test_a_description_would_notice(model: Any) -> None:
    before = describe(model)
    assert describe(model) == before
    changes: list[Callable[[], Any]] = [
        lambda: model.bert.encoder.train(not model.bert.encoder.training),
        lambda: model.classifier.bias.requires_grad_(False),
        lambda: model.register_forward_hook(lambda *_: None),
        lambda: model.classifier.weight.register_hook(lambda slope: slope),
        lambda: torch.rand(1),
        lambda: numpy.random.rand(),
    ]
    for change in changes:
        before = describe(model)
        change()
        assert describe(model) != before


@pytest.mark.parametrize("training", [False, True])
def test_nothing_changes_the_users_model(
    training: bool, tiny: Target, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.train(training)
    model.bert.embeddings.train(not training)  # modes differ from module to module
    model.config._attn_implementation = "sdpa"
    model.register_forward_hook(lambda *_: None)
    model.classifier.weight.register_hook(lambda slope: slope)
    tokenizer, update = tiny.tokenizer, tmp_path / "update.safetensors"
    differentiate(model, tokenizer)

    before = describe(model)
    with gradleak.capture(model, update, know=FACTS[:1], tokenizer=tokenizer):
        inside = describe(model)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(**tokenizer(TEXTS[:1], return_tensors="pt"))
            torch.manual_seed(0)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            model(**tokenizer(TEXTS, padding=True, return_tensors="pt"))
    assert describe(model) == before
    assert inside["weights"] == before["weights"] and inside["torch"] == before["torch"]

    with pytest.raises(ZeroDivisionError), gradleak.capture(model, update, know=FACTS):
        _ = 1 / 0
    assert describe(model) == before

    gradients = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    seen = gradleak.observe(model, tokenizer, gradients, batch_size=2)
    found = gradleak.reconstruct(seen, attacks="span", time_limit=2)
    gradleak.score(found, TEXTS, labels=LABELS)
    assert describe(model) == before

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(Span, "reconstruct", fail)
    with pytest.raises(ZeroDivisionError):
        gradleak.reconstruct(update, model=model, tokenizer=tokenizer, attacks="span")
    assert describe(model) == before
