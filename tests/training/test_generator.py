"""A generator trained on made-up pictures, and gi_gip with it."""

from pathlib import Path

import pytest
import torch

from gradleak.audit import AuditSpec, run_audit
from gradleak.cli.main import main
from gradleak.core.errors import GradleakError
from gradleak.datasets.made_up import Shapes
from gradleak.priors.picture_priors import load_generator
from gradleak.training.picture_models import GeneratorTraining, How, stack_pictures, train_generator


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generator") / "shapes.safetensors"
    settings = GeneratorTraining(latents=16, width=16, epochs=6)
    news = list(
        train_generator(
            settings, stack_pictures(Shapes("public", 8).load()), path, torch.device("cpu")
        )
    )
    assert news[-1]["mse"] < 0.8 * news[0]["mse"]
    return path


def test_the_same_weights_for_every_row_make_the_same_pictures(generator: Path) -> None:
    opened = load_generator(generator)
    latents = torch.randn(3, 2, opened.latents, generator=torch.Generator().manual_seed(0))
    own, given = opened.pictures(latents), opened.pictures(latents, opened.weights.expand(3, -1))
    torch.testing.assert_close(own, given)
    assert own.shape == (3, 2, 3, 8, 8) and bool(((own >= 0) & (own <= 1)).all())


@pytest.mark.parametrize("how", ["decoder", "gan"])
def test_training_is_repeatable(tmp_path: Path, how: How) -> None:
    settings, pictures = (
        GeneratorTraining(latents=4, width=4, epochs=1, how=how),
        stack_pictures(Shapes("public", 8).load(32)),
    )
    weights = []
    for name in ("a", "b"):
        list(train_generator(settings, pictures, tmp_path / name, torch.device("cpu")))
        weights.append(load_generator(tmp_path / name).weights)
    assert torch.equal(weights[0], weights[1])


def test_against_an_adversary_pictures_become_as_dark_as_real_ones(tmp_path: Path) -> None:
    # Dark ones, which no generator makes at its start
    real = 0.3 * stack_pictures(Shapes("public", 8).load(256))
    far = []
    for epochs in (1, 40):
        settings = GeneratorTraining(
            latents=8, width=8, epochs=epochs, batch_size=64, learning_rate=1e-3, how="gan"
        )
        news = list(train_generator(settings, real, tmp_path / "gan", torch.device("cpu")))
        assert 0 <= news[-1]["told_apart"] <= 1
        opened = load_generator(tmp_path / "gan")
        made = opened.pictures(torch.randn(512, 1, 8, generator=torch.Generator().manual_seed(0)))[
            :, 0
        ]
        moments = [torch.stack([some.mean(0), some.std(0)]) for some in (made, real)]
        far.append(float((moments[0] - moments[1]).square().mean()))
    assert far[1] < 0.3 * far[0]


@pytest.mark.parametrize(
    ("defenses", "share"), [([], 0.4), (["sign"], 0.9), (["pruning:fraction_kept=0.1"], 0.7)]
)
def test_gi_gip_beats_the_mean_picture(generator: Path, defenses: list[str], share: float) -> None:
    plain = {
        "target": "tiny_image",
        "data": "shapes:side=8",
        "limit": 3,
        "prior": f"generator:path={generator}",
    }
    attack = "gi_gip:latent_steps=50,weight_steps=80,restarts=1"
    score = run_audit(
        AuditSpec.from_plain({**plain, "defenses": defenses, "attacks": [attack]})
    ).record.worst_case["mse"]
    assert score.mean < share * score.blind


def test_the_command_trains_one_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "g.safetensors")
    words = [
        "prior",
        "pictures",
        "--out",
        out,
        "--limit",
        "32",
        "--latents",
        "4",
        "--width",
        "4",
        "--epochs",
        "1",
        "--device",
        "cpu",
    ]
    assert main([*words, "--data", "shapes:part=public,side=8"]) == 0
    assert f"--prior generator:path={out}" in capsys.readouterr().out
    assert main([*words, "--data", "canaries"]) == 2
    assert "learns from pictures" in capsys.readouterr().err
    (tmp_path / "broken").write_text("nothing")
    with pytest.raises(GradleakError, match="is no generator"):
        load_generator(tmp_path / "broken")
