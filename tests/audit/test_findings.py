"""What updates say outright, in the record: how much and how right, never which words."""

import json
from typing import Any

import pytest

from gradleak.audit import AuditSpec, run_audit
from gradleak.records.schema import FindingRecord, Record

Found = dict[str, list[FindingRecord]]


def audited(**changes: Any) -> tuple[Record, Found]:
    spec = AuditSpec.from_plain(
        {"target": "tiny", "limit": 2, "attacks": ["tag:steps=1"]} | changes
    )
    record = run_audit(spec).record
    found: Found = {}
    for one in record.findings:
        found.setdefault(one.name, []).append(one)
    return record, found


def test_words_are_counted_and_held_against_the_truth_but_not_kept() -> None:
    record, found = audited()
    assert [(one.batch, one.recall, one.precision, one.exact) for one in found["bag_of_words"]] == [
        (0, 1.0, 1.0, True),
        (1, 1.0, 1.0, True),
    ]
    assert all(one.count > 5 for one in found["bag_of_words"])
    assert all(one.values == () for one in found["bag_of_words"] + found["special_tokens"])
    assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_labels_and_lengths_are_kept_since_they_are_no_words() -> None:
    record, found = audited()
    assert [one.values for one in found["longest_length"]] == [
        (secret.tokens,) for secret in record.secrets
    ]
    assert all(
        one.recall == one.precision == 1.0 for one in found["labels"] + found["longest_length"]
    )


def test_a_view_that_shows_nothing_outright_has_no_findings() -> None:
    assert audited(view="parts:layers=2,modules=[query]")[0].findings == ()


def test_an_estimate_is_said_to_be_one_and_scored() -> None:
    _, found = audited(target="tiny_causal", limit=1)
    (bag,) = found["bag_of_words"]
    assert not bag.exact
    assert bag.recall is not None and bag.precision is not None
    assert 0 < bag.recall <= 1
    assert 0 < bag.precision <= 1


@pytest.mark.parametrize("noise", [0.0, 10.0])
def test_noise_hides_the_words(noise: float) -> None:
    _, found = audited(defenses=[f"gaussian_noise:std={noise}"])
    bag, _ = found["bag_of_words"]
    assert bag.exact is (noise == 0.0)
    assert ((bag.recall or 0.0) == 1.0) is (noise == 0.0)
