"""Image classifiers: what they are, and what they refuse."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError
from gradleak.datasets.made_up import Shapes
from gradleak.targets import resolve_target

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("line", "parameters"),
    [("lenet", 15_826), ("resnet20", 272_282), ("resnet20:norm=fixed_batch", 272_282)],
)
def test_networks_have_the_published_sizes_and_the_same_weights_every_time(
    line: str, parameters: int
) -> None:
    first, second = (resolve_target(line).open(CPU) for _ in range(2))
    assert sum(value.numel() for value in first.parameters.values()) == parameters
    assert all(
        torch.equal(value, second.parameters[name]) for name, value in first.parameters.items()
    )
    assert {part.name for part in first.parts} == set(first.parameters)
    assert first.groups["head_bias"] == ("head.bias",)


def test_weights_come_from_a_file_that_fits(tmp_path: Path) -> None:
    target = resolve_target("lenet:seed=3").open(CPU)
    path = tmp_path / "trained.safetensors"
    save_file(dict(target.parameters), path)
    spec = resolve_target(f"lenet:weights={path}")
    assert all(
        torch.equal(value, target.parameters[name])
        for name, value in spec.open(CPU).parameters.items()
    )
    assert spec.fingerprint().startswith("sha256:")
    with pytest.raises(GradleakError, match="does not hold the weights of resnet20"):
        resolve_target(f"resnet20:weights={path}").open(CPU)
    with pytest.raises(GradleakError, match="There is no file"):
        resolve_target("lenet:weights=nowhere").open(CPU)


def test_a_module_of_ones_own_is_made_by_its_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192,"
        " 4))\n"
    )
    (tmp_path / "own_network.py").write_text(code + "\ndef wrong():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    described = "module:path='own_network:{}',classes=4,height=8,width=8"
    target = resolve_target(described.format("make")).open(CPU)
    assert target.private_batch(Shapes(side=8).load(2)).batch.pixels.shape == (2, 3, 8, 8)
    for function, message in (("wrong", "gave a int"), ("absent", "Cannot import")):
        with pytest.raises(GradleakError, match=message):
            resolve_target(described.format(function)).open(CPU)
    with pytest.raises(GradleakError, match="must give 7 scores"):
        resolve_target(described.format("make").replace("classes=4", "classes=7")).open(CPU)
    sys.modules.pop("own_network", None)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (Example("words", 0), "is text, and tiny_image reads pictures"),
        (Shapes(side=16).load(1)[0], r"has shape \(3, 16, 16\)"),
        (Example(Shapes(side=8).load(1)[0].content, 9), "has label 9"),
    ],
)
def test_what_a_target_cannot_read_is_refused(example: Example, message: str) -> None:
    with pytest.raises(GradleakError, match=message):
        resolve_target("tiny_image").open(CPU).private_batch([example])
