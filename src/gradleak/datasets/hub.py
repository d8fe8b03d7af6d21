"""Private examples from the Hugging Face hub."""

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset, Rows
from gradleak.core.errors import GradleakError
from gradleak.core.hub import stay_offline_unless_reachable
from gradleak.core.registry import register
from gradleak.datasets.columns import Columns
from gradleak.datasets.lamp_selection import Selection, select
from gradleak.datasets.rows import Row


@register("dataset", "hub")
@dataclass(frozen=True)
class Hub(Dataset):
    """A dataset of the hub by its id, such as `hub:path=glue,config=cola,text=sentence,selection=lamp_test`.

    `config` is what `load_dataset` calls `name`; here a component's name is the one it is registered under.
    """

    path: str
    config: str | None = None
    split: str = "train"
    text: str = "text"
    label: str | None = "label"
    selection: Selection = "all"
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        source = f"hub dataset {self.path}" + (f"/{self.config}" if self.config else "") + f", {self.split} split"
        stay_offline_unless_reachable()
        library = _library()
        try:
            records = library.load_dataset(self.path, self.config, split=self.split)
        except Exception as error:  # the library and the network below it raise dozens of kinds
            raise GradleakError(f"Cannot load {source}: {error}. Check the id, config and split, and the network.") from error
        rows = (Row(f"row {number}", dict(values)) for number, values in enumerate(records, start=1))
        return select(Columns(source, self.text, self.label).examples(rows), self.selection, count, source, self.rows)


def _library() -> Any:
    """The `datasets` library, told not to report who reads what."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    if constants := sys.modules.get("huggingface_hub.constants"):  # imported before: it has read the environment already
        vars(constants)["HF_HUB_DISABLE_TELEMETRY"] = True
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise GradleakError("Datasets of the hub need the datasets library: pip install gradleak[hub].") from error
