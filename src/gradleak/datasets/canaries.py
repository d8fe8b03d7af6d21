"""Made-up messages with made-up secrets, shipped with the package: nothing to download, nobody
to harm."""

from dataclasses import dataclass
from importlib.resources import files
from typing import ClassVar

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset, Rows
from gradleak.core.registry import register
from gradleak.datasets.columns import Columns
from gradleak.datasets.rows import parse_jsonl
from gradleak.datasets.selection import take


@register("dataset", "canaries")
@dataclass(frozen=True)
class Canaries(Dataset):
    """253 English messages of 3 to 30 words, written for gradleak; 145 carry a secret whose span is
    marked.

    Label 1: the writer asks the reader to do or answer something; 0: the message only tells. Both
    kinds carry secrets, so the label does not give a secret away. Phone numbers are 555-01xx and
    mail addresses example.*, which belong to nobody.
    """

    made_up: ClassVar[bool] = True
    is_public: ClassVar[bool] = True

    secrets_only: bool = False
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        content = files("gradleak.datasets").joinpath("canaries.jsonl").read_text(encoding="ascii")
        examples = Columns("canaries", text="text", label="label", marked=True).examples(
            list(parse_jsonl(content))
        )
        kept = [example for example in examples if example.secrets or not self.secrets_only]
        return take(
            kept,
            count,
            "canaries that carry a secret" if self.secrets_only else "canaries",
            self.rows,
        )
