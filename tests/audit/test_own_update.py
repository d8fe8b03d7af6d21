"""An update of one's own: what is made of it, what its guesses explain, and what is refused."""

import copy
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradleak
from gradleak.audit.own_guesses import explain
from gradleak.audit.own_update import observe_capture
from gradleak.captures import Capture, CaptureHeader, Granted, ModelFacts, ProtocolFacts
from gradleak.core.attack import Reconstruction
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.targets.in_memory import hash_weights

TEXTS = ["the cat is red .", "call me on monday !"]
LABELS = [0, 1]


@pytest.fixture(scope="module")
def model(tiny: Target) -> Any:
    return copy.deepcopy(tiny.module).requires_grad_(True)


@pytest.fixture(scope="module")
def gradients(tiny: Target, model: Any) -> dict[str, torch.Tensor]:
    read = tiny.tokenizer(TEXTS, padding=True, return_tensors="pt")
    loss = model(**read, labels=torch.tensor(LABELS)).loss
    found = torch.autograd.grad(loss, list(model.parameters()))
    return dict(zip((name for name, _ in model.named_parameters()), found, strict=True))


@pytest.fixture
def seen(tiny: Target, model: Any, gradients: dict[str, torch.Tensor]) -> Observation:
    return gradleak.observe(model, tiny.tokenizer, gradients, lengths=[7, 7], labels=LABELS)


def ids_of(tiny: Target, texts: list[str] = TEXTS) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tiny.tokenizer(text)["input_ids"]) for text in texts)


def tensors_of(observation: Observation) -> dict[str, torch.Tensor]:
    return dict(observation.update.tensors)


def test_the_clients_own_code_makes_the_same_update(tiny: Target, seen: Observation) -> None:
    made = seen.simulate(seen.target.batch_of(ids_of(tiny), tuple(LABELS))[None], [])
    for name, tensor in tensors_of(seen).items():
        torch.testing.assert_close(made.tensors[name].detach(), tensor, atol=1e-6, rtol=1e-4)


def test_lists_wrapped_names_and_multiples_are_the_same_observation(
    tiny: Target, model: Any, gradients: dict[str, torch.Tensor], seen: Observation
) -> None:
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in gradients.items()}
    doubled = {name: 2 * tensor for name, tensor in gradients.items()}
    for given, scale in ((list(gradients.values()), 1.0), (wrapped, 1.0), (doubled, 2.0)):
        again = gradleak.observe(model, tiny.tokenizer, given, scale=scale)
        for name, tensor in tensors_of(seen).items():
            assert torch.equal(again.update.tensors[name], tensor)


def test_what_was_not_sent_is_not_seen_and_what_was_not_said_is_not_known(
    tiny: Target, model: Any, gradients: dict[str, torch.Tensor]
) -> None:
    some = {name: one for name, one in gradients.items() if "classifier" in name}
    observation = gradleak.observe(model, tiny.tokenizer, some)
    assert set(tensors_of(observation)) == set(some)
    knows = observation.knows
    assert (knows.batch_size, knows.lengths, knows.labels) == (None, None, None)
    told = gradleak.observe(model, tiny.tokenizer, some, batch_size=2, defense="sign").knows
    assert told.batch_size == 2 and [one.name for one in told.defenses or ()] == ["sign"]


