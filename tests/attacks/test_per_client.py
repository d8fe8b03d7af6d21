"""Many clients' gradients in one pass are those of the plain loop."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradleak.attacks.learning_to_invert.simulation import ByTransform, ClosedForms, per_client
from gradleak.core.batch import Batch
from gradleak.core.target import Target, TargetSpec
from gradleak.protocols.fedsgd import FedSGD
from gradleak.targets.image_networks import ResNet20, TinyImage
from gradleak.targets.tiny import TinyCausal


def batches(target: Target, clients: int = 3, examples: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (clients, examples, 7), generator=generator)
    lengths = torch.randint(3, 8, (clients, examples, 1), generator=generator)
    mask = torch.arange(7) < lengths
    labels = (
        ids
        if target.labels_are_tokens
        else torch.randint(0, 2, (clients, examples), generator=generator)
    )
    return Batch(ids=ids.where(mask, torch.tensor(target.vocabulary.pad)), mask=mask, labels=labels)


def assert_same(target: Target, made: ClosedForms | ByTransform) -> None:
    given = batches(target)
    expected, found = FedSGD().update(target, given), made(given)
    assert list(found.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-9, atol=1e-12)


def test_closed_forms_are_the_clients_gradients(tiny64: Target) -> None:
    assert_same(tiny64, ClosedForms(tiny64))


def test_also_of_a_language_model_whose_output_layer_is_tied_to_its_words(causal: Target) -> None:
    assert_same(causal, ClosedForms(causal))


def test_also_where_a_layer_is_used_three_times(random_target: Callable[..., Target]) -> None:
    target = random_target("Albert", torch.float64)
    assert_same(target, ClosedForms(target))


def test_a_large_table_is_summed_another_way(
    tiny64: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradleak.attacks.learning_to_invert.simulation.SMALL_TABLE", 4)
    assert_same(tiny64, ClosedForms(tiny64))


@pytest.mark.parametrize("made", [ClosedForms, ByTransform])
@pytest.mark.parametrize(
    "spec",
    [TinyImage(), ResNet20(), ResNet20(norm="fixed_batch")],
    ids=["tiny_image", "group", "batch"],
)
def test_also_of_pictures(
    spec: TargetSpec, made: Callable[[Target], ClosedForms | ByTransform]
) -> None:
    target = spec.open(torch.device("cpu"), torch.float64)
    probe = target.probe(6, 1, torch.Generator().manual_seed(0))
    assert probe.pixels is not None
    given = Batch.of_pixels(probe.pixels.unflatten(0, (3, 2)), probe.labels.view(3, 2))
    expected, found = FedSGD().update(target, given), made(target)(given)
    assert isinstance(per_client(target), ClosedForms)
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-8, atol=1e-12)


def test_what_has_no_closed_form_goes_by_torchs_transforms() -> None:
    target = TinyCausal(shape="gpt2").open(torch.device("cpu"), torch.float64)
    assert_same(target, ByTransform(target))
    assert isinstance(per_client(target), ClosedForms)

    class Scale(nn.LayerNorm):  # of a kind the engine does not know
        pass

    target.module.transformer.ln_f.__class__ = Scale
    assert isinstance(per_client(target), ByTransform)
