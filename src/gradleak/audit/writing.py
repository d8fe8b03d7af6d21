"""The record of an audit that has been attacked: scores, flags, provenance."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gradleak.audit.circumstances import guarantee_records, noise_record
from gradleak.audit.group import Member, MemberResult
from gradleak.audit.picture_records import shown
from gradleak.audit.scoring import score_attack, worst_case
from gradleak.core.batch import Example, PrivateBatch
from gradleak.core.specs import to_string
from gradleak.core.target import Target
from gradleak.records.schema import DataRecord, Record, SecretRecord, TargetRecord, now
from gradleak.records.store import SecretKey, keyed_hash

# Flags of the audit, not of one attack
OF_THE_WHOLE = ("few_examples", "dead_gradient", "one_draw", "seen_before_defense")
PACKAGES = ("gradleak", "torch", "transformers", "numpy", "rouge-score")


def record_of(
    member: Member,
    result: MemberResult,
    target: Target,
    key: SecretKey,
    device: str,
    peak_memory: int | None,
    keep_secrets: bool,
) -> Record:
    """Returns the record of one audit: everything that came of it, scored."""
    spec, private = member.spec, member.private
    attacks = {
        name: score_attack(spec, target, attack, private, result.attacks[name], peak_memory)
        for name, attack in spec.attack_keys().items()
    }
    secrets = private[: len(private) // spec.draws]
    examples = [example for batch in secrets for example in batch.examples]
    raised = [
        flag for attack in attacks.values() for flag in attack.flags if flag.name in OF_THE_WHOLE
    ]
    return Record(
        created=now(),
        spec=spec.to_dict(),
        versions=_versions(),
        machine=_machine(device),
        data=DataRecord(
            data_hash(key, examples),
            len(secrets),
            len(examples),
            truncated=sum(cut > 0 for batch in secrets for cut in batch.dropped),
            remarks=member.remarks,
        ),
        target=TargetRecord(
            name=to_string(spec.target),
            fingerprint=spec.target.fingerprint(),
            parameters=sum(value.numel() for value in target.parameters.values()),
            visible_parameters=sum(part.size for part in member.visible(target)),
            model=target.in_words,
        ),
        secrets=_secrets(private, key, keep_secrets),
        attacks=attacks,
        worst_case=worst_case(spec, attacks),
        flags=tuple({flag.name: flag for flag in raised}.values()),
        findings=tuple(result.findings),
        guarantees=guarantee_records(spec.defenses),
        noise=noise_record(result.noise),
    )


def data_hash(key: SecretKey, examples: Sequence[Example]) -> str:
    """Tells whether two audits had the same data, to whoever holds the key."""
    return keyed_hash(key, "\n".join(f"{example.label}\t{example.as_text}" for example in examples))


def _secrets(
    private: Sequence[PrivateBatch], key: SecretKey, keep: bool
) -> tuple[SecretRecord, ...]:
    return tuple(
        SecretRecord(
            index,
            position,
            keyed_hash(key, example.as_text),
            tokens,
            shown(example.content) if keep else None,
            example.row,
        )
        for index, batch in enumerate(private)
        for position, (example, tokens) in enumerate(
            zip(batch.examples, batch.lengths, strict=True)
        )
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _machine(device: str) -> dict[str, Any]:
    name = (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else platform.processor() or platform.machine()
    )
    return {
        "device": device,
        "name": name,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
