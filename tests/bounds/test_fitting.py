"""Where no noise stands between, words that fit are those that brute force finds."""

import pytest
import torch

from gradleak.bounds.fitting import count_fitting, fit_tensor, read_deterministic
from gradleak.core.defense import Channel, Defense, Survivors, protect_in_turn
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.defenses.clipping_and_noise import Clipping, GaussianNoise
from gradleak.defenses.differential_privacy import DpSgd
from gradleak.defenses.few_bits import Quantisation, Rounding, Sign
from gradleak.defenses.sparsification import Masking, Pruning
from gradleak.matching.exact import gradients_of
from gradleak.protocols.fedavg import FedAvg
from gradleak.protocols.fedsgd import FedSGD
from gradleak.views import Everything, PartsView

TEXTS = ("the cat is red .", "my dog was bad again !")
CHAINS: dict[str, tuple[Defense, ...]] = {
    "none": (),
    "sign": (Sign(),),
    "pruning": (Pruning(0.2),),
    "masking": (Masking(0.5),),
    "quantisation": (Quantisation(bits=3, bucket=16),),
    "rounding": (Rounding(),),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS], ids=["one", "two"])
@pytest.mark.parametrize("view", [Everything(), PartsView("1", ())], ids=["all", "one layer"])
def test_the_true_word_fits_and_one_that_is_a_copy_does_too(  # type: ignore[no-untyped-def]
    tiny: Target, observe, make_private, chain: str, texts: tuple[str, ...], view
) -> None:
    seen = observe(tiny, texts, defenses=CHAINS[chain], view=view)
    batch = make_private(tiny, texts).batch
    channel = read_deterministic(CHAINS[chain], FedSGD(), len(texts))
    assert channel is not None
    words = tiny.vocabulary.allowed.nonzero()[7::9, 0][:5]
    others = words[words != batch.ids[0, 2]]
    ids = batch.ids[0].repeat(len(others) + 2, 1)
    ids[2:, 2] = others  # the first two are the truth
    assert count_fitting(seen, batch, 0, ids, channel) == 2


def test_signs_at_the_edge_of_zero_are_not_compared() -> None:
    made, channel = torch.tensor([1.0, 1e-6, -0.5]), Channel(signs_only=True)
    assert bool(fit_tensor(made, torch.tensor([1.0, -1.0, -1.0]), channel).all())
    assert fit_tensor(made, torch.tensor([-1.0, 1.0, -1.0]), channel).tolist() == [
        *(False, True, True)
    ]


def test_what_was_left_out_is_not_compared() -> None:
    channel = Channel(survivors=Survivors.SEEN)
    seen = torch.tensor([1.0, 0.0, 0.0])
    assert bool(fit_tensor(torch.tensor([1.0, 9.0, -3.0]), seen, channel).all())
    assert not bool(fit_tensor(torch.tensor([1.1, 0.0, 0.0]), seen, channel).all())


def test_a_largest_entry_must_be_that_of_its_bucket() -> None:
    channel = Channel(quantisation_levels=3, quantisation_bucket=2)
    seen = torch.tensor([3.0, 1.0, 6.0, -2.0])
    assert bool(fit_tensor(torch.tensor([3.0, 1.9, 6.0, -3.9]), seen, channel).all())
    # Further than a step; another largest in the second bucket
    assert fit_tensor(torch.tensor([3.0, 2.1, 5.9, -2.0]), seen, channel).tolist() == [
        *(True, False, False, False)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_quantisation_draws_the_gradient_fits(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(7, 30, generator=generator)
    defense = Quantisation(bits=4, bucket=64)
    rngs = [Streams.root("client", seed)]
    sent = protect_in_turn([defense], Update({"one": gradient[None]}), rngs).tensors["one"][0]
    assert bool(fit_tensor(gradient, sent, defense.channel()).all())
    assert not bool(fit_tensor(1.01 * gradient, sent, defense.channel()).all())


@pytest.mark.parametrize(
    "defenses",
    [(GaussianNoise(),), (DpSgd(),), (Clipping(),), (Sign(), GaussianNoise())],
)
def test_what_is_noised_or_scaled_down_is_not_counted(defenses: tuple[Defense, ...]) -> None:
    assert read_deterministic(defenses, FedSGD(), 1) is None


def test_weights_whose_digits_hide_the_gradient_are_refused() -> None:
    with pytest.raises(GradleakError, match="cannot be counted for fedavg"):
        read_deterministic((), FedAvg(learning_rate=0.1), 1)


def test_gradients_can_be_built(tiny64: Target, make_private) -> None:  # type: ignore[no-untyped-def]
    batch = make_private(tiny64, TEXTS).batch
    names = tuple(part.name for part in tiny64.parts)
    found = gradients_of(tiny64, names).of(batch)
    for part in tiny64.parts:
        built = found[part.name].build(part.shape)
        assert built.shape == (2, *part.shape)
        torch.testing.assert_close(
            built.square().flatten(1).sum(1), found[part.name].pair_up(found[part.name])
        )
        values = torch.randn(part.shape, dtype=torch.float64)
        torch.testing.assert_close(
            (built * values).flatten(1).sum(1), found[part.name].along(values)
        )
