"""LAMP's test and tuning sets."""

import numpy as np
import pytest

from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError
from gradleak.datasets.selection import select, shuffled_indices

EXAMPLES = [Example("x" * (1 + index * 7 % 311) + f" {index}", index) for index in range(1500)]


def indices(selection: str, count: int | None) -> list[int]:
    return [example.label for example in select(EXAMPLES, selection, count, "made-up data")]  # type: ignore[arg-type,misc]


def test_the_order_is_that_of_numpys_legacy_generator_seeded_with_101() -> None:
    # CoLA has 8551; LAMP's code asserts this number
    assert shuffled_indices(np.random.RandomState(101), 8551)[0] == 2310


def test_all_keeps_the_order() -> None:
    assert indices("all", 5) == [0, 1, 2, 3, 4]


def test_a_smaller_test_set_is_the_beginning_of_a_larger_one() -> None:
    assert (
        indices("lamp_test", 10)
        == indices("lamp_test", 100)[:10]
        == shuffled_indices(np.random.RandomState(101), 1500)[:10]
    )


def test_test_and_tuning_sets_share_nothing_and_together_are_everything() -> None:
    test, tune = indices("lamp_test", None), indices("lamp_tune", None)
    assert len(test) == 1000 and sorted(test + tune) == list(range(1500))


def test_the_tuning_set_has_one_example_of_each_length_class() -> None:
    left_over = sorted(
        shuffled_indices(np.random.RandomState(101), 1500)[1000:],
        key=lambda index: len(EXAMPLES[index].text),
    )
    chunk_of = {index: place // 50 for place, index in enumerate(left_over)}
    assert sorted(chunk_of[index] for index in indices("lamp_tune", 10)) == list(range(10))


def test_selections_leave_the_global_generator_alone() -> None:
    before = np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    indices("lamp_tune", 10)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index,union-attr]


@pytest.mark.parametrize(
    ("selection", "count", "message"),
    [
        ("all", 1501, "has 1500; ask for 1500 or fewer"),
        ("lamp_test", 1001, "has 1000; ask for 1000 or fewer"),
        ("lamp_tune", 501, "after the 1000 kept for testing.*has 500; ask for 500 or fewer"),
        ("all", 0, "at least 1"),
        ("lamp_tset", 1, "Unknown selection 'lamp_tset'; write one of all, lamp_test, lamp_tune"),
    ],
)
def test_impossible_selections_are_refused(selection: str, count: int, message: str) -> None:
    with pytest.raises(GradleakError, match=message):
        indices(selection, count)


def test_too_little_data_for_a_tuning_set_is_refused() -> None:
    with pytest.raises(GradleakError, match="no examples in tiny .*selection=all"):
        select(EXAMPLES[:20], "lamp_tune", 1, "tiny")
