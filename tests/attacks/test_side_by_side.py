"""Inverters trained side by side learn each from its own pictures, through its own defense."""

from dataclasses import replace

import pytest
import torch
from side_by_side import SideBySide

from gradleak.attacks.learning_to_invert.picture_attacks import (
    LtiPictures,
    PictureGallery,
    read_pictures,
)
from gradleak.core.attack import Bench, ClientSetting
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.datasets.made_up import Shapes
from gradleak.defenses.few_bits import Sign
from gradleak.priors.picture_priors import OnePicture
from gradleak.protocols.fedavg import FedAvg
from gradleak.protocols.fedsgd import FedSGD
from gradleak.targets.image_networks import TinyImage
from gradleak.views import Everything

BLACK = OnePicture(torch.zeros(3, 8, 8))  # a prior that these attacks do not ask
ATTACK = LtiPictures(steps=60, training_batch=32, width=96, directions=96, learning_rate=3e-3)


@pytest.fixture(scope="module")
def target() -> Target:
    return TinyImage().open(torch.device("cpu"))


def group_of(
    target: Target, galleries: list[PictureGallery], attack: LtiPictures = ATTACK
) -> SideBySide:
    setting = ClientSetting(TinyImage(), target, FedSGD(), (), Everything(), 1)
    return SideBySide(
        attack, setting, [(), (Sign(),)], galleries, Bench(Streams.root("attacker", 0), BLACK)
    )


def test_more_pictures_help_signs_hurt_and_the_best_state_is_kept(target: Target) -> None:
    public = Shapes("public", 8).load(600)
    group = group_of(target, [read_pictures(target, public[:size]) for size in (30, 600)])
    looks: list[list[float]] = []
    steps: list[int] = []
    assert group.run(lambda step, errors: (looks.append(errors), steps.append(step))[0]) == 60
    assert steps == [0, 1, 2, 4, *range(5, 61, 5)]  # small sets are soon learnt by heart
    for kept, *seen in zip(group.best.tolist(), *looks, strict=True):
        assert kept == pytest.approx(min(seen))
    secrets = read_pictures(target, Shapes("private", 8).load(60)).batch(1)
    guessed, labels = group.read(secrets, Streams.root("client", 0))
    assert guessed.shape == (4, 60, 3, 8, 8) and labels.shape == (4, 60)
    assert secrets.pixels is not None
    few, many, few_signs, many_signs = (
        (guessed - secrets.pixels[:, 0]).square().flatten(1).mean(1).tolist()
    )
    assert many < 0.7 * few and many_signs < few_signs and many < many_signs
    assert float((labels[1] == secrets.labels[:, 0]).float().mean()) > 0.8


def test_an_inverter_learns_nothing_from_its_neighbours_pictures(target: Target) -> None:
    first, second = (
        read_pictures(target, Shapes("public", 8).load(80)[place : place + 40]) for place in (0, 40)
    )
    short = replace(ATTACK, steps=4, training_batch=8, width=16, directions=None)
    both, alone = group_of(target, [first, second], short), group_of(target, [first], short)
    both.run()
    alone.run()
    for (name, ours), theirs in zip(
        both.network.named_parameters(), alone.network.parameters(), strict=True
    ):
        torch.testing.assert_close(ours[[0, 2]], theirs, rtol=1e-4, atol=1e-5, msg=name)


def test_labels_drawn_at_random_are_learnt_by_pictures_of_other_classes(target: Target) -> None:
    others = [one for one in Shapes("public", 8).load(400) if one.label in (2, 3)]
    secrets = read_pictures(
        target, [one for one in Shapes("private", 8).load(200) if one.label in (0, 1)][:60]
    ).batch(1)
    assert secrets.pixels is not None
    errors = []
    for share in (0.0, 1.0):
        group = group_of(target, [read_pictures(target, others)], replace(ATTACK, relabelled=share))
        group.run()
        guessed, _ = group.read(secrets, Streams.root("client", 0))
        errors.append(float((guessed[0] - secrets.pixels[:, 0]).square().mean()))
    assert errors[1] < 0.5 * errors[0]


def test_what_cannot_be_trained_together_is_refused(target: Target) -> None:
    gallery = read_pictures(target, Shapes("public", 8).load(10))
    with pytest.raises(GradleakError, match="give learning_rate"):
        group_of(target, [gallery], replace(ATTACK, learning_rate=None))
    setting = ClientSetting(TinyImage(), target, FedAvg(), (), Everything(), 1)
    with pytest.raises(GradleakError, match="one gradient of one picture"):
        SideBySide(ATTACK, setting, [()], [gallery], Bench(Streams.root("attacker", 0), BLACK))
