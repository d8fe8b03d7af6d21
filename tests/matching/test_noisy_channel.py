"""The likelihood of what was seen, by sums, against the client's own code and autograd."""

import pytest
import torch

from gradleak.core.defense import Defense, protect_in_turn
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.defenses.clipping_and_noise import Clipping, GaussianNoise
from gradleak.defenses.differential_privacy import ClientDp, DpSgd
from gradleak.defenses.few_bits import Quantisation, Rounding, Sign
from gradleak.defenses.sparsification import Pruning
from gradleak.matching.noisy_channel import Likelihood, read_channel
from gradleak.protocols.fedavg import FedAvg
from gradleak.protocols.fedsgd import FedSGD
from gradleak.views import Everything, PartsView

ONE, TWO = ("the cat is red .",), ("the cat is red .", "my dog was bad again !")
CHAINS: dict[str, tuple[Defense, ...]] = {
    "dp_sgd": (DpSgd(clip=0.7, noise_multiplier=0.3),),
    "dp_sgd, unclipped": (DpSgd(clip=1e6, noise_multiplier=1e-7),),
    "client_dp": (ClientDp(clip=0.5, noise_multiplier=0.2),),
    "gaussian_noise": (GaussianNoise(std=0.05),),
    "clipping and noise": (Clipping(clip=0.6), GaussianNoise(std=0.05), GaussianNoise(std=0.1)),
}


def score_slowly(observation, batch, place, candidates, std):  # type: ignore[no-untyped-def]
    """By what the client's own code sends of each candidate without noise, as whole tensors."""
    found = []
    for words in candidates:
        ids = batch.ids.clone()
        ids[place] = words
        labels = ids if batch.labels.ndim > 1 else batch.labels
        whole = type(batch)(ids=ids, mask=batch.mask, labels=labels)
        quiet = [one.without_noise() for one in observation.knows.defenses]
        each = quiet[0].wants_per_example
        rngs = [Streams.root("nobody", 0)]
        sent = observation.protocol.update(observation.target, whole[None], per_example=each)
        sent = protect_in_turn(quiet, sent, rngs)
        sent = sent.cut(observation.target.part(name) for name in observation.update.tensors)
        found.append(
            -sum(
                (observation.update.tensors[name].double() - tensor.double()).square().sum()
                for name, tensor in sent.tensors.items()
            )
            / (2 * std**2)
        )
    return torch.stack(found)


def list_candidates(target: Target, batch, place: int, count: int = 5):  # type: ignore[no-untyped-def]
    words = target.vocabulary.allowed.nonzero()[7::9, 0][:count]
    ids = batch.ids[place].repeat(len(words) + 1, 1)
    ids[1:, 2] = words
    return ids


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("texts", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("view", [Everything(), PartsView("1", ())], ids=["all", "one layer"])
def test_sums_give_the_clients_own_likelihood(  # type: ignore[no-untyped-def]
    tiny64: Target, observe, make_private, chain: str, texts: tuple[str, ...], view
) -> None:
    seen = observe(tiny64, texts, defenses=CHAINS[chain], view=view)
    batch = make_private(tiny64, texts).batch
    channel = read_channel(CHAINS[chain], seen.protocol, len(texts))
    assert channel.noise_std == pytest.approx(seen.noise_std)
    place = len(texts) - 1
    ids = list_candidates(tiny64, batch, place)
    found = Likelihood(seen, batch, place, channel)(ids)
    right = score_slowly(seen, batch, place, ids, channel.noise_std)
    assert float(right.std()) > 0
    torch.testing.assert_close(found - found[0], right - right[0], rtol=1e-8, atol=1e-8)


def test_it_holds_for_language_models(causal: Target, observe, make_private) -> None:  # type: ignore[no-untyped-def]
    defenses = CHAINS["dp_sgd"]
    seen = observe(causal, TWO, defenses=defenses)
    batch = make_private(causal, TWO).batch
    channel = read_channel(defenses, seen.protocol, 2)
    ids = list_candidates(causal, batch, 0, 3)
    found = Likelihood(seen, batch, 0, channel)(ids)
    right = score_slowly(seen, batch, 0, ids, channel.noise_std)
    torch.testing.assert_close(found - found[0], right - right[0], rtol=1e-8, atol=1e-8)


def test_one_local_step_is_a_gradient_of_another_size(
    tiny64: Target, observe, make_private
) -> None:  # type: ignore[no-untyped-def]
    defenses = (ClientDp(clip=1e-3, noise_multiplier=0.2),)
    seen = observe(tiny64, ONE, defenses=defenses, protocol=FedAvg(learning_rate=0.1))
    batch = make_private(tiny64, ONE).batch
    channel = read_channel(defenses, seen.protocol, 1)
    ids = list_candidates(tiny64, batch, 0)
    found = Likelihood(seen, batch, 0, channel)(ids)
    right = score_slowly(seen, batch, 0, ids, channel.noise_std)
    torch.testing.assert_close(found - found[0], right - right[0], rtol=1e-6, atol=1e-6)


def test_single_precision_is_near_enough(tiny: Target, observe, make_private) -> None:  # type: ignore[no-untyped-def]
    defenses = CHAINS["dp_sgd"]
    seen, batch = observe(tiny, ONE, defenses=defenses), make_private(tiny, ONE).batch
    channel = read_channel(defenses, seen.protocol, 1)
    ids = list_candidates(tiny, batch, 0)
    found = Likelihood(seen, batch, 0, channel)(ids)
    right = score_slowly(seen, batch, 0, ids, channel.noise_std)
    torch.testing.assert_close(found - found[0], right - right[0], rtol=1e-3, atol=1e-3)


def test_rounds_of_a_model_that_stands_still_have_less_noise() -> None:
    once, often = (read_channel((GaussianNoise(0.2),), FedSGD(), 1, rounds) for rounds in (1, 16))
    assert often.noise_std == pytest.approx(once.noise_std / 4)


@pytest.mark.parametrize(
    ("defenses", "said"),
    [
        ((), "Nothing is noised"),
        ((Clipping(),), "Nothing is noised"),
        ((Quantisation(),), "quantisation.*to the last digit"),
        ((Sign(),), "sign.*signs arrive"),
        ((Pruning(), GaussianNoise()), "pruning.*left out by a rule"),
        ((GaussianNoise(), Rounding()), "rounding.*rounding"),
        ((GaussianNoise(), Clipping()), "clipping.*not Gaussian"),
        ((DpSgd(), Clipping()), "clipping.*not Gaussian"),
    ],
)
def test_other_channels_are_refused_by_name(defenses: tuple[Defense, ...], said: str) -> None:
    with pytest.raises(GradleakError, match=said):
        read_channel(defenses, FedSGD(), 1)


@pytest.mark.parametrize("protocol", [FedSGD(dropout=True), FedAvg(epochs=3)])
def test_other_protocols_are_refused_by_name(protocol) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(GradleakError, match="No exact likelihood is known for fed"):
        read_channel((GaussianNoise(),), protocol, 2)
