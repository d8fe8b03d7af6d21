"""The record of a cell of a map: what an audit with that view would have written."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from gradleak.audit.outcomes import Outcome
from gradleak.audit.runner import data_hash
from gradleak.audit.scoring import worst_case
from gradleak.audit.stages import score_with_stages
from gradleak.core.batch import PrivateBatch
from gradleak.core.specs import to_string
from gradleak.core.target import Target
from gradleak.records.schema import DataRecord, Record, SecretRecord, TargetRecord, now
from gradleak.records.store import SecretKey, keyed_hash, read_record
from gradleak.study.map_cells import MapCell

PACKAGES = ("gradleak", "torch", "transformers", "numpy", "rouge-score")


@dataclass(frozen=True, eq=False)
class Scribe:
    """Writes up outcomes; holds what all cells share."""

    target: Target
    private: Sequence[PrivateBatch]
    key: SecretKey
    device: str

    @property
    def data(self) -> DataRecord:
        examples = [example for batch in self.private for example in batch.examples]
        return DataRecord(data_hash(self.key, examples), len(self.private), len(examples))

    def finished(self, folder: Path, cell: MapCell) -> Record | None:
        """The record of a cell, if there is one and it is of the data as it is now."""
        path = folder / f"{cell.spec.id}.json"
        record = read_record(path) if path.exists() else None
        return record if record is not None and record.data.hash == self.data.hash else None

    def record(self, cell: MapCell, outcomes: Sequence[Outcome], blind: Sequence[Outcome], peak_memory: int | None) -> Record:
        """The cell, scored."""
        spec, (attack,) = cell.spec, cell.spec.attacks
        scored = score_with_stages(spec, self.target, attack, self.private, outcomes, blind, peak_memory)
        raised = [flag for flag in scored.flags if flag.name in ("few_examples", "dead_gradient")]
        return Record(
            created=now(),
            spec=spec.to_dict(),
            versions=_versions(),
            machine=_machine(self.device),
            data=self.data,
            target=TargetRecord(
                name=to_string(spec.target),
                fingerprint=spec.target.fingerprint(),
                parameters=sum(value.numel() for value in self.target.parameters.values()),
                visible_parameters=sum(part.size for part in cell.parts),
            ),
            secrets=self._secrets(),
            attacks={attack.name: scored},
            worst_case=worst_case(spec, {attack.name: scored}),
            flags=tuple(raised),
        )

    def _secrets(self) -> tuple[SecretRecord, ...]:
        return tuple(
            SecretRecord(index, position, keyed_hash(self.key, example.text), tokens)
            for index, batch in enumerate(self.private)
            for position, (example, tokens) in enumerate(zip(batch.examples, batch.lengths, strict=True))
        )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _machine(device: str) -> dict[str, str | int | None]:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or platform.machine()
    return {"device": device, "name": name, "cpu_count": os.cpu_count(), "threads": torch.get_num_threads()}