def test_numbers_of_16_bits_are_known_to_be_rounded(
    tiny: Target, model: Any, gradients: dict[str, torch.Tensor]
) -> None:
    half = {name: one.bfloat16() for name, one in gradients.items()}
    channel = gradleak.observe(model, tiny.tokenizer, half).channel
    assert channel.rounding == pytest.approx(torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("factor", [1.0, 0.01])
def test_the_truth_explains_all_whatever_clipping_nobody_told_of(
    factor: float, tiny: Target, model: Any, gradients: dict[str, torch.Tensor]
) -> None:
    small = {name: factor * one for name, one in gradients.items()}
    observation = gradleak.observe(model, tiny.tokenizer, small, labels=LABELS)
    right = explain(observation, Reconstruction(sentences=ids_of(tiny)))
    assert right.share == pytest.approx(1, abs=1e-5)
    assert min(right.by_tensor["classifier.weight"], right.share or 0) > 0.999
    wrong = explain(observation, Reconstruction(sentences=ids_of(tiny, TEXTS[:1] * 2)))
    assert (wrong.share or 0) < 0.97
    assert explain(observation, Reconstruction(sentences=())).share is None


def test_each_guess_says_what_it_adds_to_the_others_of_its_batch(
    tiny: Target, seen: Observation
) -> None:
    right = explain(seen, Reconstruction(sentences=ids_of(tiny)))
    assert len(right.adds) == 2 and min(right.adds) > 0.005
    # The right one adds something, the wrong one next to nothing, with the first left as it was
    mixed = (TEXTS[0], "the dog was bad .")
    wrong = explain(seen, Reconstruction(sentences=ids_of(tiny, list(mixed))))
    assert wrong.adds[1] < 0.5 * right.adds[1]
    (only,) = explain(seen, Reconstruction(sentences=ids_of(tiny)[:1], labels=(0,))).adds
    assert only == pytest.approx(explain_share(seen, tiny), abs=1e-6)
    twice = explain(seen, Reconstruction(sentences=ids_of(tiny, TEXTS[:1] * 2), labels=(0, 0)))
    assert twice.adds == pytest.approx((0, 0), abs=1e-9)


def explain_share(seen: Observation, tiny: Target) -> float:
    """What one of two texts explains by itself."""
    share = explain(seen, Reconstruction(sentences=ids_of(tiny)[:1], labels=(0,))).share
    assert share is not None
    return share


def test_a_difference_is_an_update_of_fedavg(
    tiny: Target, model: Any, gradients: dict[str, torch.Tensor], seen: Observation
) -> None:
    capture = hold(model, {name: -0.5 * one for name, one in gradients.items()}, "difference")
    observation = observe_capture(capture, model, tiny.tokenizer)
    assert observation.protocol.name == "fedavg"
    assert observation.gradient_scale == 0.5
    torch.testing.assert_close(
        observation.update.tensors["classifier.weight"] / observation.gradient_scale,
        seen.update.tensors["classifier.weight"],
    )


def hold(model: Any, tensors: Any, kind: str = "gradients", rate: float | None = 0.5) -> Capture:
    names = tuple(name for name, _ in model.named_parameters())
    facts = ModelFacts(type(model).__name__, {}, hash_weights(model), names)
    protocol = ProtocolFacts("fedsgd" if kind == "gradients" else "fedavg", rate, 1)
    return Capture(CaptureHeader(kind, facts, protocol, Granted(2)), tensors)


def test_several_updates_are_attacked_together_and_scored_in_their_order(
    tiny: Target, model: Any
) -> None:
    observations = []
    for text, label in zip(TEXTS, LABELS, strict=True):
        loss = model(**tiny.tokenizer([text], return_tensors="pt"), labels=torch.tensor([label]))
        found = torch.autograd.grad(loss.loss, list(model.parameters()))
        observations.append(gradleak.observe(model, tiny.tokenizer, found))
    found = gradleak.reconstruct(observations, attacks="span")
    assert [guess.update for guess in found] == [0, 1]
    record = gradleak.score(found, [[text] for text in TEXTS], labels=[[0], [1]])
    assert record.worst_case["exact_match"].mean == 1

    def refused(message: str, truth: Any, labels: Any) -> None:
        with pytest.raises(GradleakError, match=message):
            gradleak.score(found, truth, labels=labels)

    refused("The truth is of 1 updates, and 2 were attacked", TEXTS, [[0], [1]])
    refused("pass labels= to score", [[text] for text in TEXTS], None)
    refused("There are 1 texts and 2 labels", [[text] for text in TEXTS], [[0, 1], [1]])
    with pytest.raises(GradleakError, match="Update 0 is of 2 texts, and the truth has 1"):
        told = [replace(one, knows=replace(one.knows, batch_size=2)) for one in observations]
        gradleak.score(replace(found, observations=tuple(told)), [[one] for one in TEXTS])


def test_bad_updates_and_facts_are_refused_by_what_is_wrong(
    tiny: Target, model: Any, gradients: dict[str, torch.Tensor]
) -> None:
    def refused(message: str, given: Any = gradients, of: Any = model, **told: Any) -> None:
        with pytest.raises(GradleakError, match=message):
            gradleak.observe(of, tiny.tokenizer, given, **told)

    refused("There is no tensor in this update", {})
    refused("different batches: lengths of 1, labels of 2", lengths=[7], labels=[0, 1])
    refused("different batches: lengths of 2, batch_size of 3", lengths=[7, 7], batch_size=3)
    refused("at least one text", batch_size=0)
    refused("scale must be a number above 0, not 0", scale=0)
    refused("has the shape", {name: tensor[:1] for name, tensor in gradients.items()})
    refused("no tensor of the model", {"other.weight": torch.ones(2)})
    refused("tensors without names", list(gradients.values())[:3])
    refused("dp_sgd .*must be the first", defense=["sign", "dp_sgd"])
    refused("without a config", of=torch.nn.Linear(2, 2))


def test_bad_attacks_and_files_are_refused_by_what_is_wrong(
    tiny: Target, model: Any, gradients: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    bare = gradleak.observe(model, tiny.tokenizer, gradients)

    def refused(message: str, given: Any, **told: Any) -> None:
        with pytest.raises(GradleakError, match=message):
            gradleak.reconstruct(given, **told)

    refused("There is no update to attack", [])
    refused("pass model= and tokenizer=", hold(model, gradients))
    refused("energy requires batch_size, which was not granted", bare, attacks="energy")
    refused("learns first, from public data", bare, attacks="lti_p")
    refused("did you mean", bare, attacks="spam")
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.classifier.bias += 1
    other = gradleak.observe(changed, tiny.tokenizer, gradients)
    refused("computed at different weights", [bare, other])
    given = {"model": changed, "tokenizer": tiny.tokenizer}
    refused("at other weights than the model has now", hold(model, gradients), **given)
    given = {"model": model, "tokenizer": tiny.tokenizer}
    refused("give learning_rate=", hold(model, gradients, "difference", None), **given)
    refused("nothing", tmp_path / "nothing.safetensors", **given)


def test_what_the_attacker_is_told_can_be_said_anew(
    tiny: Target, model: Any, gradients: dict[str, torch.Tensor], seen: Observation
) -> None:
    nothing = gradleak.observe(model, tiny.tokenizer, gradients)

    def told(observation: Observation, know: Any) -> Any:
        return gradleak.reconstruct(observation, attacks="span", know=know).observations[0].knows

    few = told(seen, ["batch_size", "defense"])
    assert (few.batch_size, few.lengths, few.labels, few.defenses) == (2, None, None, ())
    more = told(nothing, {"lengths": [7, 7], "labels": LABELS, "defense": "clipping:clip=1.0"})
    assert (more.batch_size, more.lengths) == (2, (7, 7))
    assert more.labels is not None and more.labels.tolist() == LABELS
    assert [one.name for one in more.defenses or ()] == ["clipping"]
    beside = told(seen, {"batch_size": 2})
    assert beside.lengths == (7, 7) and beside.labels is not None

    def refused(message: str, know: Any) -> None:
        with pytest.raises(GradleakError, match=message):
            gradleak.reconstruct(nothing, attacks="span", know=know)

    refused("know names labels, lengths, batch_size, defense, not 'texts'", ["texts"])
    refused("know names lengths, which was not granted", ["lengths"])
    refused("speak of different batches", {"lengths": [7, 7], "batch_size": 3})


def test_a_record_is_of_one_setting_and_says_so_shortly(
    tiny: Target, model: Any, gradients: dict[str, torch.Tensor], seen: Observation
) -> None:
    found = gradleak.reconstruct(seen, attacks="span")
    spec = gradleak.score(found, TEXTS).spec
    assert spec["view"] == {"name": "everything"}
    assert len(spec["target"]["weights"]) == 16
    some = {name: one for name, one in gradients.items() if "layer.0" in name}
    part = gradleak.observe(model, tiny.tokenizer, some, lengths=[7, 7], labels=LABELS)
    both = gradleak.reconstruct([seen, part], attacks="span")
    with pytest.raises(GradleakError, match="Updates 0 and 1 differ in their tensors that were"):
        gradleak.score(both, [TEXTS, TEXTS])


def test_a_data_frame_has_the_texts_where_they_are_asked_for(
    seen: Observation, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = gradleak.reconstruct(seen, attacks="span")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(GradleakError, match="pip install pandas"):
        found.to_pandas()

    # What a data frame is made of: pandas itself is no dependency of the tests
    frames = types.SimpleNamespace(DataFrame=lambda rows, columns: (columns, rows))
    monkeypatch.setitem(sys.modules, "pandas", frames)
    columns, rows = found.to_pandas()
    assert columns == ["update", "place", "attack", "certified", "explains", "adds"]
    assert [row[:3] for row in rows] == [[0, 0, "span"], [0, 1, "span"]]
    columns, rows = found.to_pandas(show=True)
    assert columns[-1] == "text" and {row[-1] for row in rows} == {guess.text for guess in found}
