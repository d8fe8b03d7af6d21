"""Audits of pictures from end to end."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pack_pictures import write_npz

from gradleak.audit import AuditSpec, run_audit
from gradleak.cli.main import main
from gradleak.core.errors import GradleakError
from gradleak.datasets.picture_sets import Pictures
from gradleak.records import png
from gradleak.records.store import read_record

PLAIN = {"target": "tiny_image", "data": "shapes:side=8", "limit": 3}
QUICK = "ig:steps=120,variation_weight=0.001"


def audited(**changes: Any) -> Any:
    return run_audit(AuditSpec.from_plain({**PLAIN, **changes})).record


@pytest.mark.parametrize(
    ("defenses", "attack", "share"),
    [
        ([], QUICK, 0.2),
        (["pruning:fraction_kept=0.2"], QUICK, 0.6),
        (["gaussian_noise:std=0.005"], "ig:steps=120,variation_weight=0.01", 0.6),
        (["sign"], "ig:steps=120,variation_weight=0.01", 0.95),
    ],
    ids=["none", "pruning", "noise", "sign"],
)
def test_ig_beats_the_mean_picture_through_each_defense(
    defenses: list[str], attack: str, share: float
) -> None:
    score = audited(defenses=defenses, attacks=[attack]).attacks["ig"].scores["mse"]
    assert score.mean < share * score.blind
    assert score.direction == "lower" and score.n == 3


def test_the_attack_that_ignores_signs_does_worse_than_the_one_that_knows_of_them() -> None:
    knows, ignores = (
        audited(defenses=["sign"], attacks=[f"ig:steps=120,variation_weight=0.01,adaptive={word}"])
        for word in ("true", "false")
    )
    assert knows.attacks["ig"].scores["mse"].mean < ignores.attacks["ig"].scores["mse"].mean
    assert "not_adaptive" in {flag.name for flag in ignores.attacks["ig"].flags}


def test_labels_are_read_off_the_update_and_two_pictures_told_apart() -> None:
    record = audited(
        attacks=["ig:steps=120,variation_weight=0.001,labels=derived"], know=["batch_size"], limit=2
    )
    assert record.attacks["ig"].scores["mse"].mean < 0.2 * record.attacks["ig"].scores["mse"].blind
    labels = [found for found in record.findings if found.name == "labels"]
    assert len(labels) == 2 and all(found.recall == 1 and found.exact for found in labels)
    pair = audited(batch_size=2, limit=1, attacks=[QUICK]).attacks["ig"].scores["mse"]
    assert pair.n == 2 and pair.mean < pair.blind


def test_blind_is_the_mean_of_public_pictures_and_grey_where_there_are_none(tmp_path: Path) -> None:
    assert AuditSpec.from_plain(PLAIN).prior.data == "shapes:part=public,side=8"  # type: ignore[union-attr]
    path = tmp_path / "dark.npz"
    dark = np.random.default_rng(0).integers(0, 100, (6, 8, 8, 3), dtype=np.uint8)
    write_npz(path, Pictures(dark, np.zeros(6, dtype=np.int64)))
    data = f"pictures:path={path}"
    own, mean = (
        audited(data=data, attacks=["blind"], prior=prior)
        for prior in ("auto", {"name": "mean_picture", "data": data})
    )
    assert own.spec["prior"] == {"name": "grey"}
    assert mean.worst_case["mse"].mean < own.worst_case["mse"].mean


def test_gi_gip_asks_for_a_generator() -> None:
    with pytest.raises(
        GradleakError, match="gi_gip needs a generator: make one with gradleak prior pictures"
    ):
        audited(attacks=["gi_gip"])


def test_guesses_are_kept_as_pictures_and_secrets_only_when_asked(tmp_path: Path) -> None:
    spec = AuditSpec.from_plain({**PLAIN, "attacks": ["blind"], "limit": 2})
    record = read_record(run_audit(spec, out=tmp_path).path)
    assert png.from_data_uri(record.attacks["blind"].examples[0].guess).shape == (8, 8, 3)
    assert "data:image" not in json.dumps(record.to_json()["secrets"])
    kept = run_audit(spec, out=tmp_path, keep_secrets=True)
    secret = kept.private[0].examples[0].content
    assert png.from_data_uri(kept.record.secrets[0].text).data == secret.pixels


def test_an_interrupted_audit_of_pictures_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradleak.audit import runner
    from gradleak.audit.group import AuditGroup

    spec = AuditSpec.from_plain({**PLAIN, "attacks": [QUICK.replace("120", "20")], "limit": 2})
    monkeypatch.setattr(runner, "write_record", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_audit(spec, out=tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(AuditGroup, "_attack", lambda *_: pytest.fail("it was attacked already"))
    assert run_audit(spec, out=tmp_path).record.attacks["ig"].scores["mse"].n == 2


def test_the_command_prints_scores_and_draws_made_up_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--target",
        "tiny_image",
        "--data",
        "shapes:side=8",
        "--attack",
        "ig:steps=20",
        "--limit",
        "2",
        "--device",
        "cpu",
    ]
    assert main(["audit", *words, "--out", str(tmp_path), "--keep-secrets"]) == 0
    said = capsys.readouterr().out
    assert "psnr" in said and "data:image" not in said
    (drawn,) = tmp_path.glob("*-1-ig.png")
    content = drawn.read_bytes()
    assert png.read(content).shape[0] == 2 * (64 + 2)
    drawn.unlink()
    (record,) = tmp_path.glob("*.json")
    assert main(["show", str(record), "--pictures"]) == 0
    assert drawn.read_bytes() == content
