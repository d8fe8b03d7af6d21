"""What is tuned on is never reported on, and the two stages of tuning share no sentence."""

import os
from pathlib import Path

import pytest

from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError
from gradleak.core.specs import to_string
from gradleak.datasets import (
    Canaries,
    Cola,
    File,
    Hub,
    RottenTomatoes,
    Sst2,
    TuningPart,
    resolve_dataset,
)
from gradleak.datasets.selection import Selection, for_tuning

real_data = pytest.mark.skipif(
    "GRADLEAK_DATA" not in os.environ, reason="GRADLEAK_DATA is not set: no real datasets here"
)


def texts(data: str, coarse: int = 10, fine: int = 20) -> tuple[list[str], list[str]]:
    """Of the coarse and of the fine part."""
    parts = [TuningPart(data, coarse, fine, "coarse"), TuningPart(data, coarse, fine, "fine")]
    first, second = ([example.text for example in part.load()] for part in parts)
    return first, second


def bare(found: list[str]) -> set[str]:
    return {" ".join(text.lower().split()) for text in found}


@pytest.fixture
def repetitive(tmp_path: Path) -> File:
    """1500 rows of 1200 different texts, so that rows outside the test selection have twins in
    it; cases and spaces vary."""
    different = [f"word{number} " + "and more " * (number % 40) + "ends" for number in range(1200)]
    rows = [
        text.upper().replace(" ", "  ") if place >= 1200 else text
        for place, text in enumerate([*different, *different[:300]])
    ]
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"{row},0\n" for row in rows))
    return File(str(tmp_path / "rows.csv"))


@pytest.mark.parametrize(
    ("coarse", "fine"), [(10, 20), (1, 2), (1, 1), (7, 3), (4, 9), (20, 20), (3, 100)]
)
def test_the_parts_have_the_sizes_asked_and_are_the_first_examples_dealt_out(
    coarse: int, fine: int
) -> None:
    first, second = texts("canaries", coarse, fine)
    assert (len(first), len(second)) == (coarse, fine)
    assert sorted([*first, *second]) == sorted(
        example.text for example in Canaries().load(coarse + fine)
    )


def test_of_every_three_neighbours_in_length_the_middle_one_is_for_the_coarse_stage() -> None:
    by_length = sorted((example.text for example in Canaries().load(30)), key=len)
    assert texts("canaries")[0] == by_length[1::3]


def test_the_parts_share_no_text_with_each_other_or_with_the_test_selection(
    repetitive: File,
) -> None:
    def selected(selection: Selection, count: int | None = None) -> list[str]:
        return [example.text for example in File(repetitive.path, selection=selection).load(count)]

    test = bare(selected("lamp_test"))
    assert bare(selected("lamp_tune", 90)) & test  # the twins are there
    first, second = map(
        bare, texts(to_string(File(repetitive.path, selection="lamp_tune")), 30, 60)
    )
    assert first and second
    assert not first & second and not first & test and not second & test


@real_data
@pytest.mark.parametrize("data", [Cola, Sst2, RottenTomatoes])
def test_tuning_sentences_of_the_papers_datasets_are_apart(
    data: type[Cola | Sst2 | RottenTomatoes],
) -> None:
    test = bare([example.text for example in data().load()])
    first, second = texts(f"{data.name}:selection=lamp_tune")
    assert (len(bare(first)), len(bare(second))) == (10, 20)
    assert not bare(first) & bare(second) and not bare([*first, *second]) & test


@pytest.mark.parametrize("line", ["cola", "sst2", "rotten_tomatoes", "cola:split=dev"])
def test_the_papers_datasets_are_taken_with_their_tuning_selection(line: str) -> None:
    assert to_string(for_tuning(resolve_dataset(line), selection_written=False)).endswith(
        "selection=lamp_tune"
    )


@pytest.mark.parametrize(
    "data", [Canaries(), File("notes.csv"), Hub("glue"), Cola(selection="lamp_tune")]
)
def test_data_without_a_test_selection_is_taken_as_it_is(data: Dataset) -> None:
    assert for_tuning(data, selection_written=True) == data


@pytest.mark.parametrize(
    "data", [Cola(), Cola(selection="all"), File("notes.csv", selection="lamp_test")]
)
def test_test_sentences_are_refused(data: Dataset) -> None:
    with pytest.raises(GradleakError, match="holds test sentences.*use selection=lamp_tune"):
        for_tuning(data, selection_written=True)


def test_a_stage_without_examples_is_refused() -> None:
    with pytest.raises(GradleakError, match="Both stages of tuning need examples"):
        TuningPart(coarse=0)
