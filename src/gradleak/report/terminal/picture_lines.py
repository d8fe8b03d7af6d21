"""Pictures side by side, secrets above the guesses made of them."""

from collections.abc import Mapping

from rich.text import Text

from gradleak.records.grid import grid
from gradleak.records.png import PREFIX
from gradleak.records.schema import AttackRecord, ExampleRecord


def has_pictures(attack: AttackRecord) -> bool:
    """Whether its guesses are pictures."""
    return any(example.guess is not None and example.guess.startswith(PREFIX) for example in attack.examples)


def picture_line(example: ExampleRecord) -> Text:
    """What a picture's guess scored."""
    values = [f"{name} {value:.3g}" for name, value in example.values.items() if value is not None]
    return Text("a picture: " + ", ".join(values), style="dim")


def picture_grid(attack: AttackRecord, secrets: Mapping[tuple[int, int], str]) -> bytes:
    """A PNG file of all guesses, each below its secret where that may be shown."""
    return grid([(secrets.get((one.batch, one.position)), one.guess) for one in attack.examples if one.guess is not None])
