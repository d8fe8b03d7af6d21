"""Private examples from the Hugging Face hub."""

import importlib
import os
import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset, Rows
from gradleak.core.errors import GradleakError
from gradleak.core.not_ours import stay_offline_unless_reachable
from gradleak.core.registry import register
from gradleak.datasets.columns import TextColumns
from gradleak.datasets.rows import Row
from gradleak.datasets.selection import Selection, select


@register("dataset", "hub")
@dataclass(frozen=True)
class Hub(Dataset):
    """A dataset of the hub by its id, such as
    `hub:path=glue,config=cola,text=sentence,selection=lamp_test`.

    `config` is what `load_dataset` calls `name`; here a component's name is the one it is
    registered under.
    """

    added_later: ClassVar[frozenset[str]] = Dataset.added_later | {"labels", "skip_bad"}

    path: str
    config: str | None = None
    split: str = "train"
    text: str = "text"
    label: str | None = "label"
    selection: Selection = "all"
    rows: Rows = ()
    labels: tuple[str, ...] = ()  # names of the classes 0, 1, …
    skip_bad: bool = False  # leave out rows that cannot be used

    def load(self, count: int | None = None) -> list[Example]:
        return select(
            self._columns().examples(self._rows()), self.selection, count, self._source, self.rows
        )

    def without_bad_rows(self) -> Dataset:
        return replace(self, skip_bad=True)

    def remarks(self) -> tuple[str, ...]:
        return self._columns().describe_left_out(self._rows())

    @property
    def _source(self) -> str:
        return (
            f"hub dataset {self.path}"
            + (f"/{self.config}" if self.config else "")
            + f", {self.split} split"
        )

    def _columns(self) -> TextColumns:
        return TextColumns(
            self._source, self.text, self.label, labels=self.labels, skip_bad=self.skip_bad
        )

    def _rows(self) -> list[Row]:
        stay_offline_unless_reachable()
        library = _library()
        try:
            records = library.load_dataset(self.path, self.config, split=self.split)
        except Exception as error:  # the library and the network below it raise dozens of kinds
            raise GradleakError(
                f"Cannot load {self._source}: {error}. Check the id, config and split, and the"
                " network."
            ) from error
        return [
            Row(f"row {number}", dict(values)) for number, values in enumerate(records, start=1)
        ]


def _library() -> Any:
    """The `datasets` library, told not to report who reads what."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    # Imported before: it has read the environment already
    if constants := sys.modules.get("huggingface_hub.constants"):
        vars(constants)["HF_HUB_DISABLE_TELEMETRY"] = True
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise GradleakError(
            "Datasets of the hub need the datasets library: pip install gradleak[hub]."
        ) from error
