"""Audits in one call: the same records as alone, and none disturbs another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.audit import AuditSpec, group, run_audit
from gradleak.audit.client import AuditInput, observe, private_batches
from gradleak.audit.group import AuditGroup
from gradleak.audit.outcomes import CallParts
from gradleak.audit.ready import open_prior
from gradleak.audit.runner import Finished, has_parts, run_audits
from gradleak.core.attack import Silent
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target

ATTACKS = ["tag:steps=3", "lamp_cos:steps=3,starts=2"]


def settings(**changes: Any) -> AuditSpec:
    plain = {
        "target": "tiny",
        "attacks": ATTACKS,
        "limit": 2,
        "prior": "frequent_words",
        "dtype": "float64",
    }
    return AuditSpec.from_plain(plain | {"metrics": ["rouge1", "exact_match"]} | changes)


DIFFERENT = [
    settings(),
    settings(limit=1),
    settings(view="lamp"),
    settings(defenses=["gaussian_noise:std=0.01"], draws=2),
    settings(defenses=["gaussian_noise:std=0.1"]),
    settings(defenses=["sign"]),
    settings(
        view={"name": "parts", "layers": "2", "modules": ["query"]},
        defenses=["pruning:fraction_kept=0.1"],
    ),
]


def test_audits_in_one_call_are_the_audits_alone() -> None:
    for spec, found in zip(DIFFERENT, run_audits(DIFFERENT), strict=True):
        alone = run_audit(spec).record
        assert isinstance(found, Finished)
        assert found.record.spec == alone.spec and found.record.data.batches == alone.data.batches
        assert found.record.findings == alone.findings and found.record.flags == alone.flags
        for key, ours in found.record.attacks.items():
            theirs = alone.attacks[key]
            assert ours.examples == theirs.examples
            for one, other in zip(ours.batches, theirs.batches, strict=True):
                assert (one.loss, one.objective_at_truth) == pytest.approx(
                    (other.loss, other.objective_at_truth)
                )


def test_every_setting_sees_what_it_would_see_alone(tiny64: Target) -> None:
    private = private_batches(DIFFERENT[0], tiny64)
    held = [AuditInput(spec, (private[: spec.limit]) * spec.draws) for spec in DIFFERENT]
    audits = AuditGroup(held, open_prior(DIFFERENT[0], tiny64), CallParts(None, ""), Silent())
    seen = audits._observe(range(audits.stride))
    assert (
        len({one.index for one in seen})
        == len(seen)
        == sum(len(setting.private) for setting in held)
    )
    for one in seen:
        spec, batch = held[one.index // audits.stride].spec, one.index % audits.stride
        alone = observe(spec, tiny64, held[one.index // audits.stride].private[batch], batch)
        assert list(one.update.tensors) == list(alone.update.tensors)
        assert all(
            torch.equal(tensor, alone.update.tensors[name])
            for name, tensor in one.update.tensors.items()
        )


def test_one_that_cannot_be_attacked_leaves_the_others_alone() -> None:
    useless = settings(view={"name": "parts", "modules": ["word_embedding"]})
    good, bad = run_audits([settings(), useless])
    assert isinstance(good, Finished) and isinstance(bad, GradleakError)
    assert "Nothing in the visible update can be matched" in str(bad)
    with pytest.raises(GradleakError, match="Nothing in the visible update can be matched"):
        run_audit(useless)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"batch_size": 2},
        {"know": ["labels", "lengths", "batch_size"]},
        {"time_limit": 5.0},
    ],
)
def test_audits_of_different_group_keys_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(GradleakError, match="cannot run in one call"):
        run_audits([settings(), settings(**other)])


def test_a_call_that_was_cut_goes_on_from_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [replace(spec, attacks=DIFFERENT[0].attacks) for spec in DIFFERENT[:3]]
    undisturbed = run_audits(specs)
    lamp = type(specs[0].attacks[1])
    with monkeypatch.context() as cut:
        cut.setattr(lamp, "reconstruct", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_audits(specs, out=tmp_path)
    assert has_parts(tmp_path, specs) and not has_parts(tmp_path, specs[:2])
    # finished: must not run again
    monkeypatch.setattr(type(specs[0].attacks[0]), "reconstruct", _interrupted)
    for whole, resumed in zip(undisturbed, run_audits(specs, out=tmp_path), strict=True):
        assert isinstance(whole, Finished) and isinstance(resumed, Finished)
        assert {key: one.examples for key, one in whole.record.attacks.items()} == {
            key: one.examples for key, one in resumed.record.attacks.items()
        }
    assert not has_parts(tmp_path, specs)


def _interrupted(*given: object) -> None:
    raise KeyboardInterrupt


def test_a_call_that_was_cut_at_the_objectives_attacks_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "UPDATES_IN_MEMORY", 1)  # a group for each batch
    undisturbed = run_audits([settings()])[0]
    with monkeypatch.context() as cut:
        cut.setattr(group, "objectives", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_audits([settings()], out=tmp_path)
    assert has_parts(tmp_path, [settings()])
    for attack in settings().attacks:
        monkeypatch.setattr(type(attack), "reconstruct", _interrupted)
    resumed = run_audits([settings()], out=tmp_path)[0]
    assert isinstance(undisturbed, Finished) and isinstance(resumed, Finished)
    for key, whole in undisturbed.record.attacks.items():
        for one, other in zip(whole.batches, resumed.record.attacks[key].batches, strict=True):
            assert one.objective_at_truth is not None and one.objective_at_guess is not None
            assert one.objective_at_truth == pytest.approx(other.objective_at_truth, abs=1e-9)
            assert one.objective_at_guess == pytest.approx(other.objective_at_guess, abs=1e-9)


def test_groups_make_no_difference_to_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [settings(), settings(defenses=["gaussian_noise:std=0.01"], draws=2)]
    at_once = run_audits(specs)
    monkeypatch.setattr(group, "UPDATES_IN_MEMORY", 1)
    for one, other in zip(at_once, run_audits(specs), strict=True):
        assert isinstance(one, Finished) and isinstance(other, Finished)
        assert one.record.findings == other.record.findings and len(one.record.findings) > 0
        for key, ours in one.record.attacks.items():
            theirs = other.record.attacks[key].batches
            found = [(batch.batch, batch.objective_at_truth) for batch in ours.batches]
            assert found == [
                (batch.batch, pytest.approx(batch.objective_at_truth, abs=1e-9)) for batch in theirs
            ]
