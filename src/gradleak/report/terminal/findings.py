"""What the updates said outright, in a few lines: a leak that needs no attack."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from gradleak.records.schema import FindingRecord, Record
from gradleak.report.numbers import number

LEFT_OUT = ("special_tokens",)  # [CLS] and [SEP] are in every text
NAMES = {"longest_length": "longest length", "distinct_tokens": "different inputs", "bag_of_words": "bag of words"}


def outright(record: Record) -> Table | None:
    """One line a kind of finding, over all batches; none where nothing was read."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    shown = [found for found in record.findings if found.name not in LEFT_OUT]
    for name in dict.fromkeys(found.name for found in shown):
        found = [one for one in shown if one.name == name]
        told = Text(_sentence(name, found, record.data.batches))
        told.append(f"  ({', '.join(dict.fromkeys(one.source for one in found))})", style="dim")
        table.add_row(NAMES.get(name, name), told)
    return table if shown else None


def _sentence(name: str, found: Sequence[FindingRecord], batches: int) -> str:
    where = f"read in {len(found)} of {batches} batches" if len(found) < batches else "read in every batch"
    certain = sum(one.exact for one in found)
    how = {len(found): "exact", 0: "an estimate"}.get(certain, f"exact in {certain}, elsewhere an estimate")
    return ", ".join(part for part in (_amount(name, found), _rightness(name, found), where, how) if part)


def _amount(name: str, found: Sequence[FindingRecord]) -> str:
    """How much was read; the numbers themselves where these are what was counted."""
    if name == "bag_of_words":
        return f"{number(_mean([one.count for one in found]), 'words')} words a batch"
    if name == "distinct_tokens":
        return f"{number(_mean([value for one in found for value in one.values]), 'inputs')} a batch"
    return ""


def _rightness(name: str, found: Sequence[FindingRecord]) -> str:
    recall, precision = (
        _mean([share for one in found if (share := getattr(one, kind)) is not None]) for kind in ("recall", "precision")
    )
    if recall is None or precision is None:
        return ""
    if name == "bag_of_words":
        if recall == precision == 1:
            return "all of them and no others"
        return f"{number(recall, 'fraction')} % of the true ones among them, {number(precision, 'fraction')} % of them true"
    return f"{number(recall, 'fraction')} % right"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
