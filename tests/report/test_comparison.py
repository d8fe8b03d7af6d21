"""What is paired with what when two runs are compared."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gradleak.records.files import RecordError
from gradleak.records.schema import DataRecord, Record, Score, SecretRecord
from gradleak.records.settings import settings_of
from gradleak.records.statistics import Interval, paired_difference
from gradleak.records.store import read_summaries, write_record
from gradleak.report.terminal.comparison import (
    LESS,
    MORE,
    SAME,
    Comparison,
    Difference,
    Identities,
    compare,
    conclude_comparison,
)

Make = Callable[..., Record]
ROUGE = Score(0.5, 0.4, 0.6, 0.2, 0.1, 0.3, "fraction", "higher", 4)


def scored(
    make_record: Make,
    values: Sequence[float],
    hashes: Sequence[str],
    batch_size: int = 2,
    draws: int = 1,
) -> Record:
    """A record with these values of ROUGE-1, batch by batch and draw by draw."""
    record = make_record(("tag",))
    attack, places = (
        record.attacks["tag"],
        [divmod(place, batch_size) for place in range(len(values))],
    )
    examples = [
        replace(
            attack.examples[0],
            batch=batch,
            position=position,
            values={"rouge1": value},
            blind_values={"rouge1": 0.0},
        )
        for (batch, position), value in zip(places, values, strict=True)
    ]
    secrets = [
        SecretRecord(*place, hash, 5) for place, hash in zip(places, [*hashes] * draws, strict=True)
    ]
    return replace(
        record,
        spec={**record.spec, "batch_size": batch_size, "draws": draws},
        data=DataRecord("".join(hashes), len(hashes) // batch_size, len(hashes)),
        secrets=tuple(secrets),
        attacks={"tag": replace(attack, scores={"rouge1": ROUGE}, examples=tuple(examples))},
        worst_case={"rouge1": ROUGE},
    )


def compared(
    folder: Path,
    first: Record,
    second: Record,
    contents: Callable[[Record], Identities | None] = lambda record: None,
) -> Comparison:
    runs = [folder / name for name in "ab"]
    for run, record in zip(runs, (first, second), strict=True):
        write_record(run, record)
    one, other = (settings_of(read_summaries(run)) for run in runs)
    return compare(one, other, (contents, contents))


def test_batches_are_paired_by_what_they_hold_and_examples_by_their_place(
    tmp_path: Path, make_record: Make
) -> None:
    first = scored(make_record, [0.9, 0.8, 0.7, 0.6], ["p", "q", "r", "s"])
    # The same batches, the other way round
    second = scored(make_record, [0.1, 0.2, 0.5, 0.3], ["r", "s", "p", "q"])
    (setting,) = compared(tmp_path, first, second).settings
    (line,) = setting.differences
    by_hand = paired_difference([0.5, 0.3, 0.1, 0.2], [0.9, 0.8, 0.7, 0.6], [0, 0, 1, 1])
    assert setting.batches == 2
    assert (line.change.mean, line.change.low, line.change.high) == pytest.approx(
        (by_hand.mean, by_hand.low, by_hand.high)
    )


def test_draws_of_a_batch_are_paired_in_order_and_stay_one_cluster(
    tmp_path: Path, make_record: Make
) -> None:
    first = scored(make_record, [0.9, 0.8, 0.7, 0.6], ["p", "q"], batch_size=1, draws=2)
    # One draw: the first of A is what it is compared with
    second = scored(make_record, [0.2, 0.1], ["q", "p"], batch_size=1)
    (line,) = compared(tmp_path, first, second).settings[0].differences
    by_hand = paired_difference([0.1, 0.2], [0.9, 0.8], [0, 1])
    assert (line.change.mean, line.change.low, line.change.n) == pytest.approx(
        (by_hand.mean, by_hand.low, 2)
    )


def test_data_that_was_edited_is_refused_though_its_rows_and_lengths_are_the_same(
    tmp_path: Path, make_record: Make
) -> None:
    first, second = (
        scored(make_record, [0.9, 0.8], hashes, batch_size=1) for hashes in (["p", "q"], ["x", "y"])
    )
    with pytest.raises(
        RecordError, match="held other examples for B than for A, or has changed since"
    ):
        compared(tmp_path, first, second, contents=lambda record: {})


def test_other_attacks_leave_the_worst_case_to_compare(tmp_path: Path, make_record: Make) -> None:
    first = scored(make_record, [0.9, 0.8], ["p", "q"], batch_size=1)
    other = {"dlg": replace(first.attacks["tag"], spec={"name": "dlg"})}
    (setting,) = compared(
        tmp_path, first, replace(first, attacks=other, spec={**first.spec, "attacks": ["dlg"]})
    ).settings
    assert [line.attack for line in setting.differences] == ["worst case"]


@pytest.mark.parametrize(
    ("direction", "low", "high", "reading"),
    [
        ("higher", -0.3, -0.1, LESS),
        ("higher", 0.1, 0.3, MORE),
        ("higher", -0.1, 0.3, SAME),
        ("lower", -0.3, -0.1, MORE),
        ("lower", 0.1, 0.3, LESS),
        ("higher", 0.0, 0.3, SAME),
    ],
)
def test_which_way_it_went_depends_on_what_the_metric_measures(
    direction: str, low: float, high: float, reading: str
) -> None:
    line = Difference(
        "tag", "rouge1", "fraction", direction, 0.5, 0.4, Interval((low + high) / 2, low, high, 8)
    )
    assert line.reading == reading


def test_less_by_attacks_that_failed_is_said_to_be_in_doubt(
    tmp_path: Path, make_record: Make
) -> None:
    letters = [chr(97 + place) for place in range(12)]
    first = scored(make_record, [0.9, 0.8, 0.95] * 4, letters, batch_size=1)
    second = scored(make_record, [0.1, 0.2, 0.05] * 4, letters, batch_size=1)
    failed = make_record(("tag",), flags=("search_failed",)).attacks["tag"].flags
    flagged = replace(second, attacks={"tag": replace(second.attacks["tag"], flags=failed)})
    said = " ".join(conclude_comparison(compared(tmp_path, first, flagged)))
    assert "Less leaks in B than in A" in said
    assert "In doubt: search_failed in B" in said
