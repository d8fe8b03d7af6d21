"""Texts that a user held beside an update of their own."""

from dataclasses import dataclass

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset, Rows
from gradleak.core.errors import GradleakError
from gradleak.core.registry import register


@register("dataset", "own_texts")
@dataclass(frozen=True)
class OwnTexts(Dataset):
    """The truth about updates that were attacked from Python or as captures; no file holds it.

    Records name it so that two updates are told apart.
    """

    updates: str  # their hash
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        raise GradleakError(
            "These texts were given to gradleak.score() and are kept nowhere: run that again."
        )
