"""Each rule, on both sides of its number."""

import math
import re

import pytest

from gradleak.records.flags import (
    FLAGS,
    MemberFate,
    dead_gradient,
    few_examples,
    generous_knowledge,
    member_failed,
    member_out_of_time,
    near_chance,
    no_objective,
    not_adaptive,
    one_draw,
    other_answer_fits,
    search_failed,
    seen_before_defense,
    unmodelled_dropout,
)


def test_there_are_thirteen_flags_and_every_rule_has_its_number() -> None:
    first = (
        "search_failed other_answer_fits near_chance few_examples generous_knowledge dead_gradient"
        " no_objective"
    )
    last = (
        "unmodelled_dropout not_adaptive one_draw seen_before_defense member_failed"
        " member_out_of_time"
    )
    assert list(FLAGS) == [*first.split(), *last.split()]
    for name, flag in FLAGS.items():
        assert flag.name == name and re.search(r"\d", flag.rule)
        assert all(text.endswith(".") for text in (flag.rule, flag.meaning, flag.what_to_do))


def test_thirty_examples_are_enough() -> None:
    assert few_examples(29) and not few_examples(30)


def test_the_numbers_of_a_flag_read_as_in_the_tables() -> None:
    details = [
        raised.detail
        for raised in (
            few_examples(1),
            near_chance(-0.0774),
            near_chance(-1e-9),
            near_chance(-0.02, "mse"),
        )
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


def test_a_guess_is_as_good_as_the_truth_where_only_rounding_is_between_them() -> None:
    assert search_failed([1.0 + 3e-5], [1.0]) and not search_failed([1.0 + 3e-6], [1.0])
    # A cosine distance is off by that at zero too
    assert not search_failed([3e-6], [0.0]) and search_failed([3e-5], [0.0])


def test_rounding_is_counted_in_the_unit_of_the_objective() -> None:
    assert search_failed([12.0], [10.0], [("nats", 1.0)]) and not search_failed(
        [10.5], [10.0], [("nats", 1.0)]
    )
    # Of so large a sum, that is rounding
    assert not search_failed([2e6 + 5], [2e6], [("nats", 1.0)])
    assert search_failed([-10.0], [-11.5], [("log", 0.1)]) and not search_failed(
        [-11.45], [-11.5], [("log", 0.1)]
    )
    # Of squares of small gradients, ‖G‖² = 1e-8
    assert search_failed([1e-8], [1e-14], [("", 1e-13)])


def test_a_failed_search_says_by_how_much() -> None:
    flag = search_failed([13.0, 10.0, 30.0, math.inf], [10.0] * 4, [("nats", 1.0)] * 4)
    assert flag is not None
    assert (
        flag.detail
        == "The guess is worse than the truth in 3 of 4 batches, by 11.5 nats at the median."
    )


def test_a_wrong_guess_is_the_fault_of_the_search_or_of_the_objective() -> None:
    truth = [1.0] * 4
    for at_guess, search in ((2.0, True), (1.0, False), (1.0 + 1e-7, False), (0.5, False)):
        guesses = [at_guess, 1.0, 1.0, 1.0]
        assert bool(search_failed(guesses, truth)) is search
        assert bool(other_answer_fits(guesses, truth, [False, True, True, True])) is not search
    assert other_answer_fits([0.5] * 4, truth, [True] * 4) is None


def test_another_answer_that_fits_better_says_by_how_much() -> None:
    flag = other_answer_fits(
        [3.0, 10.0, 10.2, 99.0], [10.0] * 4, [False, True, False, False], [("nats", 1.0)] * 4
    )
    assert flag is not None
    assert (
        flag.detail
        == "A wrong guess fits as well as the truth in 2 of 4 batches, better in 1, by 7 nats at"
        " the median."
    )
    few = other_answer_fits([0.5] + [1.0] * 10, [1.0] * 11, [False] + [True] * 10)
    assert few is None  # less than one in ten
    assert other_answer_fits([None, 0.1], [1.0, None], [False, False]) is None


def test_members_that_refused_failed_or_had_no_time_are_named() -> None:
    fates = [
        MemberFate("span", "refused", 2, "span needs the first layer."),
        MemberFate("energy", "failed", 1, "MemoryError: no room"),
        MemberFate("energy", "cut", 3),
        MemberFate("lamp_plus", "no_time", 4),
    ]
    failed, late = member_failed(fates), member_out_of_time(fates, 4)
    assert failed is not None and late is not None
    assert (
        failed.detail
        == "span refused: span needs the first layer. energy failed: MemoryError: no room."
    )
    assert (
        late.detail
        == "energy was cut in 3 of 4 batches, lamp_plus was not begun in 4 of 4 batches."
    )
    assert member_failed(fates[2:]) is None and member_out_of_time(fates[:2], 4) is None


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
    assert (
        not dead_gradient([0.0] + [1.0] * 10)
        and not dead_gradient([1e-8])
        and not dead_gradient([])
    )


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
        other_answer_fits([1.0], [1.0], [False]),
        member_failed([MemberFate("span", "refused", 1, "It does not apply.")]),
        member_out_of_time([MemberFate("span", "cut", 1)], 1),
    ]
    assert {flag.name for flag in raised if flag} == set(FLAGS)


def test_dropout_at_the_client_is_said() -> None:
    assert unmodelled_dropout(True) and not unmodelled_dropout(False)


def test_only_a_defense_can_be_ignored() -> None:
    assert (
        not_adaptive(True, False)
        and not not_adaptive(True, True)
        and not not_adaptive(False, False)
    )


def test_two_draws_are_not_one_and_what_is_certain_needs_no_second() -> None:
    assert one_draw(True, 1) and not one_draw(True, 2) and not one_draw(False, 1)


def test_noise_of_the_server_comes_too_late() -> None:
    assert seen_before_defense(True) and not seen_before_defense(False)
