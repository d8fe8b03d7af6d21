"""Runs one audit: client, attacks, objectives, scores, record."""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from gradleak.attacks.blind import Blind
from gradleak.audit.client import observe, private_batches, private_examples, update_norm
from gradleak.audit.display import Display, Silent
from gradleak.audit.findings import finding_records
from gradleak.audit.guarantees import guarantee_records
from gradleak.audit.objectives import objectives
from gradleak.audit.outcomes import Outcome, Parts
from gradleak.audit.pictures import shown
from gradleak.audit.scoring import worst_case
from gradleak.audit.spec import AuditSpec
from gradleak.audit.stages import score_with_stages
from gradleak.core.attack import Attack, Bench, Progress
from gradleak.core.batch import Example, PrivateBatch
from gradleak.core.observation import Fact, Observation
from gradleak.core.prior import NoWords, PicturePriorSpec, Prior, PriorSpec
from gradleak.core.specs import to_string
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.records.schema import DataRecord, FindingRecord, Record, SecretRecord, TargetRecord, now
from gradleak.records.store import SecretKey, check_writable, keyed_hash, open_key, write_record

OF_THE_WHOLE = ("few_examples", "dead_gradient", "one_draw", "seen_before_defense")  # flags of the audit, not of one attack
UPDATES_IN_MEMORY = 4 * 2**30  # bytes of visible updates held at once on a CPU


@dataclass(frozen=True)
class Finished:
    """A record, where it lies, and the secrets it is about (which the record itself does not hold)."""

    record: Record
    path: Path | None
    private: tuple[PrivateBatch, ...]


def run_audit(
    spec: AuditSpec,
    *,
    device: str = "cpu",
    out: Path | None = None,
    keep_secrets: bool = False,
    display: Display | None = None,
) -> Finished:
    """Audits one setting. With `out`, the record is written there, and finished parts survive an interruption."""
    display = display or Silent()
    if out is not None:
        check_writable(out)
    examples = private_examples(spec)
    key = SecretKey(os.urandom(32)) if out is None else open_key(out)
    display.say(f"Opening {to_string(spec.target)} on {device}")
    target = spec.target.open(torch.device(device), getattr(torch, spec.dtype))
    private = private_batches(spec, target, examples)
    # Parts belong to a setting, a kind of device and the very data: an edited file starts anew.
    parts = Parts(out, f"{spec.id}-{device.split(':')[0]}-{data_hash(key, examples)[:16]}")
    runner = Runner(spec, target, private * spec.draws, parts, display)
    outcomes = runner.attack_all()
    record = _record(runner, outcomes, key, device, keep_secrets)
    path = None if out is None else write_record(out, record)
    runner.parts.clear()
    return Finished(record, path, tuple(runner.private))


def data_hash(key: SecretKey, examples: Sequence[Example]) -> str:
    """Tells whether two audits had the same data, to whoever holds the key."""
    return keyed_hash(key, "\n".join(f"{example.label}\t{example.content}" for example in examples))


