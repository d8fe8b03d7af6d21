"""The command behind the curves, on made-up pictures."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ATTACK = "lti_pictures:steps=4,training_batch=8,width=8,directions=16,learning_rate=0.001"
WORDS = ["--target", "tiny_image", "--data", "shapes:side=8", "--attack", ATTACK, "--secrets", "10"]


@pytest.fixture(scope="module")
def curves() -> Any:
    path = Path(__file__).parents[1] / "benchmarks" / "inverter_curves.py"
    spec = importlib.util.spec_from_file_location("benchmarks_inverter_curves", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_figure_leaves_points_pictures_and_a_table(
    curves: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--figure", "shift", "--shares", "0,1", "--pictures", "60", "--out", str(tmp_path)]
    monkeypatch.setattr(curves, "TARGET_TRAINING", replace(curves.TARGET_TRAINING, epochs=1))
    monkeypatch.setattr("side_by_side.AT_ONCE", 128)
    monkeypatch.setattr("side_by_side.MEASURED", 128)
    monkeypatch.setattr(sys, "argv", ["inverter_curves.py", *WORDS, *words])
    curves.main()
    points = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    expected = [("none", "0"), ("none", "1"), ("sign", "0"), ("sign", "1")]
    assert [(point["defense"], point["place"]) for point in points] == expected
    assert all(low <= mean <= high for mean, low, high in (point["mse"] for point in points))
    assert all(point["target"].startswith("sha256:") for point in points)
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert sum(line.startswith(("| none", "| sign")) for line in lines) == 4
    assert all(0 < point["blind_mse"] < 0.5 for point in points)
    assert "<svg" in (tmp_path / "mse.svg").read_text() and (tmp_path / "psnr.svg").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--figure", "size", "--sizes", "9000"),
            "There are 2000 public pictures, fewer than 9000",
        ),
        (("--figure", "shift", "--pictures", "1900"), "asks for more than the"),
        (("--attack", "ig"), "--attack is lti_pictures with a learning_rate"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    curves: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["inverter_curves.py", *WORDS, *words, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=message):
        curves.main()


def test_a_mixture_has_the_share_it_is_asked_for(curves: Any) -> None:
    from gradleak.datasets.made_up import Shapes

    mixed = curves.mixture(Shapes("public", 8).load(400), 0.1, 100, 2)
    assert len(mixed) == 100
    assert sum(one.label < 2 for one in mixed) == 10
