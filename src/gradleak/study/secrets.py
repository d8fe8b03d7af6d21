"""The private texts behind a record, read again from its data and believed only where their
keyed hash is the record's."""

import json
from collections.abc import Mapping
from pathlib import Path

from gradleak.audit.picture_records import shown
from gradleak.audit.spec import read
from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError
from gradleak.records.schema import Record
from gradleak.records.store import SecretKey, keyed_hash
from gradleak.records.summary import walk

OVER_NETWORK = ("hub",)


class SecretFinder:
    """Finds secrets for the records of one run; data is read once."""

    def __init__(self, run: Path, *, network: bool) -> None:
        folder = run if run.is_dir() else run.parent
        paths = [one / "keys" / "secrets.key" for one in walk(folder)]
        self.keys = [SecretKey(path.read_bytes()) for path in paths if path.is_file()]
        self.network, self._read = network, dict[str, list[Example]]()

    def texts(self, record: Record) -> Mapping[tuple[int, int], str]:
        """Text by batch and position; nothing where the data is not at hand or is other data by
        now."""
        return {place: shown(example.content) for place, example in self.examples(record).items()}

    def examples(self, record: Record) -> Mapping[tuple[int, int], Example]:
        """Examples by batch and position."""
        loaded = self._load(record)
        found = {}
        for secret in record.secrets:
            place = (
                secret.batch % record.data.batches * int(record.spec.get("batch_size", 1))
                + secret.position
            )
            if place < len(loaded) and any(
                keyed_hash(key, loaded[place].as_text) == secret.hash for key in self.keys
            ):
                found[secret.batch, secret.position] = loaded[place]
        return found

    def _load(self, record: Record) -> list[Example]:
        described, wanted = record.spec.get("data"), record.data.examples
        if (
            not isinstance(described, dict)
            or (described.get("name") in OVER_NETWORK and not self.network)
            or not self.keys
        ):
            return []
        name = json.dumps([described, wanted], sort_keys=True)
        if name not in self._read:
            try:
                self._read[name] = read("dataset", described, Dataset).load(wanted)
            except GradleakError:  # the file is gone, or somebody else's
                self._read[name] = []
        return self._read[name]
