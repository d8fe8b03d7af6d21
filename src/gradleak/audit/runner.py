"""Runs audits: client, attacks, objectives, scores, record.

Those that share a target and attacks run in one call, and one that an earlier run has answered
need not run again.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradleak.audit.client import AuditInput, private_batches, private_examples, remarks_on
from gradleak.audit.group import AuditGroup
from gradleak.audit.outcomes import CallParts, has_kept
from gradleak.audit.ready import Opened, open_prior, open_target
from gradleak.audit.record import accounting_refusal, data_hash, record_of
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Display, Silent, TrainableAttack
from gradleak.core.batch import PrivateBatch
from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError
from gradleak.core.specs import to_string
from gradleak.core.target import TargetSpec
from gradleak.records.files import full_disk_explained
from gradleak.records.schema import Record
from gradleak.records.store import SecretKey, check_writable, open_key, read_summary, write_record


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
    opened: Opened | None = None,
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
    if opened is None:
        display.say(f"Opening {to_string(specs[0].target)} on {device}")
        target = open_target(specs[0], device)
        display.say(f"It is a {target.in_words}.")
    else:
        target = opened.target
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
        members.append(AuditInput(spec, secrets[data] * spec.draws, remarks[data], refusal))
    # Parts belong to settings, a kind of device, the very data and the attacks' versions: an edited
    # file starts anew.
    data_hashes = [data_hash(key, loaded)[:16] for loaded in examples]
    versions = [attack.version for attack in specs[0].attacks]
    # Parts of attacks of a first version are called as they always were
    later = "".join(f"-v{one}" for one in versions) if max(versions) > 1 else ""
    name = f"{name_of(specs)}-{device.split(':')[0]}-{_join(data_hashes)}{later}"
    parts = CallParts(out, name, [spec.id for spec in specs])
    opened = opened or open_prior(specs[0], target)
    group = AuditGroup(members, opened, parts, display, memory)
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
    return (
        spec.target,
        spec.dtype,
        spec.attacks,
        spec.prior,
        spec.seed,
        spec.granted,
        spec.protocol,
        spec.batch_size,
        spec.id if spec.time_limit is not None or learns else None,
    )


def name_of(specs: Sequence[AuditSpec]) -> str:
    """Names audits that run in one call."""
    return _join([spec.id for spec in specs])


def has_parts(folder: Path, specs: Sequence[AuditSpec]) -> bool:
    """Whether an earlier call with these audits was cut, and left finished parts."""
    return has_kept(folder, f"{name_of(specs)}-")


def _join(hashes: Sequence[str]) -> str:
    unlike = list(dict.fromkeys(hashes))
    return (
        unlike[0]
        if len(unlike) == 1
        else hashlib.sha256(" ".join(unlike).encode()).hexdigest()[:16]
    )


class Inputs:
    """The data and the models of audits as they are now, by their hashes; audits of one folder
    mostly share theirs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._data, self._models = dict[tuple[Dataset, int, int], str](), dict[TargetSpec, str]()

    def data_hash(self, spec: AuditSpec) -> str:
        key = (spec.data, spec.limit, spec.batch_size)
        if key not in self._data:
            self._data[key] = data_hash(open_key(self.folder), private_examples(spec))
        return self._data[key]

    def fingerprint(self, spec: AuditSpec) -> str:
        if spec.target not in self._models:
            self._models[spec.target] = spec.target.fingerprint()
        return self._models[spec.target]


def find_record(folder: Path, spec: AuditSpec, inputs: Inputs) -> Record | None:
    """Returns the record of an audit, if there is a whole one and it is of the data, the model
    and the attacks' answers as they are now."""
    path = folder / f"{spec.id}.json"
    if not path.exists():
        return None
    summary = read_summary(path)
    record, keys = summary.record, spec.attack_keys().items()
    is_same = (
        summary.has_details
        and all(record.attacks[key].version == attack.version for key, attack in keys)
        and record.data.hash == inputs.data_hash(spec)
        and record.target.fingerprint == inputs.fingerprint(spec)
    )
    return summary.whole() if is_same else None
