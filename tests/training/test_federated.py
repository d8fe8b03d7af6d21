"""Rounds of clients in training: what they send is averaged, defenses act on each."""

from pathlib import Path

import pytest
import torch

from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.defenses.differential_privacy import DpSgd
from gradleak.protocols.fedavg import FedAvg
from gradleak.protocols.fedsgd import FedSGD
from gradleak.training.client_steps import deal_out, mean_update, take_round
from gradleak.training.fine_tuning import FineTuning, evaluate, fine_tune
from tests.training.test_fine_tuning import ignore, material, opened, toy, trained, weights

LOCAL = FedAvg(steps=4, local_batch_size=4, learning_rate=5e-3, optimiser="adam")


def test_clients_that_train_by_themselves_teach_the_server(tmp_path: Path) -> None:
    target = opened()
    work = material(target)
    before = evaluate(target, work.evaluation).accuracy
    settings = FineTuning(epochs=4, batch_size=16, protocol=LOCAL, clients=2)
    assert fine_tune(settings, target, work, tmp_path / "out", ignore).accuracy > max(0.9, before)


def test_one_local_step_of_one_client_is_a_step_of_gradient_descent() -> None:
    target, batch = opened("tiny"), opened("tiny").private_batch(toy(8)).batch
    gradient = mean_update(target, [batch], FedSGD(), (), Streams.root("x", 0))
    expected = {name: value - 0.1 * gradient[name] for name, value in target.parameters.items()}
    protocol = FedAvg(steps=1, learning_rate=0.1)
    take_round(target, mean_update(target, [batch], protocol, (), Streams.root("x", 0)), protocol)
    for name, value in target.parameters.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_noise_of_many_clients_averages_out(tiny64: Target) -> None:
    batch = tiny64.private_batch(toy(16)).batch
    plain = mean_update(tiny64, [batch], FedSGD(), (), Streams.root("x", 0))
    spreads = []
    for clients in (1, 16):
        noisy = mean_update(
            tiny64,
            deal_out(batch, clients),
            FedSGD(),
            (GaussianNoise(std=1.0),),
            Streams.root("x", 0),
        )
        spreads.append(
            float(torch.cat([(noisy[name] - plain[name]).flatten() for name in plain]).std())
        )
    assert spreads[0] / spreads[1] == pytest.approx(4, rel=0.05)


def test_every_example_is_dealt_to_one_client(tiny64: Target) -> None:
    batch = tiny64.private_batch(toy(7)).batch
    shares = deal_out(batch, 3)
    assert [share.lead[0] for share in shares] == [3, 2, 2]
    assert torch.equal(torch.cat([share.ids for share in shares]), batch.ids)  # type: ignore[arg-type,misc]
    assert len(deal_out(batch, 20)) == 7


def test_a_checkpoint_of_another_federation_is_refused(tmp_path: Path) -> None:
    once = FineTuning(epochs=1, batch_size=16, protocol=LOCAL, clients=2)
    assert not torch.equal(trained(once, tmp_path / "a"), weights(opened()))
    (tmp_path / "a" / "config.json").unlink()
    with pytest.raises(GradleakError, match="clients was 2 and is 3"):
        trained(FineTuning(epochs=1, batch_size=16, protocol=LOCAL, clients=3), tmp_path / "a")


def test_what_clients_cannot_do_is_refused() -> None:
    with pytest.raises(GradleakError, match="--defense gaussian_noise"):
        FineTuning(clients=2, gradient_noise=0.1)
    with pytest.raises(GradleakError, match="client_dp"):
        FineTuning(clients=2, defenses=(DpSgd(clip=1.0, noise_multiplier=1.0),))
