"""What a run must hold to be judged: every cell of a study, of the data and the attacks as they
are now."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gradleak.core.errors import GradleakError
from gradleak.records.judgement import OTHER_DATA, OUTDATED, Gap
from gradleak.records.run_folder import PlannedCell, Run
from gradleak.records.schema import Record
from gradleak.records.store import SecretKey
from gradleak.records.summary import Summary

if TYPE_CHECKING:
    from gradleak.core.batch import Example

KEY = Path("keys") / "secrets.key"
OVER_NETWORK = ("hub",)


@dataclass(frozen=True)
class Contract:
    """The cells of a study, and the versions of the attacks of each, by its id and their key in
    a record."""

    cells: tuple[PlannedCell, ...]
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def read_contract(path: Path, changes: Sequence[str] = ()) -> Contract:
    """Of a study's YAML, with fields replaced (`field=value`) as they were for its run."""
    from gradleak.study.cells import read_study

    cells = read_study(path, changes).cells
    versions = {
        cell.spec.id: {key: one.version for key, one in cell.spec.attack_keys().items()}
        for cell in cells
    }
    return Contract(tuple(PlannedCell(cell.spec.id, cell.axes) for cell in cells), versions)


def stale_records(run: Run, contract: Contract | None) -> list[Gap]:
    """Records of other data than is there now, or of other versions of attacks than the contract
    asks for.

    Without a contract, data that is not at hand is not missed: a gate may run on a machine that has
    no private data.
    """
    data = DataNow(network=contract is not None)
    found = []
    for summary in run.summaries:
        path, name = str(summary.path), summary.path.name
        same = data.is_same(summary)
        if same is False:
            found.append(
                Gap(OTHER_DATA, name, path, "Its data is other data by now. Run its audit again.")
            )
        elif same is None and contract is not None:
            why = f"Whether it is of this data cannot be told: the data or {KEY} is not at hand."
            found.append(Gap(OTHER_DATA, name, path, why))
        for key, version in (
            {} if contract is None else contract.versions.get(summary.id, {})
        ).items():
            attack = summary.record.attacks.get(key)
            if attack is None or attack.version != version:
                found.append(
                    Gap(
                        OUTDATED,
                        name,
                        path,
                        f"Its {key} is of another version. Run its audit again.",
                    )
                )
    return found


class DataNow:
    """The private data behind records as it is now; each is read once."""

    def __init__(self, *, network: bool) -> None:
        self.network, self._hashes = network, dict[tuple[Path, str], str | None]()

    def is_same(self, summary: Summary) -> bool | None:
        """Whether a record is of the data as it is now; none where that cannot be told."""
        record, folder = summary.record, summary.path.parent
        described = record.spec.get("data")
        if not isinstance(described, dict) or not (folder / KEY).is_file():
            return None
        if described.get("name") in OVER_NETWORK and not self.network:
            return None
        place = (folder, json.dumps([described, record.data.examples], sort_keys=True))
        if place not in self._hashes:
            self._hashes[place] = self._hash(folder, record)
        now = self._hashes[place]
        return None if now is None else now == record.data.hash

    def _hash(self, folder: Path, record: Record) -> str | None:
        from gradleak.audit.spec import read
        from gradleak.audit.writing import data_hash
        from gradleak.core.dataset import Dataset

        try:
            examples: list[Example] = read("dataset", record.spec["data"], Dataset).load(
                record.data.examples
            )
        except GradleakError:  # the file is gone, or somebody else's
            return None
        return data_hash(SecretKey((folder / KEY).read_bytes()), examples[: record.data.examples])
