"""Each rule, on both sides of its number."""

import math
import re

import pytest

from gradleak.records.flags import (
    FLAGS,
    dead_gradient,
    few_examples,
    generous_knowledge,
    near_chance,
    no_objective,
    not_adaptive,
    one_draw,
    search_failed,
    seen_before_defense,
    unmodelled_dropout,
)


def test_there_are_ten_flags_and_every_rule_has_its_number() -> None:
    first = ["search_failed", "near_chance", "few_examples", "generous_knowledge", "dead_gradient", "no_objective"]
    assert list(FLAGS) == [*first, "unmodelled_dropout", "not_adaptive", "one_draw", "seen_before_defense"]
    for name, flag in FLAGS.items():
        assert flag.name == name and re.search(r"\d", flag.rule)
        assert all(text.endswith(".") for text in (flag.rule, flag.meaning, flag.what_to_do))


def test_thirty_examples_are_enough() -> None:
    assert few_examples(29) and not few_examples(30)


def test_the_numbers_of_a_flag_read_as_in_the_tables() -> None:
    details = [
        raised.detail
        for raised in (few_examples(1), near_chance(-0.0774), near_chance(-1e-9), near_chance(-0.02, "mse"))
        if raised
    ]
    assert details == [
        "1 example was attacked; 30 are the least.",
        "The gain over blind may be as low as -7.7 (ROUGE-1, in %).",
        "The gain over blind may be as low as 0.0 (ROUGE-1, in %).",
        "The gain over blind may be as low as -0.02 (mse).",
    ]


def test_a_gain_must_be_above_zero_to_be_one() -> None:
    assert near_chance(-0.1) and near_chance(0.0) and not near_chance(1e-9)


def test_one_failed_batch_in_ten_is_a_failed_search() -> None:
    truth = [1.0] * 10
    assert search_failed([1.002] + [1.0] * 9, truth)
    assert not search_failed([1.002] + [1.0] * 10, [1.0] * 11)


def test_a_guess_within_a_thousandth_of_the_truth_is_found() -> None:
    assert search_failed([1.0011], [1.0]) and not search_failed([1.0009], [1.0])


def test_rounding_at_a_zero_objective_is_no_failure() -> None:
    assert not search_failed([9e-7], [0.0]) and search_failed([2e-6], [0.0])


def test_a_guess_better_than_the_truth_is_no_failed_search() -> None:
    assert not search_failed([0.1], [0.5]) and not search_failed([-3.0], [-2.0])


def test_a_guess_that_is_not_a_number_failed() -> None:
    assert search_failed([math.nan], [0.5]) and search_failed([math.inf], [0.5])


def test_batches_without_both_objectives_are_not_judged() -> None:
    assert not search_failed([None, 1.0, 5.0], [0.1, None, math.nan])
    assert not search_failed([], [])
    flag = search_failed([None, 2.0], [1.0, 1.0])
    assert flag is not None and "1 of 1" in flag.detail


@pytest.mark.parametrize("facts", [["labels"], ["lengths", "batch_size"], ["labels", "lengths"]])
def test_labels_or_lengths_are_generous(facts: list[str]) -> None:
    flag = generous_knowledge(facts)
    assert flag is not None and facts[0] in flag.detail


def test_batch_size_and_defense_are_not_generous() -> None:
    assert not generous_knowledge(["batch_size", "defense"]) and not generous_knowledge([])


def test_one_silent_batch_in_ten_is_a_dead_gradient() -> None:
    assert dead_gradient([0.9e-8] + [1.0] * 9) and dead_gradient([math.nan])
    assert not dead_gradient([0.0] + [1.0] * 10) and not dead_gradient([1e-8]) and not dead_gradient([])


def test_an_attack_without_objective_says_so() -> None:
    assert no_objective(False) and not no_objective(True)


def test_raised_flags_are_among_the_known_ones() -> None:
    raised = [
        few_examples(1),
        near_chance(0.0),
        search_failed([1.0], [0.0]),
        generous_knowledge(["labels"]),
        dead_gradient([0.0]),
        no_objective(False),
        unmodelled_dropout(True),
        not_adaptive(True, False),
        one_draw(True, 1),
        seen_before_defense(True),
    ]
    assert {flag.name for flag in raised if flag} == set(FLAGS)


def test_dropout_at_the_client_is_said() -> None:
    assert unmodelled_dropout(True) and not unmodelled_dropout(False)


def test_only_a_defense_can_be_ignored() -> None:
    assert not_adaptive(True, False) and not not_adaptive(True, True) and not not_adaptive(False, False)


def test_two_draws_are_not_one_and_what_is_certain_needs_no_second() -> None:
    assert one_draw(True, 1) and not one_draw(True, 2) and not one_draw(False, 1)


def test_noise_of_the_server_comes_too_late() -> None:
    assert seen_before_defense(True) and not seen_before_defense(False)
