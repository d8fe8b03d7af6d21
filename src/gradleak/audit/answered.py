"""Which audits an earlier run has answered: one question, asked by whoever would run them."""

from pathlib import Path

from gradleak.audit.client import private_examples
from gradleak.audit.spec import AuditSpec
from gradleak.audit.writing import data_hash
from gradleak.core.dataset import Dataset
from gradleak.core.target import TargetSpec
from gradleak.records.schema import Record
from gradleak.records.store import open_key
from gradleak.records.summary import read_summary


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


def finished(folder: Path, spec: AuditSpec, inputs: Inputs) -> Record | None:
    """Returns the record of an audit, if there is a whole one and it is of the data, the model
    and the attacks' answers as they are now."""
    path = folder / f"{spec.id}.json"
    if not path.exists():
        return None
    summary = read_summary(path)
    record = summary.record
    if not summary.has_details or any(
        record.attacks[key].version != attack.version for key, attack in spec.attack_keys().items()
    ):
        return None
    is_same = record.data.hash == inputs.data_hash(
        spec
    ) and record.target.fingerprint == inputs.fingerprint(spec)
    return summary.whole() if is_same else None
