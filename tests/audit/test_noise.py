"""How large a defense's noise is beside what it hides, in the record and in a line."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gradleak.audit import AuditSpec, run_audit
from gradleak.audit.client import observe, private_batches, update_norm
from gradleak.records.schema import NoiseRecord, Record
from gradleak.report.verdict import describe_noise


def audited(**changes: Any) -> tuple[AuditSpec, Record]:
    plain = {
        "target": "tiny",
        "attacks": ["blind"],
        "limit": 3,
        "metrics": ["rouge1"],
        "prior": "frequent_words",
    }
    spec = AuditSpec.from_plain(plain | changes)
    return spec, run_audit(spec).record


def test_the_ratio_is_of_what_is_seen_and_by_tensor() -> None:
    view = {"name": "parts", "layers": "1", "modules": ["query", "ffn_in"]}
    spec, record = audited(view=view, defenses=["gaussian_noise:std=0.01"])
    clear, _ = audited(view=view)
    target = spec.target.open(torch.device("cpu"))
    seen = [
        observe(clear, target, batch, index)
        for index, batch in enumerate(private_batches(clear, target))
    ]
    entries = sum(tensor.numel() for tensor in seen[0].update.tensors.values())
    ratios = sorted(0.01 * entries**0.5 / update_norm(one) for one in seen)
    assert record.noise is not None
    assert (record.noise.least, record.noise.ratio, record.noise.most) == pytest.approx(
        tuple(ratios)
    )
    assert set(record.noise.by_tensor) == set(seen[0].update.tensors)
    told = describe_noise(record)
    assert told is not None and told.startswith(
        f"{record.noise.ratio:.3g} times the norm of what is seen"
    )


def test_clipping_comes_before_the_comparison_and_batches_share_their_noise() -> None:
    _, one = audited(defenses=["dp_sgd:clip=0.01,noise_multiplier=2"])
    _, two = audited(defenses=["dp_sgd:clip=0.01,noise_multiplier=2"], batch_size=2)
    spec, _ = audited()
    entries = sum(
        value.numel() for value in spec.target.open(torch.device("cpu")).parameters.values()
    )
    assert one.noise is not None and two.noise is not None
    # What is sent has the norm of clip
    assert one.noise.ratio == pytest.approx(2 * entries**0.5, rel=1e-4)
    # Half the noise, and two gradients of different labels partly cancel
    assert two.noise.ratio > one.noise.ratio / 2


def test_a_range_over_batches_is_told_only_where_its_ends_read_differently() -> None:
    _, record = audited()
    same, apart = (replace(record, noise=NoiseRecord(1.9, 1.9, most, {})) for most in (1.9001, 2.3))
    assert describe_noise(same) == "1.9 times the norm of what is seen"
    tensors = replace(record, noise=NoiseRecord(1.9, 1.9, 1.9, {"a": 0.12, "b": 1.04e7}))
    assert str(describe_noise(tensors)).endswith("; by tensor 0.12 to 10,000,000 times")
    assert (
        describe_noise(apart) == "1.9 times the norm of what is seen (1.9 to 2.3 over the batches)"
    )


@pytest.mark.parametrize(
    "defenses",
    [[], ["sign"], ["masking:fraction_zeroed=0.5"], ["gaussian_noise:std=0"], ["central_dp"]],
)
def test_where_nothing_adds_noise_to_what_is_seen_there_is_no_ratio(defenses: list[str]) -> None:
    _, record = audited(defenses=defenses)
    assert record.noise is None and describe_noise(record) is None
    assert Record.from_json(record.to_json()) == record