class Runner:
    """Attacks all batches, a group at a time."""

    def __init__(self, spec: AuditSpec, target: Target, private: Sequence[PrivateBatch], parts: Parts, display: Display) -> None:
        self.spec, self.target, self.private, self.parts, self.display = spec, target, private, parts, display
        self.prior: Prior = spec.prior.open(target) if isinstance(spec.prior, PriorSpec) else NoWords()
        self.pictures = spec.prior.open(target) if isinstance(spec.prior, PicturePriorSpec) else None
        self.visible = tuple(target.part(name) for name in spec.view.visible(target))
        self.peak_memory: int | None = None
        self.findings: list[FindingRecord] = []

    def attack_all(self) -> dict[str, list[Outcome]]:
        """Outcomes of every attack, and of the blind one that knows as much (under `blind of KEY`)."""
        attacks = self.spec.attack_keys()
        results: dict[str, list[Outcome]] = {name: [] for key in attacks for name in (key, f"blind of {key}")}
        size = self._batches_at_once()
        for start in range(0, len(self.private), size):
            group = range(start, min(start + size, len(self.private)))
            observations = [observe(self.spec, self.target, self.private[index], index) for index in group]
            self.findings += finding_records(observations, self.private)
            for place, (key, attack) in enumerate(attacks.items()):
                part = f"{place}-{group.start}-{group.stop}"
                outcomes = self.parts.load(part)
                if outcomes is None:
                    outcomes = self._attack(key, attack, observations)
                    self.parts.save(part, outcomes)
                results[key] += outcomes[: len(group)]
                results[f"blind of {key}"] += outcomes[len(group) :]
        return results

    def _attack(self, key: str, attack: Attack, observations: Sequence[Observation]) -> list[Outcome]:
        """The attack's outcomes, then the blind attack's with the same knowledge."""
        limited = [observation.limited_to(self.spec.told(attack) | {Fact.DEFENSE}) for observation in observations]
        progress = Progress()
        deadline = None if self.spec.time_limit is None else time.monotonic() + self.spec.time_limit
        bench = Bench(Streams.root("attacker", self.spec.seed), self.prior, progress, deadline, self.pictures)
        if self.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target.device)
        with self.display.watch(f"{key} on {len(observations)} batches", progress):
            found = attack.reconstruct(limited, bench)
        if self.target.device.type == "cuda":
            self.peak_memory = max(self.peak_memory or 0, torch.cuda.max_memory_allocated(self.target.device))
        blind = Blind().reconstruct(limited, Bench(bench.streams, self.prior, pictures=self.pictures))
        norms = [update_norm(observation) for observation in observations]
        secrets = [self.private[observation.index].batch for observation in limited]
        guesses, truths = objectives(attack, limited, secrets, found)
        judged = [Outcome(*four) for four in zip(found, guesses, truths, norms, strict=True)]
        return judged + [Outcome(guess, None, None, norm) for guess, norm in zip(blind, norms, strict=True)]

    def _batches_at_once(self) -> int:
        bytes_each = sum(part.size for part in self.visible) * 4
        room = UPDATES_IN_MEMORY
        if self.target.device.type == "cuda":
            room = torch.cuda.mem_get_info(self.target.device)[0] // 4
        return max(1, int(room // bytes_each))


def _record(runner: Runner, outcomes: dict[str, list[Outcome]], key: SecretKey, device: str, keep_secrets: bool) -> Record:
    spec, target = runner.spec, runner.target
    attacks = {
        name: score_with_stages(
            spec, target, attack, runner.private, outcomes[name], outcomes[f"blind of {name}"], runner.peak_memory
        )
        for name, attack in spec.attack_keys().items()
    }
    secrets = runner.private[: len(runner.private) // spec.draws]
    examples = [example for private in secrets for example in private.examples]
    raised = [flag for attack in attacks.values() for flag in attack.flags if flag.name in OF_THE_WHOLE]
    return Record(
        created=now(),
        spec=spec.to_dict(),
        versions=_versions(),
        machine=_machine(device),
        data=DataRecord(data_hash(key, examples), len(runner.private) // spec.draws, len(examples)),
        target=TargetRecord(
            name=to_string(spec.target),
            fingerprint=spec.target.fingerprint(),
            parameters=sum(value.numel() for value in target.parameters.values()),
            visible_parameters=sum(part.size for part in runner.visible),
        ),
        secrets=_secrets(runner.private, key, keep_secrets),
        attacks=attacks,
        worst_case=worst_case(spec, attacks),
        flags=tuple({flag.name: flag for flag in raised}.values()),
        findings=tuple(runner.findings),
        guarantees=guarantee_records(spec.defenses),
    )


def _secrets(private: Sequence[PrivateBatch], key: SecretKey, keep: bool) -> tuple[SecretRecord, ...]:
    return tuple(
        SecretRecord(index, position, keyed_hash(key, example.content), tokens, shown(example) if keep else None)
        for index, batch in enumerate(private)
        for position, (example, tokens) in enumerate(zip(batch.examples, batch.lengths, strict=True))
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("gradleak", "torch", "transformers", "numpy", "rouge-score"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or platform.machine()
    return {"device": device, "name": name, "cpu_count": os.cpu_count(), "threads": torch.get_num_threads()}
