"""A target and its prior sent as bytes give the records of those opened by name."""

import torch

from gradleak.audit import AuditSpec, run_audit
from gradleak.audit.runner import run_audits
from gradleak.records.plain import to_plain
from gradleak.study.ray_engine import pack, unpack

SPEC = AuditSpec.from_plain(
    {
        "target": "tiny",
        "data": "canaries",
        "attacks": ["dlg:steps=5"],
        "limit": 2,
        "prior": "frequent_words",
    }
)


def scores(record: object) -> object:
    plain = to_plain(record)
    return [
        (key, one["scores"], [example["values"] for example in one["examples"]])
        for key, one in plain["attacks"].items()
    ]


def test_what_was_packed_attacks_as_what_was_opened_by_name() -> None:
    target, prior = unpack(pack(SPEC), "cpu")
    (found,) = run_audits([SPEC], target=target, prior=prior)
    assert scores(found.record) == scores(run_audit(SPEC).record)  # type: ignore[union-attr]


def test_weights_are_still_the_models_own() -> None:
    target, _ = unpack(pack(SPEC), "cpu")
    own = {value.data_ptr() for value in target.module.parameters()}
    assert all(value.data_ptr() in own for value in target.parameters.values())
    assert target.vocabulary.embeddings.data_ptr() in own
    assert target.device == torch.device("cpu")
