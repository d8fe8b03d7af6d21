"""`rows=200-299`: rows of every data set by number, and examples that know their own."""

import dataclasses
from pathlib import Path

import pytest

from gradleak.audit import AuditSpec
from gradleak.audit.client import batch_name, stream_of
from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError
from gradleak.core.registry import list_registered
from gradleak.core.specs import from_string, to_dict, to_string
from gradleak.datasets import Canaries, File, RottenTomatoes, Shapes, resolve_dataset
from gradleak.datasets.selection import read_numbers, select

CANARIES = Canaries().load()


@pytest.mark.parametrize("name", list_registered("dataset"))
def test_every_data_set_has_rows_and_keeps_the_id_it_had_without_them(name: str) -> None:
    cls = list_registered("dataset")[name]
    needed = [
        field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING
    ]  # type: ignore[arg-type]
    plain = cls(**dict.fromkeys(needed, "x"))
    assert "rows" not in to_dict(plain)
    chosen = dataclasses.replace(plain, rows=("0-4", "9"))  # type: ignore[type-var]
    assert to_dict(chosen)["rows"] == ["0-4", "9"]
    assert from_string("dataset", to_string(chosen)) == chosen


@pytest.mark.parametrize(
    ("written", "numbers"),
    [
        ("rows=3", [3]),
        ("rows=200-203", [200, 201, 202, 203]),
        ("rows=[7-8,0]", [7, 8, 0]),
        ('rows="0-1,5"', [0, 1, 5]),
    ],
)
def test_rows_are_written_as_ranges_and_lists_of_them(written: str, numbers: list[int]) -> None:
    data = resolve_dataset(f"canaries:{written}")
    assert data.load() == [CANARIES[number] for number in numbers]
    assert [example.row for example in data.load()] == numbers


def test_a_count_takes_the_first_of_the_rows() -> None:
    assert [example.row for example in Canaries(rows=("10-19",)).load(3)] == [10, 11, 12]
    with pytest.raises(
        GradleakError, match=r"11 examples were asked of canaries, rows 10-19, which has 10"
    ):
        Canaries(rows=("10-19",)).load(11)


@pytest.mark.parametrize("rows", ["5-3", "a-b", "-3", "1-", "", "1.5", "٣"])
def test_what_is_no_range_is_refused_with_the_form(rows: str) -> None:
    with pytest.raises(GradleakError, match=r"Rows are written as rows=200-299"):
        read_numbers([rows])


def test_rows_that_are_not_there_or_named_twice_are_refused() -> None:
    with pytest.raises(
        GradleakError, match=r"There is no row 253 in canaries, which has 253 rows, 0 to 252"
    ):
        Canaries(rows=("250-253",)).load(1)
    with pytest.raises(GradleakError, match="names a row twice"):
        Canaries(rows=("1-4", "3")).load(1)
    with pytest.raises(GradleakError, match="There is no row 1000 in shapes, private part"):
        Shapes(rows=("1000",)).load()


def test_rows_are_places_of_the_selection_and_examples_know_the_row_of_their_split() -> None:
    examples = [Example(f"text {number}", row=number) for number in range(1500)]
    every = select(examples, "lamp_test", None, "made-up data")
    chosen = select(examples, "lamp_test", None, "made-up data", ("200-299",))
    assert chosen == every[200:300] and [example.row for example in chosen] == [
        example.row for example in every[200:300]
    ]
    assert [example.row for example in chosen] != list(range(200, 300))
    assert len(select(examples, "lamp_tune", None, "made-up data", ("499",))) == 1


def test_pictures_and_files_of_several_parts_count_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Shapes(rows=("4-5",), side=8).load() == Shapes(side=8).load(6)[4:]
    assert [example.row for example in Shapes(rows=("4-5",), side=8).load()] == [4, 5]
    (tmp_path / "notes.csv").write_text("text,label\na,0\nb,1\nc,0\n")
    assert [
        (one.text, one.row) for one in File(str(tmp_path / "notes.csv"), rows=("1-2",)).load()
    ] == [("b", 1), ("c", 2)]
    (tmp_path / "rotten_tomatoes").mkdir()
    monkeypatch.setenv("GRADLEAK_DATA", str(tmp_path))
    for ending in ("pos", "neg"):
        (tmp_path / "rotten_tomatoes" / f"rt-polarity.{ending}").write_text(
            "".join(f"{ending} {row}\n" for row in range(10))
        )
    reviews = RottenTomatoes(selection="all", rows=("7-8",)).load()
    assert [(one.text, one.row) for one in reviews] == [("pos 7", 7), ("neg 0", 8)]


def test_what_attackers_may_have_is_not_cut_to_the_rows_that_are_attacked() -> None:
    public = resolve_dataset("cola:rows=0-9").public()
    assert public == resolve_dataset("cola:selection=all")


def spec(rows: str, **changes: int) -> AuditSpec:
    return AuditSpec.from_plain(
        {"target": "tiny", "attacks": "blind", "data": f"canaries{rows}", "limit": 2} | changes
    )


def test_a_stretch_of_rows_draws_what_a_run_of_all_rows_draws_for_them() -> None:
    assert (
        batch_name(spec(":rows=4-7", batch_size=2), 0)
        == batch_name(spec("", batch_size=2, limit=4), 2)
        == (2,)
    )
    assert stream_of(spec(":rows=4-5"), 1) == stream_of(spec("", limit=6), 5)
    # In the second draw too
    assert stream_of(spec(":rows=4-5", draws=2), 3) == stream_of(spec("", limit=6, draws=2), 11)


def test_no_two_batches_or_draws_share_a_stream() -> None:
    crooked = spec(":rows=[0,10,1,11]", batch_size=2, draws=2)
    assert len({batch_name(crooked, index) for index in range(4)}) == 4
    assert len({stream_of(spec(":rows=4-5", draws=3), index) for index in range(6)}) == 6
