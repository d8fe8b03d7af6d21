"""What is printed of a record."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gradleak.records.judgement import judge_record
from gradleak.records.schema import FindingRecord, Record, Score
from gradleak.records.store import Summary
from gradleak.report.naming import write_component
from gradleak.report.numbers import write_duration, write_gain, write_interval, write_number
from gradleak.report.shown_guesses import find_kept_secrets
from gradleak.report.terminal.listing import CellRow, build_cell_tables, build_folder_table
from gradleak.report.terminal.record_screen import print_record
from gradleak.report.verdict import explain, write_conclusion

Make = Callable[..., Record]


def printed(
    record: Record, width: int = 100, guesses: bool = True, with_trace: bool = False
) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    print_record(console, record, find_kept_secrets(record), guesses=guesses, with_trace=with_trace)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_says_n_seed_target_device_and_time(make_record: Make) -> None:
    text = " ".join(printed(make_record()).split())
    for part in (
        "n = 1",
        "seed 7",
        "target tiny",
        "device cpu",
        "attacks took 0.0 s",
        "data canaries ·",
        "defense none",
    ):
        assert part in text


def test_says_what_the_updates_say_outright_even_where_no_attack_succeeds(
    make_record: Make,
) -> None:
    said = (
        FindingRecord(0, "labels", True, "a sign", 1, (1,), 1.0, 1.0),
        FindingRecord(0, "distinct_tokens", False, "a rank", 1, (7,)),
        FindingRecord(0, "bag_of_words", True, "some rows", 5, (), 0.8, 1.0),
        FindingRecord(0, "special_tokens", True, "some rows", 2, (), 1.0, 1.0),
    )
    text = " ".join(
        printed(replace(make_record(mean=0.2, flags=("near_chance",)), findings=said)).split()
    )
    assert "What the update says outright" in text
    assert "labels 100.0 % right, read in every batch, exact (a sign)" in text
    assert "different inputs 7 a batch, read in every batch, an estimate (a rank)" in text
    assert (
        "bag of words 5 words a batch, 80.0 % of the true ones among them, 100.0 % of them true,"
        " read in every batch, exact" in text
    )
    assert "the updates name every word in 1 of 1 batches" in text
    assert "special" not in text
    nothing = printed(make_record(mean=0.2, flags=("near_chance",)))
    assert "outright" not in nothing
    assert "name every word" not in nothing


def test_one_batch_is_not_counted_as_several(make_record: Make) -> None:
    text = printed(make_record())
    assert "n = 1 in 1 batch ·" in text and "tag: 1 reconstruction\n" in text


def test_fields_that_are_off_are_left_out_and_zeros_are_not() -> None:
    spec = {
        "name": "dp_sgd",
        "noise_multiplier": 0.0,
        "frozen": [],
        "path": "",
        "limit": None,
        "dropout": False,
        "seed": 0,
    }
    assert write_component(spec) == "dp_sgd:noise_multiplier=0.0,seed=0"


def test_nothing_is_below_zero_by_rounding_alone() -> None:
    assert write_number(-1e-9, "fraction") == "0.0" and write_number(-0.0, "") == "0"
    assert write_number(-0.001, "fraction") == "-0.1"


def test_a_missing_mean_is_a_dash(make_record: Make) -> None:
    assert write_number(None, "fraction") == write_number(float("nan"), "fraction") == "-"
    row = next(
        line for line in printed(make_record()).splitlines() if line.startswith("secret_recall")
    )
    assert row.split()[1:] == ["-", "-", "-"]


def test_a_secret_is_shown_only_if_the_record_keeps_it(make_record: Make) -> None:
    hidden, kept = printed(make_record()), printed(make_record(kept=True))
    assert "My PIN" not in hidden
    assert "hash cd34" in hidden
    assert "is 4471 my dog" in hidden
    assert "My PIN is 4471" in kept


def test_guesses_can_be_left_out_since_a_good_one_is_the_secret(make_record: Make) -> None:
    text = printed(make_record(), guesses=False, with_trace=True)
    assert "4471" not in text
    assert "--show" in text


def test_trace_shows_the_guesses_over_the_steps(make_record: Make) -> None:
    text = printed(make_record(), with_trace=True)
    assert "step 0" in text
    assert "the dog" in text
    assert "objective 5 at the start, 1 at step 3" in text


def test_tables_of_many_attacks_fit_a_hundred_columns(make_record: Make) -> None:
    names = tuple(f"attack_{place}" for place in range(5))
    text = printed(make_record(names))
    assert all(name in text for name in names)
    assert "worst case" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text


@pytest.mark.parametrize(
    "flags",
    [("near_chance",), ("near_chance", "search_failed", "few_examples"), ()],
)
def test_protected_is_never_said_alone_and_flags_carry_their_meaning(
    make_record: Make, flags: tuple[str, ...]
) -> None:
    record = make_record(mean=0.5 if not flags else 0.2, flags=flags)
    closing = write_conclusion(judge_record(record), record)
    assert "protected" not in closing
    assert ("leaks" in closing) == (not flags)
    text = " ".join(printed(record).split())
    assert ("The search stopped short" in text) == ("search_failed" in flags)
    if "search_failed" in flags:
        assert "In doubt: search_failed, few_examples." in closing


def test_a_flag_shared_by_attacks_keeps_each_ones_numbers() -> None:
    assert explain("few_examples", {"tag": "3 of 4.", "dlg": "3 of 4."}).startswith(
        "few_examples (tag, dlg): 3 of 4. The "
    )
    assert explain("few_examples", {"tag": "3 of 4.", "dlg": "2 of 4."}).startswith(
        "few_examples: tag: 3 of 4. dlg: 2 of 4. "
    )
    assert explain("of_a_later_version", {"": "Why."}) == "of_a_later_version: Why."


def test_a_record_without_scores_is_still_drawn(make_record: Make) -> None:
    text = printed(make_record(mean=None, guess=None))
    assert "Worst case: no score." in text
    assert "not kept" in text


def test_gain_follows_the_direction() -> None:
    higher = Score(0.5, 0.4, 0.6, 0.2, 0.1, 0.3, "fraction", "higher", 3)
    lower = Score(2.0, 1.0, 3.0, 5.0, 4.0, 6.0, "nats", "lower", 3)
    assert (write_gain(higher), write_interval(higher)) == ("+30.0", "50.0 [40.0, 60.0]")
    assert (write_gain(lower), write_interval(lower)) == ("+3", "2 [1, 3]")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.44, "0.4 s"), (12.2, "12 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert write_duration(seconds) == text


def test_cells_that_failed_keep_their_row_and_folders_list_flags(make_record: Make) -> None:
    record = make_record(flags=("few_examples",))
    console = Console(file=io.StringIO(), width=100)
    rows = [CellRow({"seed": "0"}, record), CellRow({"seed": "1"}, None, "failed")]
    console.print(
        *build_cell_tables(console, rows),
        build_folder_table([("abc.json", Summary.of(Path("abc.json"), record))]),
    )
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "failed" in text
    assert "50.0 [40.0, 60.0]" in text
    assert "blind 20.0" in text
    assert "few_examples" in text
