"""Runs audits: client, attacks, objectives, scores, record. Those that share a target and
attacks run in one call."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gradleak.audit.circumstances import accounting_refusal
from gradleak.audit.client import private_batches, private_examples, remarks_on
from gradleak.audit.display import Display, Silent
from gradleak.audit.group import AuditGroup, Member
from gradleak.audit.outcomes import Parts, has_kept
from gradleak.audit.spec import AuditSpec
from gradleak.audit.writing import data_hash, record_of
from gradleak.core.batch import PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.core.prior import AnyPrior
from gradleak.core.specs import to_string
from gradleak.core.target import Target
from gradleak.core.trainable import TrainableAttack
from gradleak.records.errors import full_disk_explained
from gradleak.records.schema import Record
from gradleak.records.store import SecretKey, check_writable, open_key, write_record


@dataclass(frozen=True)
class Finished:
    """A record, where it lies, and the secrets it is about (which the record itself does not
    hold)."""

    record: Record
    path: Path | None
    private: tuple[PrivateBatch, ...]


def run_audit(
    spec: AuditSpec,
    *,
    device: str = "cpu",
    memory: int | None = None,
    out: Path | None = None,
    keep_secrets: bool = False,
    display: Display | None = None,
    key: SecretKey | None = None,
) -> Finished:
    """Audits one member. With `out`, the record is written there, and finished parts survive an
    interruption.

    Hashes are keyed by the folder's key; where the record is written elsewhere, by whoever asked
    for it, by theirs. `memory` is what the process may hold on the device, in bytes; how much it is
    changes no id.
    """
    (finished,) = run_audits(
        [spec],
        device=device,
        memory=memory,
        out=out,
        keep_secrets=keep_secrets,
        display=display,
        key=key,
    )
    if isinstance(finished, GradleakError):
        raise finished
    return finished


def run_audits(
    specs: Sequence[AuditSpec],
    *,
    device: str = "cpu",
    memory: int | None = None,
    out: Path | None = None,
    keep_secrets: bool = False,
    display: Display | None = None,
    target: Target | None = None,
    prior: AnyPrior | None = None,
    key: SecretKey | None = None,
) -> list[Finished | GradleakError]:
    """Audits settings of one group key in one call; of several, one that cannot be attacked
    gives its error and no record."""
    if len({group_key(spec) for spec in specs}) > 1:
        raise GradleakError(
            "These audits cannot run in one call: target, attacks, prior, seed and knowledge must"
            " be the same."
        )
    display = display or Silent()
    if out is not None:
        check_writable(out)
    if key is None:
        key = SecretKey(os.urandom(32)) if out is None else open_key(out)
    examples = [private_examples(spec) for spec in specs]
    if target is None:
        display.say(f"Opening {to_string(specs[0].target)} on {device}")
        target = specs[0].target.open(torch.device(device), getattr(torch, specs[0].dtype))
        display.say(f"It is a {target.in_words}.")
    # Views of one update share its secret
    secrets: dict[tuple[object, ...], list[PrivateBatch]] = {}
    remarks: dict[tuple[object, ...], tuple[str, ...]] = {}
    members = []
    for spec, loaded in zip(specs, examples, strict=True):
        data = (spec.data, spec.limit, spec.batch_size, spec.truncate)
        if data not in secrets:
            secrets[data] = private_batches(spec, target, loaded)
            remarks[data] = remarks_on(spec, secrets[data])
            for sentence in remarks[data]:
                display.say(sentence)
        refusal = accounting_refusal(spec.defenses)
        members.append(Member(spec, secrets[data] * spec.draws, remarks[data], refusal))
    # Parts belong to settings, a kind of device, the very data and the attacks' versions: an edited
    # file starts anew.
    data_hashes = [data_hash(key, loaded)[:16] for loaded in examples]
    versions = (
        "".join(f"-v{attack.version}" for attack in specs[0].attacks)
        if _has_changed(specs[0])
        else ""
    )
    name = f"{name_of(specs)}-{device.split(':')[0]}-{_joined(data_hashes)}{versions}"
    parts = Parts(out, name, [spec.id for spec in specs])
    group = AuditGroup(members, target, parts, display, prior, memory)
    with full_disk_explained(f"keep finished parts in {out}"):
        group.attack_all()
    results: list[Finished | GradleakError] = []
    for member, result in zip(members, group.results, strict=True):
        if result.refusal is not None:
            results.append(result.refusal)
            continue
        record = record_of(member, result, target, key, device, group.peak_memory, keep_secrets)
        path = None if out is None else write_record(out, record)
        results.append(Finished(record, path, tuple(member.private)))
    parts.clear()
    return results


def group_key(spec: AuditSpec) -> tuple[object, ...]:
    """What audits that run in one call have in common. Under a time limit every one runs alone,
    and so does what learns first."""
    learns = any(isinstance(attack, TrainableAttack) for attack in spec.attacks)
    alone = spec.id if spec.time_limit is not None or learns else None
    return (
        spec.target,
        spec.dtype,
        spec.attacks,
        spec.prior,
        spec.seed,
        spec.granted,
        spec.protocol,
        spec.batch_size,
        alone,
    )


def name_of(specs: Sequence[AuditSpec]) -> str:
    """Names audits that run in one call."""
    return _joined([spec.id for spec in specs])


def has_parts(folder: Path, specs: Sequence[AuditSpec]) -> bool:
    """Whether an earlier call with these audits was cut, and left finished parts."""
    return has_kept(folder, f"{name_of(specs)}-")


def _has_changed(spec: AuditSpec) -> bool:
    """Whether an attack has a later version: parts of the first ones are called as they always
    were."""
    return any(attack.version > 1 for attack in spec.attacks)


def _joined(hashes: Sequence[str]) -> str:
    unlike = list(dict.fromkeys(hashes))
    return (
        unlike[0]
        if len(unlike) == 1
        else hashlib.sha256(" ".join(unlike).encode()).hexdigest()[:16]
    )
