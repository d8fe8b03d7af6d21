"""A classifier of made-up pictures, trained, and read back as a target."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pack_pictures import write_npz

from gradleak.cli.main import main
from gradleak.datasets.picture_sets import Pictures
from gradleak.targets import resolve_target


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Pictures of four shades, one a class."""
    labels = np.arange(160) % 4
    noise = np.random.default_rng(0).integers(0, 60, (160, 8, 8, 3))
    write_npz(
        tmp_path / "shades.npz",
        Pictures((noise + 60 * labels[:, None, None, None]).astype(np.uint8), labels),
    )
    return [
        "finetune",
        "--target",
        "tiny_image",
        "--data",
        f"pictures:path={tmp_path / 'shades.npz'}",
        "--device",
        "cpu",
    ]


def test_training_leaves_the_target_alone_and_writes_weights_that_know_the_task(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trained.safetensors"
    assert main([*words, "--epochs", "15", "--learning-rate", "0.02", "--out", str(out)]) == 0
    # Of four classes, 16 held out
    assert float(capsys.readouterr().out.split("accuracy ")[1].split(",")[0]) > 0.7
    trained, fresh = (
        resolve_target(line).open(torch.device("cpu"))
        for line in (f"tiny_image:weights={out}", "tiny_image")
    )
    assert not any(
        torch.equal(value, fresh.parameters[name]) for name, value in trained.parameters.items()
    )


def test_what_cannot_be_done_is_said(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--defense", "sign", "--out", str(tmp_path / "a")]) == 2
    assert main([*words, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "leave --defense" in said and "must be a file" in said
