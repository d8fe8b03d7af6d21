"""What each defense does, by laws: limits, closed forms, and what the server may know of it."""

from collections.abc import Callable

import pytest
import torch

from gradleak.audit import AuditSpec
from gradleak.core.defense import Channel, Defense, Survivors, channel_of, protect_in_turn
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.update import Update
from gradleak.defenses.clipping_and_noise import Clipping, GaussianNoise
from gradleak.defenses.differential_privacy import CentralDp, ClientDp
from gradleak.defenses.few_bits import Quantisation, Sign
from gradleak.defenses.sparsification import Masking, Pruning, TopK

NO_STRENGTH = [
    GaussianNoise(0.0),
    Masking(0.0),
    Pruning(1.0),
    Pruning(1.0, "update"),
    TopK(1.0),
    Clipping(float("inf")),
    CentralDp(),
]


def drawn(scale: float = 1.0, clients: int = 2) -> Update:
    """Two tensors of normal entries, the second ten times larger."""
    generator = Streams.root("test", 0).generator()
    return Update(
        {
            "a": scale * torch.randn(clients, 40, 50, generator=generator),
            "b": 10 * scale * torch.randn(clients, 300, generator=generator),
        }
    )


def sent(defense: Defense, update: Update) -> Update:
    return defense.protect(
        update, [Streams.root("client", 0).child(client) for client in range(update.clients)]
    )


def kept(update: Update) -> dict[str, float]:
    return {name: float((tensor != 0).double().mean()) for name, tensor in update.tensors.items()}


@pytest.mark.parametrize("defense", NO_STRENGTH, ids=repr)
def test_no_strength_is_the_identity_and_a_clear_channel(defense: Defense) -> None:
    update = drawn()
    assert all(
        torch.equal(tensor, update.tensors[name])
        for name, tensor in sent(defense, update).tensors.items()
    )
    assert defense.channel().clear and not defense.channel().randomised


@pytest.mark.parametrize(
    "defense", [Pruning(0.1), Pruning(0.1, "update"), TopK(0.1), Masking(0.9)], ids=repr
)
def test_what_survives_is_unchanged_and_the_rest_is_zero(defense: Defense) -> None:
    update = drawn()
    for name, tensor in sent(defense, update).tensors.items():
        assert bool(((tensor == 0) | (tensor == update.tensors[name])).all())
    assert defense.channel().survivors is Survivors.SEEN


def test_pruning_keeps_the_largest_share_of_each_tensor() -> None:
    update = drawn()
    pruned = sent(Pruning(0.1), update)
    assert kept(pruned) == {"a": pytest.approx(0.1), "b": pytest.approx(0.1)}
    for name, tensor in pruned.tensors.items():
        for row, whole in zip(tensor, update.tensors[name], strict=True):
            assert float(row[row != 0].abs().min()) >= float(whole[row == 0].abs().max())


def test_top_k_chooses_over_all_tensors_together_and_is_pruning_of_the_whole() -> None:
    top, pruned = (sent(defense, drawn()) for defense in (TopK(0.1), Pruning(0.1, "update")))
    assert all(torch.equal(tensor, pruned.tensors[name]) for name, tensor in top.tensors.items())
    shares = kept(top)
    assert shares["a"] < 0.01 < 0.7 < shares["b"]


def test_pruning_of_the_whole_looks_at_one_client_at_a_time() -> None:
    update = drawn(clients=5)
    together = sent(Pruning(0.1, "update"), update)
    for client in range(5):
        whole = torch.cat([tensor[client].flatten() for tensor in update.tensors.values()])
        left = torch.cat([tensor[client].flatten() for tensor in together.tensors.values()])
        assert int((left != 0).sum()) == round(0.1 * len(whole))
        assert float(left[left != 0].abs().min()) >= float(whole[left == 0].abs().max())


def test_masking_zeroes_the_share_it_says_wherever_the_large_entries_are() -> None:
    assert kept(sent(Masking(0.75), drawn(clients=20))) == {
        "a": pytest.approx(0.25, abs=0.02),
        "b": pytest.approx(0.25, abs=0.02),
    }


def test_sign_sends_signs() -> None:
    update = drawn()
    assert all(
        torch.equal(tensor, update.tensors[name].sign())
        for name, tensor in sent(Sign(), update).tensors.items()
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantisation_is_right_in_the_mean_and_has_the_levels_it_says(bits: int) -> None:
    one = Streams.root("test", 1).generator()
    row = torch.randn(100, generator=one)
    many = Update({"a": row.expand(800, -1).clone()})
    rounded = sent(Quantisation(bits=bits, bucket=100), many).tensors["a"]
    step = float(row.abs().max()) / (2 ** (bits - 1) - 1)
    levels = rounded / step
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-4)
    assert float((rounded - row).abs().max()) <= step * 1.0001
    assert float((rounded.mean(0) - row).abs().max()) < 5 * step / 2 / 800**0.5


