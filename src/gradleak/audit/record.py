"""The record of an audit: what attacks did, scored, and what is said beside them.

That is what updates say outright, how large noise is, what defenses prove, and where it all comes
from.
"""

import functools
import math
import os
import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from gradleak.attacks.evidence import Evidence, findings
from gradleak.audit.client import AuditInput, stream_of
from gradleak.audit.outcomes import AuditResult, NoiseRatios
from gradleak.audit.scoring import score_attack, show_content, worst_case
from gradleak.audit.spec import AuditSpec
from gradleak.core.batch import Example, PrivateBatch
from gradleak.core.defense import Defense, channel_of, protect_in_turn
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.plugins import list_sources
from gradleak.core.specs import to_string
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.records.schema import (
    DataRecord,
    FindingRecord,
    GuaranteeRecord,
    NoiseRecord,
    Record,
    SecretRecord,
    TargetRecord,
    now,
)
from gradleak.records.store import SecretKey, keyed_hash

# Findings whose values are no tokens. Of words only counts and shares are kept: a bag is like a
# guess.
WITHOUT_WORDS = ("labels", "longest_length", "distinct_tokens")
ALL = ""
# Flags of the audit, not of one attack
OF_THE_WHOLE = ("few_examples", "dead_gradient", "one_draw", "seen_before_defense")
PACKAGES = ("gradleak", "torch", "transformers", "numpy", "rouge-score")


def record_of(
    member: AuditInput,
    result: AuditResult,
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
            show_content(example.content) if keep else None,
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
    return found | {f"plugin {name}": source for name, source in list_sources().items()}


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


def finding_records(
    observations: Sequence[Observation], private: Sequence[PrivateBatch]
) -> list[FindingRecord]:
    """Everything that can be read off the updates, each with how much of it is true."""
    return [
        _finding_record(seen, private[seen.index], found)
        for seen in observations
        for found in findings(seen)
    ]


def _finding_record(
    observation: Observation, private: PrivateBatch, found: Evidence
) -> FindingRecord:
    truth = _truth(observation, private).get(found.name)
    right = None if truth is None else (truth & Counter(found.values)).total()
    return FindingRecord(
        batch=observation.index,
        name=found.name,
        exact=found.exact,
        source=found.source,
        count=len(found.values),
        values=found.values if found.name in WITHOUT_WORDS else (),
        recall=_share(right, truth.total() if truth is not None else 0),
        precision=_share(right, len(found.values)),
    )


def _truth(observation: Observation, private: PrivateBatch) -> dict[str, Counter[int]]:
    """What would have been right to say, by name of the finding; a set of tokens has each once."""
    if private.batch.ids is None:
        return {"labels": Counter(private.batch.labels.tolist())}
    tokens = {
        token
        for row, length in zip(private.batch.ids.tolist(), private.lengths, strict=True)
        for token in row[:length]
    }
    target = observation.target
    words, hidden = target.vocabulary, target.labels_are_tokens or target.labels_are_open
    special = tokens & {*words.specials, *words.prefix, *words.suffix, words.pad}
    labels = () if hidden else private.batch.labels.tolist()
    return {
        "labels": Counter(labels),
        "longest_length": Counter([max(private.lengths)]),
        "bag_of_words": Counter(tokens - special),
        "special_tokens": Counter(special),
    }


def _share(right: int | None, total: int) -> float | None:
    return None if right is None or not total else right / total


def noise_ratios(
    spec: AuditSpec, target: Target, private: PrivateBatch, computed: Update, index: int
) -> NoiseRatios:
    """The expected norm of the noise over the norm of what would have been seen without it;
    nothing where there is no noise."""
    std = channel_of(spec.defenses).noise_std_for(len(private.examples))
    if not std:
        return {}
    silent = [defense.without_noise() for defense in spec.defenses]
    quiet = protect_in_turn(silent, computed, [stream_of(spec, index)])
    seen = spec.view.show(target, quiet).tensors
    squares = {name: float(tensor.double().square().sum()) for name, tensor in seen.items()}
    entries = {name: tensor[0].numel() for name, tensor in seen.items()}
    ratios = {
        name: std * math.sqrt(entries[name] / squares[name]) if squares[name] else math.inf
        for name in seen
    }
    return ratios | {
        ALL: std * math.sqrt(sum(entries.values()) / max(sum(squares.values()), 1e-300))
    }


def noise_record(ratios: Sequence[NoiseRatios]) -> NoiseRecord | None:
    """Over all batches: the median, the least and the most, and each tensor's median."""
    if not ratios or not ratios[0]:
        return None
    overall = [one[ALL] for one in ratios]
    by_tensor = {name: median(one[name] for one in ratios) for name in ratios[0] if name != ALL}
    finite = {name: value if math.isfinite(value) else None for name, value in by_tensor.items()}
    return NoiseRecord(median(overall), min(overall), max(overall), finite, tuple(overall))


def accounting_refusal(defenses: tuple[Defense, ...]) -> GradleakError | None:
    """Why the guarantees cannot be told here, such as a library that is missing: known before
    anything is attacked."""
    try:
        guarantee_records(defenses)
    except GradleakError as error:
        return error
    return None


@functools.lru_cache(maxsize=256)
def guarantee_records(defenses: tuple[Defense, ...]) -> tuple[GuaranteeRecord, ...]:
    """Every reading of every defense, by its accountant's name."""
    return tuple(
        GuaranteeRecord(
            defense=defense.name,
            reading=one.reading,
            protects=one.protects,
            accountant=one.accountant,
            epsilon=one.epsilon,
            delta=one.delta,
            against_server=not defense.channel().after_server,
            epsilon_in_words=one.epsilon_in_words,
        )
        for defense in defenses
        for one in defense.guarantees()
    )
