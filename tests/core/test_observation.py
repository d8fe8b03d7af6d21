"""An update that cannot be this model's is refused by the tensor that does not fit."""

from collections.abc import Callable

import pytest
import torch

from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation, check_update
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.targets.tiny import Tiny
from gradleak.views import PartsView

QUERY = "bert.encoder.layer.0.attention.self.query.weight"


@pytest.fixture
def seen(tiny: Target, observe: Callable[..., Observation]) -> Update:
    return observe(tiny).update


def changed(update: Update, name: str, tensor: torch.Tensor) -> Update:
    return Update({**update.tensors, name: tensor})


def test_the_models_own_update_is_fine(tiny: Target, seen: Update) -> None:
    check_update(tiny, seen)
    check_update(tiny, seen.select([QUERY]))
    check_update(tiny, Update({QUERY: torch.ones(1, 3, 32, 32)}, per_example=True))


def test_a_tensor_of_another_model_is_refused_by_name(tiny: Target, seen: Update) -> None:
    with pytest.raises(GradleakError, match="This model does not train 'roberta.query'"):
        check_update(tiny, changed(seen, "roberta.query", torch.ones(1, 4)))


def test_a_frozen_tensor_is_refused_by_name(seen: Update) -> None:
    frozen = Tiny(frozen=("query",)).open(torch.device("cpu"))
    with pytest.raises(GradleakError, match=rf"does not train '{QUERY}'.*or frozen in this one\?"):
        check_update(frozen, seen)


def test_another_shape_is_refused_with_both_shapes(tiny: Target, seen: Update) -> None:
    with pytest.raises(
        GradleakError,
        match=(
            rf"The update has {QUERY} of shape \[8, 32\], which is \[32, 32\] in this model: it was"
            r" made with"
        ),
    ):
        check_update(tiny, changed(seen, QUERY, torch.ones(1, 8, 32)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_refused_by_name(
    tiny: Target, seen: Update, value: float
) -> None:
    with pytest.raises(
        GradleakError,
        match=f"The update of batch 3 is not finite in {QUERY}: the model or the protocol diverged",
    ):
        check_update(
            tiny, changed(seen, QUERY, torch.full((1, 32, 32), value)), "The update of batch 3"
        )


def test_an_update_of_zeros_is_refused_and_one_tensor_of_zeros_is_not(
    tiny: Target, seen: Update
) -> None:
    check_update(tiny, changed(seen, QUERY, torch.zeros(1, 32, 32)))
    with pytest.raises(
        GradleakError,
        match=rf"The update is zero in all that is seen \({QUERY}\): nothing can be rebuilt",
    ):
        check_update(tiny, Update({QUERY: torch.zeros(1, 32, 32)}))


def test_what_a_client_would_have_sent_is_cut_as_what_was_seen(
    random_target: Callable[..., Target],
    observe: Callable[..., Observation],
    make_private: Callable[..., object],
) -> None:
    target = random_target("GPT2", torch.float64)
    texts = ("the cat is red .",)
    observation = observe(target, texts, view=PartsView(layers="2", modules=("key",)))
    batch = make_private(target, texts).batch  # type: ignore[attr-defined]
    alone = type(batch)(ids=batch.ids[None], mask=batch.mask[None], labels=batch.labels[None])
    again = observation.simulate(alone, []).tensors
    assert list(again) == ["transformer.h.1.attn.c_attn.weight[key]"]
    torch.testing.assert_close(again, dict(observation.update.tensors))