def test_buckets_have_scales_of_their_own() -> None:
    update = Update({"a": torch.tensor([[1.0, 1.0, 1e-3, 1e-3, 5.0]])})
    assert torch.equal(sent(Quantisation(bucket=2), update).tensors["a"], update.tensors["a"])


def test_clipping_bounds_the_norm_of_all_tensors_together_and_keeps_the_direction() -> None:
    update = Update(
        {
            name: tensor * torch.tensor([1.0, 1e-6]).view(2, *[1] * (tensor.ndim - 1))
            for name, tensor in drawn().tensors.items()
        }
    )
    small = sent(Clipping(2.0), update)
    torch.testing.assert_close(
        small.whole_norms(), torch.stack([torch.tensor(2.0), update.whole_norms()[1]])
    )
    factor = small.tensors["a"][0] / update.tensors["a"][0]
    torch.testing.assert_close(factor, factor.mean().expand_as(factor))
    assert small.tensors["b"][1].equal(update.tensors["b"][1])


def test_client_dp_is_clipping_and_noise_of_so_many_clips() -> None:
    update = drawn()
    by_hand = protect_in_turn((Clipping(0.5),), update, [Streams.root("any", 0)] * 2)
    noise = {
        name: tensor - by_hand.tensors[name]
        for name, tensor in sent(ClientDp(0.5, 3.0), update).tensors.items()
    }
    assert (
        float(noise["a"].std())
        == pytest.approx(1.5, rel=0.05)
        == pytest.approx(float(noise["b"].std()), rel=0.1)
    )
    assert ClientDp(0.5, 3.0).channel() == Channel(noise_std=1.5, clip=0.5, randomised=True)


def test_central_dp_says_that_the_server_saw_everything() -> None:
    channel = CentralDp().channel()
    assert channel.after_server and channel.clear


# Chains


def test_channels_add_up_in_the_order_written() -> None:
    assert channel_of((GaussianNoise(3.0), GaussianNoise(4.0))).noise_std == 5.0
    assert channel_of((Pruning(), Clipping(1.0))) == Channel(survivors=Survivors.SEEN, clip=1.0)
    assert channel_of(()) == Channel()


def test_noise_after_pruning_hides_what_survived_and_noise_before_it_does_not() -> None:
    assert channel_of((Pruning(), GaussianNoise(0.1))).survivors is Survivors.HIDDEN
    assert channel_of((Pruning(), GaussianNoise(0.0))).survivors is Survivors.SEEN
    assert channel_of((Pruning(), GaussianNoise(0.1), Clipping())).survivors is Survivors.HIDDEN
    assert channel_of((GaussianNoise(0.1), Pruning())).survivors is Survivors.SEEN
    assert channel_of((Pruning(), GaussianNoise(0.1), Pruning())).survivors is Survivors.SEEN


def test_a_chain_is_applied_in_the_order_written() -> None:
    update, rngs = drawn(), [Streams.root("client", 0).child(client) for client in range(2)]
    clipped_signs = protect_in_turn((Sign(), Clipping(1.0)), update, rngs)
    signs = protect_in_turn((Clipping(1.0), Sign()), update, rngs)
    assert float(signs.whole_norms()[0]) > 1 == pytest.approx(float(clipped_signs.whole_norms()[0]))


def test_dp_sgd_after_another_defense_is_refused_by_name() -> None:
    with pytest.raises(
        GradleakError,
        match="dp_sgd needs the gradient of each example and must be the first defense",
    ):
        AuditSpec.from_plain({"target": "tiny", "defenses": ["clipping", "dp_sgd"]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pruning:fraction_kept=0", "99 % pruned is 0.01 kept"),
        ("top_k:fraction_kept=1.5", "fraction_kept must be"),
        ("masking:fraction_zeroed=1", "under 1"),
        ("quantisation:bits=1", "bits must lie between"),
        ("quantisation:bucket=0", "bucket counts"),
        ("clipping:clip=0", "clip must be above 0"),
        ("dp_sgd:noise_multiplier=-1", "noise_multiplier must be 0 or more, not -1"),
        ("dp_sgd:clip=inf", "give a finite one, or noise_multiplier=0"),
        ("client_dp:clip=inf", "clip must be finite, not inf"),
        ("dp_sgd:sampling_rate=2", "sampling_rate must be"),
        ("dp_sgd:steps=0", "steps count from 1"),
        ("central_dp:delta=0", "delta must lie"),
    ],
)
def test_senseless_strengths_are_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(GradleakError, match=message):
        AuditSpec.from_plain({"target": "tiny", "defenses": [line]})


@pytest.mark.parametrize("line", ["pruning", "masking", "sign", "quantisation"])
def test_nothing_read_off_a_thinned_update_is_called_certain(
    tiny: object, observe: Callable[..., object], line: str
) -> None:
    from gradleak.attacks.evidence import findings
    from gradleak.core.observation import Observation
    from gradleak.core.specs import from_string

    defense = from_string("defense", line)
    observation = observe(tiny, ["the cat is red ."], [1], defenses=(defense,))
    assert isinstance(observation, Observation)
    assert not any(found.exact for found in findings(observation))
