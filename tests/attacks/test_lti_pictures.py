"""Learning to Invert on pictures: what an inverter learns, keeps and refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gradleak.attacks.learning_to_invert.picture_attacks import (
    ChangedPictures,
    LtiPictures,
    LtiPicturesPaper,
    PictureNetwork,
    decorrelate,
    find_scale,
    read_pictures,
)
from gradleak.attacks.learning_to_invert.training import TrainingSchedule
from gradleak.audit import AuditSpec, run_audit
from gradleak.audit.client import observe, private_batches
from gradleak.core.attack import Bench, ClientSetting
from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.specs import from_string
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.datasets.made_up import Shapes
from gradleak.defenses.few_bits import Sign
from gradleak.priors.picture_priors import OnePicture
from gradleak.protocols.fedsgd import FedSGD
from gradleak.targets.image_networks import TinyImage
from gradleak.views import Everything

BLACK = OnePicture(torch.zeros(3, 8, 8))  # a prior that these attacks do not ask
PLAIN = {"target": "tiny_image", "data": "shapes:side=8"}
SHORT = LtiPictures(steps=6, directions=64, training_batch=8, width=16, learning_rate=1e-3)
DEFENSES = ("", "sign", "pruning:fraction_kept=0.01", "gaussian_noise:std=0.01")


@pytest.fixture(scope="module")
def target() -> Target:
    return TinyImage().open(torch.device("cpu"))


def setting_of(target: Target, *defenses: Any, batch_size: int = 1) -> ClientSetting:
    return ClientSetting(TinyImage(), target, FedSGD(), defenses, Everything(), batch_size)


def bench_of(**more: Any) -> Bench:
    return Bench(Streams.root("attacker", 0), BLACK, **more)


def public(count: int = 60) -> list[Example]:
    return Shapes("public", 8).load(count)


def seen(target: Target, *defenses: str, batch_size: int = 1) -> list[Observation]:
    spec = AuditSpec.from_plain(
        {**PLAIN, "limit": 3, "batch_size": batch_size, "defenses": list(defenses)}
    )
    return [
        observe(spec, target, batch, index)
        for index, batch in enumerate(private_batches(spec, target))
    ]


@pytest.mark.parametrize(("defense", "share"), zip(DEFENSES, (0.3, 0.5, 0.7, 0.4), strict=True))
def test_an_inverter_beats_the_mean_picture_by_far_through_each_defense(
    defense: str, share: float
) -> None:
    attack = "lti_pictures:steps=150,training_batch=64,directions=300,width=128,learning_rate=0.002"
    plain = {
        **PLAIN,
        "limit": 20,
        "attacks": [attack],
        "metrics": ["mse"],
        "defenses": [defense] if defense else [],
    }
    record = run_audit(AuditSpec.from_plain(plain)).record.attacks["lti_pictures"]
    assert record.scores["mse"].mean < share * record.scores["mse"].blind
    assert record.label_accuracy is not None and record.label_accuracy >= 0.9
    assert "not_adaptive" not in {flag.name for flag in record.flags}


def test_the_papers_form_reads_the_raw_gradient_and_ends_in_a_sigmoid(target: Target) -> None:
    quick = LtiPicturesPaper(epochs=None, steps=4, training_batch=8, width=16)
    fitted = quick.fit(setting_of(target), public(), bench_of())
    features = 10 * torch.randn(1, 5, fitted.features.size)
    model = fitted.network  # type: ignore[attr-defined]
    assert bool((model.get_buffer("turn") == 1).all()) and not bool(
        model.get_buffer("centre").any()
    )
    with torch.no_grad():
        pictures, _ = model(features)
    assert bool(((pictures >= 0) & (pictures <= 1)).all()) and float(pictures.std()) > 0.1
    by_hand = features[0]
    with torch.no_grad():
        for layer in model.hidden:
            by_hand = (by_hand @ layer.weight[0] + layer.bias[0]).relu()
        by_hand = (by_hand @ model.pixels.weight[0] + model.pixels.bias[0]).sigmoid()
    assert torch.allclose(pictures[0].flatten(1), by_hand, atol=1e-4)
    with pytest.raises(ValueError, match="write directions=null beside raw=true"):
        LtiPictures(raw=True)


def test_the_papers_rate_drops_to_a_tenth_after_three_quarters() -> None:
    paper = LtiPicturesPaper()
    schedule = TrainingSchedule(200, 1e-4, paper.decay, paper.drops)
    assert [schedule.rate(step) for step in (0, 149, 150, 199)] == pytest.approx(
        [1e-4, 1e-4, 1e-5, 1e-5]
    )


def test_a_saved_fit_makes_the_same_guesses_and_is_refused_elsewhere(
    target: Target, tmp_path: Path
) -> None:
    path, setting = tmp_path / "fit.safetensors", setting_of(target, Sign())
    fitted = SHORT.fit(setting, public(), bench_of())
    fitted.save(path)
    again, observations = SHORT.load(path, setting), seen(target, "sign")
    pictures = [
        [one.pictures for one in attack.reconstruct(observations, bench_of())]
        for attack in (fitted, again)
    ]
    assert pictures[0] == pictures[1]
    with pytest.raises(GradleakError, match="fitted to another defense: sign, and here it is none"):
        SHORT.load(path, setting_of(target))
    with pytest.raises(GradleakError, match="holds another lti_pictures"):
        replace(SHORT, width=8).load(path, setting)
    with pytest.raises(GradleakError, match="fitted through other defenses"):
        fitted.reconstruct(seen(target), bench_of())
    with pytest.raises(GradleakError, match="batches of 1, not of 2"):
        fitted.reconstruct(seen(target, "sign", batch_size=2), bench_of())
    other = TinyImage(seed=1).open(torch.device("cpu"))
    with pytest.raises(GradleakError, match="fitted to another target"):
        fitted.reconstruct(seen(other, "sign"), bench_of())


def test_an_interrupted_fit_goes_on_where_it_was(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradleak.attacks.learning_to_invert import training

    monkeypatch.setattr(training, "NEWS", 1)
    monkeypatch.setattr(training, "KEEP_SECONDS", 0.0)
    whole = SHORT.fit(setting_of(target), public(), bench_of())
    keep = training.keep

    def stop(path: Path, state: Any) -> None:
        keep(path, state)
        if state["step"] == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "keep", stop)
    bench = bench_of(checkpoint=tmp_path / "c.checkpoint")
    with pytest.raises(KeyboardInterrupt):
        SHORT.fit(setting_of(target), public(), bench)
    steps: list[int] = []
    monkeypatch.setattr(training, "keep", lambda path, state: steps.append(state["step"]))
    resumed = SHORT.fit(setting_of(target), public(), bench)
    assert steps == [4, 5]
    for name, tensor in whole.network.state_dict().items():  # type: ignore[attr-defined]
        torch.testing.assert_close(resumed.network.state_dict()[name], tensor)  # type: ignore[attr-defined]


def test_the_learning_rate_is_the_one_that_does_best_on_held_out_pictures(target: Target) -> None:
    attack = replace(SHORT, steps=1, learning_rate=None)
    fitted = attack.fit(setting_of(target), public(), bench_of())
    assert fitted.facts["rate"] == pytest.approx(1e-3 * (8 / 256) ** 0.5)  # type: ignore[attr-defined]
    assert "(0.1 epochs of 57 public pictures)" in fitted.summary


def test_total_variation_makes_guesses_smoother(target: Target) -> None:
    def roughness(weight: float) -> float:
        fitted = replace(SHORT, steps=60, learning_rate=5e-3, variation_weight=weight).fit(
            setting_of(target), public(), bench_of()
        )
        found = [one.pictures[0].pixels for one in fitted.reconstruct(seen(target), bench_of())]
        values = torch.tensor([list(one) for one in found]).view(-1, 8, 8, 3).float()
        return float(values.diff(dim=1).abs().mean() + values.diff(dim=2).abs().mean())

    assert roughness(0.1) < 0.7 * roughness(0.0)


def test_hashed_features_learn_too(target: Target) -> None:
    attack = replace(
        SHORT, steps=100, training_batch=32, width=64, learning_rate=3e-3, fraction=0.3, signed=True
    )
    fitted = attack.fit(setting_of(target), public(400), bench_of())
    assert fitted.facts["features"] == round(0.3 * 968)  # type: ignore[attr-defined]
    assert fitted.facts["held_out_error"] < 0.03  # type: ignore[attr-defined]


@pytest.mark.parametrize("directions", [None, 4])
def test_inverters_side_by_side_learn_what_each_would_learn_alone(directions: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.rand(shape, generator=generator) for shape in ((2, 5, 7), (2, 5, 1, 1, 2, 2))]
    labels = torch.randint(3, (2, 5, 1), generator=generator)

    def slopes(kept: slice) -> list[torch.Tensor]:
        torch.manual_seed(0)
        features, pixels, truth = (part[kept] for part in (*drawn, labels))
        model = PictureNetwork(
            7, directions, [6, 6], (1, 2, 2), 1, 3, variation_weight=0.1, inverters=len(truth)
        )
        model.start_from(torch.full((1, 2, 2), 0.5))
        for inverter, clients in enumerate(features):
            model.measure(clients, [3, 4], inverter=inverter)
        loss = model.sum_errors(model.compare(features, pixels, truth, torch.float32))
        return list(torch.autograd.grad(loss, list(model.parameters())))

    for both, first, second in zip(
        *(slopes(kept) for kept in (slice(0, 2), slice(0, 1), slice(1, 2))), strict=True
    ):
        torch.testing.assert_close(both, torch.cat([first, second]))


def test_a_picture_counts_in_the_slot_that_is_nearest_to_it() -> None:
    model = PictureNetwork(3, None, [4], (1, 2, 2), 2, 3)
    features, labels = torch.zeros(1, 1, 3), torch.zeros(1, 1, 2).long()
    with torch.no_grad():
        model.pixels.bias.copy_(torch.tensor([0.0] * 4 + [1.0] * 4))
    pixels = torch.tensor([1.0] * 4 + [0.0] * 4).view(1, 1, 2, 1, 2, 2)
    errors = model.compare(features, pixels, labels, torch.float32)
    assert float(errors.squared.detach()) < 1e-12


@pytest.mark.parametrize("clients", [12, 60], ids=["fewer than features", "more"])
def test_decorrelated_features_are_uncorrelated_with_spreads_evened_out(clients: int) -> None:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(20, 20, generator=generator)
    features = (
        5 + torch.randn(clients, 20, generator=generator) * torch.logspace(0, -2, 20) @ mixing
    )
    centre, turn = decorrelate(features, [8, 12], 9)
    turned = (features - centre) @ turn
    covariance = turned.mT @ turned / clients
    variances = covariance.diagonal()
    assert float((covariance - variances.diag()).abs().max()) < 1e-3 * float(variances.max())
    assert float(variances.mean()) == pytest.approx(1, rel=1e-3)
    plain = (features - centre) * find_scale(features, [8, 12])
    strongest = torch.linalg.eigvalsh(plain.mT @ plain / clients).flip(0)[:9]
    torch.testing.assert_close(
        variances / variances[0], (strongest / strongest[0]).sqrt(), rtol=1e-2, atol=1e-3
    )
    # There are no more directions than clients
    assert not decorrelate(features[:4], None, 9)[1][:, 4:].any()


def test_under_noise_directions_are_those_that_stand_out_of_it() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(400, 4, generator=generator) * torch.tensor([3.0, 1.0, 2.0, 0.01])
    noise = torch.tensor([10.0, 0.1, 0.1, 0.1])  # which hides the first and dwarfs the last
    _, turn = decorrelate(features, [4], 2, noise)
    used = turn.square().sum(1).sqrt()
    assert float(used[[0, 3]].max()) < 0.05 * float(used[[1, 2]].min())
    noisy = (features + noise * torch.randn(400, 4, generator=generator)) @ turn
    assert float(noisy.square().mean()) == pytest.approx(1, rel=0.2)


def test_a_feature_that_never_moves_says_nothing() -> None:
    features = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    features[:, 1] = 0.5
    assert decorrelate(features, None, 2)[1].isfinite().all()
    assert find_scale(features, None)[1] == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "needs public pictures"),
        (public(2), "2 public pictures are too few"),
        (Shapes("public", 16).load(4), r"A public picture has shape \(16, 16, 3\)"),
        ([replace(one, label=7) for one in public(4)], "labels outside the 4 classes"),
    ],
)
def test_nothing_fit_to_learn_from_is_refused(
    target: Target, given: list[Example], message: str
) -> None:
    with pytest.raises(GradleakError, match=message):
        SHORT.fit(setting_of(target), given, bench_of())


def test_pictures_are_mirrored_and_relabelled_by_the_share_asked_for(target: Target) -> None:
    gallery = read_pictures(target, public(1))
    generator = torch.Generator().manual_seed(0)
    drawn = ChangedPictures(gallery, 4, relabelled=0.4, mirrored=True).draw(2000, 1, generator)
    assert drawn.pixels is not None
    same = (drawn.pixels[:, 0] == gallery.batch(1).pixels[0, 0]).flatten(1).all(1)  # type: ignore[index]
    turned = (drawn.pixels[:, 0] == gallery.batch(1).pixels[0, 0].flip(-1)).flatten(1).all(1)  # type: ignore[index]
    assert bool((same | turned).all()) and float(turned.float().mean()) == pytest.approx(
        0.5, abs=0.05
    )
    other = (drawn.labels[:, 0] != gallery.labels[0]).float().mean()
    assert float(other) == pytest.approx(0.4 * 3 / 4, abs=0.05)
    plain = ChangedPictures(gallery, 4).draw(5, 1, generator)
    assert bool((plain.labels == gallery.labels[0]).all())


def test_pictures_are_moved_by_a_few_pixels_and_keep_their_edge(target: Target) -> None:
    gallery = read_pictures(target, public(1))
    generator = torch.Generator().manual_seed(0)
    drawn = ChangedPictures(gallery, 4, shifted=1).draw(200, 1, generator).pixels
    whole = gallery.batch(1).pixels
    assert drawn is not None and whole is not None
    padded = F.pad(whole[0], (1, 1, 1, 1), mode="replicate")[0]
    side = whole.shape[-1]
    moved = torch.stack(
        [
            padded[:, row : row + side, column : column + side]
            for row in range(3)
            for column in range(3)
        ]
    )
    alike = (drawn[:, 0, None] == moved).flatten(2).all(2)
    # One of the nine each time, and each of them some time
    assert bool(alike.any(1).all()) and bool(alike.any(0).all())


def test_a_field_out_of_range_is_refused() -> None:
    refused = {
        "width": (0, "must be 1 or more"),
        "epochs": (0.0, "must be above 0"),
        "shifted": (-1, "must be 0 or more"),
        "decay": (1.5, "must be from 0 to 1"),
        "variation_weight": (-1.0, "must be 0 or more"),
    }
    for field, (value, message) in refused.items():
        with pytest.raises(GradleakError, match=f"{field} {message}"):
            from_string("attack", f"lti_pictures:{field}={value}")
        with pytest.raises(GradleakError, match=f"{field} {message}"):
            LtiPictures(**{field: value}).describe_learning()
