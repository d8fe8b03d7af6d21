"""Private examples from a file of one's own."""

from dataclasses import dataclass
from pathlib import Path

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset, Rows
from gradleak.core.registry import register
from gradleak.datasets.columns import Columns
from gradleak.datasets.lamp_selection import Selection, select
from gradleak.datasets.rows import Format, known_format, read_rows


@register("dataset", "file")
@dataclass(frozen=True)
class File(Dataset):
    """A tsv, csv, jsonl, parquet or plain text file, one example a row.

    `text` and `label` are column names, or column numbers from 1 where there is no header; `label=null` for no labels.
    A jsonl row may mark its secrets as character offsets: `{"text": …, "label": …, "secrets": [[start, end], …]}`.
    """

    path: str
    text: str = "text"
    label: str | None = "label"
    format: Format = "auto"
    header: bool = True
    selection: Selection = "all"
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        path = Path(self.path).expanduser()
        found = known_format(path) if self.format == "auto" else self.format
        label = None if found == "text" else self.label  # plain text has nowhere to keep one
        rows = read_rows(path, self.format, self.header)
        examples = Columns(self.path, self.text, label, marked=found == "jsonl").examples(rows)
        return select(examples, self.selection, count, self.path, self.rows)
