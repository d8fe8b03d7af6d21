"""The private data behind records, read again as it is now.

A text is believed to be a record's only where its keyed hash is; a record is of this data only
where the hash of all of it is.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gradleak.core.errors import GradleakError
from gradleak.records.schema import Record
from gradleak.records.store import SecretKey, Summary, keyed_hash, walk

if TYPE_CHECKING:
    from gradleak.core.batch import Example

KEY = Path("keys") / "secrets.key"
OVER_NETWORK = ("hub",)


class DataReader:
    """Reads the examples that records describe, each data set once; of the hub only where the
    network may be used."""

    def __init__(self, *, network: bool) -> None:
        self.network = network
        self._read = dict[str, "list[Example] | None"]()

    def read(self, record: Record) -> "list[Example] | None":
        """Returns the examples of a record's data as it is now; none where it is not at hand."""
        described = record.spec.get("data")
        if not isinstance(described, dict) or (
            described.get("name") in OVER_NETWORK and not self.network
        ):
            return None
        name = json.dumps([described, record.data.examples], sort_keys=True)
        if name not in self._read:
            self._read[name] = _load(described, record.data.examples)
        return self._read[name]


def _load(described: Mapping[str, object], count: int) -> "list[Example] | None":
    # Loaded here, since a gate that finds no key needs no data, and so no torch
    from gradleak.audit.spec import read
    from gradleak.core.dataset import Dataset

    try:
        return read("dataset", described, Dataset).load(count)
    except GradleakError:  # the file is gone, or somebody else's
        return None


class SecretFinder:
    """Finds secrets for the records of one run; data is read once."""

    def __init__(self, run: Path, *, network: bool) -> None:
        paths = [one / KEY for one in walk(run if run.is_dir() else run.parent)]
        self.keys = [SecretKey(path.read_bytes()) for path in paths if path.is_file()]
        self.data = DataReader(network=network)

    def texts(self, record: Record) -> Mapping[tuple[int, int], str]:
        """Text by batch and position; nothing where the data is not at hand or is other data by
        now."""
        from gradleak.audit.scoring import show_content

        return {
            place: show_content(example.content) for place, example in self.examples(record).items()
        }

    def examples(self, record: Record) -> "Mapping[tuple[int, int], Example]":
        """Examples by batch and position."""
        loaded = (self.data.read(record) or []) if self.keys else []
        found, size = {}, int(record.spec.get("batch_size", 1))
        for secret in record.secrets:
            place = secret.batch % record.data.batches * size + secret.position
            if place < len(loaded) and any(
                keyed_hash(key, loaded[place].as_text) == secret.hash for key in self.keys
            ):
                found[secret.batch, secret.position] = loaded[place]
        return found

    def require(self, record: Record, path: Path) -> "list[Example]":
        """Returns all examples of a record in their order, or refuses."""
        found = self.examples(record)
        places = [
            (secret.batch, secret.position) for secret in record.secrets[: record.data.examples]
        ]
        if any(place not in found for place in places):
            raise GradleakError(
                f"The secrets of {path} are not at hand: its data is gone or has changed, or the"
                " key in keys/ is another one. Put the data back, or run the audit again."
            )
        return [found[place] for place in places]


def is_of_this_data(summary: Summary, data: DataReader) -> bool | None:
    """Whether a record is of the data as it is now; none where that cannot be told."""
    path = summary.path.parent / KEY
    examples = data.read(summary.record) if path.is_file() else None
    if examples is None:
        return None
    from gradleak.audit.record import data_hash

    wanted = examples[: summary.record.data.examples]
    return data_hash(SecretKey(path.read_bytes()), wanted) == summary.record.data.hash
