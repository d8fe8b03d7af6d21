"""A drawn trade-off holds every setting, names the one to take or says there is none, and never
calls it safe by itself."""

import io
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from gradleak.records.judgement import Judgement
from gradleak.records.schema import GuaranteeRecord, Score
from gradleak.records.statistics import Interval
from gradleak.report.pictures.svg import Axis
from gradleak.report.pictures.tradeoff_chart import (
    Missing,
    Point,
    Tradeoff,
    conclude,
    draw_tradeoff,
    write_point_epsilon,
)
from gradleak.report.terminal.map_and_tradeoff import print_tradeoff

NO_DOUBT = Judgement("not shown", "rouge1", (), 0, 0, 40, 0, ())
SVG = "{http://www.w3.org/2000/svg}"
DP = (
    GuaranteeRecord("dp_sgd", "whole run", "example", "PRV (Opacus)", None, 1e-5),
    GuaranteeRecord("dp_sgd", "whole run", "example", "RDP (Opacus)", 3.25, 1e-5),
)


UNKNOWN = tuple(
    replace(one, epsilon=None, epsilon_in_words="not known: the loss is too large") for one in DP
)


def point(
    defense: str,
    gain: tuple[float, float, float],
    mcc: float,
    proven: tuple[GuaranteeRecord, ...] = (),
) -> Point:
    mean, low, high = gain
    leak = Score(mean + 0.1, low + 0.1, high + 0.1, 0.1, 0.05, 0.15, "fraction", "higher", 40)
    utility = {name: Interval(mcc, mcc - 0.1, mcc + 0.1, 84) for name in ("mcc", "f1", "accuracy")}
    return Point(
        defense, leak, Interval(mean, low, high, 40), utility, proven, False, "ab", "cd", NO_DOUBT
    )


@pytest.fixture
def tradeoff() -> Tradeoff:
    return Tradeoff(
        created="",
        target="tiny",
        data="a<b>&c",
        attacks=("span", "lamp_quick"),
        metric="rouge1",
        utility="mcc",
        max_leak=0.05,
        batches=40,
        batch_size=1,
        draws=1,
        knows=("labels",),
        train_data="canaries",
        eval_data="held-out third",
        training_examples=169,
        test_examples=84,
        training={"epochs": 10, "batch_size": 8, "learning_rate": 1e-3, "seed": 0},
        points=(
            point("none", (0.9, 0.85, 0.95), 0.6),
            point("strong", (0.0, -0.02, 0.02), 0.3, DP),
            point("fit", (0.01, -0.02, 0.05), 0.5),
            point("nearly", (0.01, -0.02, 0.051), 0.55),
        ),
    )


def in_doubt(one: Point, flag: str) -> Point:
    return replace(one, judgement=replace(NO_DOUBT, verdict="could not be judged", doubts=(flag,)))


def said(tradeoff: Tradeoff) -> str:
    return " ".join(conclude(tradeoff))


def printed(tradeoff: Tradeoff, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_tradeoff(console, tradeoff)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_weakest_setting_is_the_most_useful_of_those_whose_interval_ends_within_the_target(
    tradeoff: Tradeoff,
) -> None:
    assert tradeoff.weakest is tradeoff.points[2]
    assert "Weakest setting that meets the target" in said(tradeoff)
    assert (
        "ends at 5.0 or below: fit, gain +1.0 [-2.0, 5.0], mcc 0.50 [0.40, 0.60] (no defense: 0.60"
        " [0.50, 0.70])" in said(tradeoff)
    )
    assert "not what a stronger one could do" in said(tradeoff)


def test_where_none_meets_the_target_that_is_said_with_the_nearest(tradeoff: Tradeoff) -> None:
    strict = replace(tradeoff, max_leak=0.001)
    assert strict.weakest is None
    assert "None of these settings meets the target" in said(
        strict
    ) and "The nearest setting: strong, gain 0.0" in said(strict)
    # The mean of the nearest is low enough, its interval is not
    assert "more examples" in said(strict)


def test_the_setting_without_a_defense_is_not_called_none_in_a_sentence(tradeoff: Tradeoff) -> None:
    alone = replace(tradeoff, points=tradeoff.points[:1])
    assert "The nearest setting: no defense, gain +90.0" in said(alone)
    assert ": no defense, gain +90.0" in said(replace(alone, max_leak=1.0))


def test_a_setting_at_the_level_of_chance_is_not_sold_as_useful(tradeoff: Tradeoff) -> None:
    useless = replace(
        tradeoff, points=(tradeoff.points[0], point("noise", (0.0, -0.01, 0.01), 0.05))
    )
    assert "may be no better than chance" in said(useless)


def test_a_doubtful_choice_comes_with_the_next_that_is_not(tradeoff: Tradeoff) -> None:
    none, strong, fit, nearly = tradeoff.points
    text = said(replace(tradeoff, points=(none, strong, in_doubt(fit, "not_adaptive"), nearly)))
    assert (
        "But no attack was adapted to it" in text
        and "The weakest without this doubt is strong." in text
    )


def test_a_failed_search_is_marked_and_explained_where_little_leaked(tradeoff: Tradeoff) -> None:
    none, *others = tradeoff.points
    failed = (none, *(in_doubt(one, "search_failed") for one in others))
    text = printed(replace(tradeoff, points=failed), 200)
    assert "+1.0 [-2.0, 5.0]?" in text and "? may be more" in text
    assert (
        "the search failed there: more may leak. No setting meets the target without"
        in " ".join(text.split())
    )
    assert "+90.0 [85.0, 95.0]?" not in text


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_shows_every_setting_and_fits(tradeoff: Tradeoff, width: int) -> None:
    text = printed(tradeoff, width)
    assert all(len(line) <= width for line in text.splitlines())
    for part in (
        "none",
        "strong",
        "3*",
        "0.50 [0.40, 0.60]",
        "ε 3.25 (RDP (Opacus))",
        "100.0 [95.0, 105.0]",
        "10.0",
    ):
        assert part in text


def test_an_epsilon_that_could_not_be_computed_is_said_to_be_not_known_and_why(
    tradeoff: Tradeoff,
) -> None:
    unknown = replace(
        tradeoff, points=(tradeoff.points[0], point("strong", (0.0, -0.02, 0.02), 0.3, UNKNOWN))
    )
    assert [write_point_epsilon(one) for one in unknown.points] == ["–", "ε not known"]
    assert "ε not known" in printed(unknown, 200) and "ε not known over the run" in "".join(
        ElementTree.fromstring(draw_tradeoff(unknown)).itertext()
    )
    why = (
        "Over the whole run, strong: ε not known: the loss is too large (PRV (Opacus), RDP"
        " (Opacus))."
    )
    assert why in said(unknown)
    assert "not known" not in said(tradeoff)  # one accountant that gives an ε is enough


def test_missing_settings_are_named(tradeoff: Tradeoff) -> None:
    assert "sign: its training failed" in said(
        replace(tradeoff, missing=(Missing("sign", "its training failed."),))
    )


def test_the_picture_has_a_cross_a_setting_and_says_all_in_words(tradeoff: Tradeoff) -> None:
    root = ElementTree.fromstring(draw_tradeoff(tradeoff))
    points = [group for group in root.iter(f"{SVG}g") if group.get("class") == "point"]
    assert len(points) == 4
    # Round where the target is met
    assert [len(list(group.iter(f"{SVG}circle"))) for group in points] == [0, 1, 1, 0]
    assert "fit: gain +1.0 [-2.0, 5.0]" in "".join(root.itertext())
    assert "a<b>&c" in "".join(root.itertext())


@pytest.mark.parametrize(
    "values", [[0.0, 1.0], [-0.21, 0.97], [0.0, 0.0], [0.0, 130.0], [0.0, 0.004]]
)
def test_an_axis_holds_its_values_between_few_round_ticks(values: list[float]) -> None:
    axis = Axis(values, 0, 100)
    assert axis.low <= min(values) + 1e-12 and axis.high >= max(values) - 1e-12
    assert 1 <= len(axis.ticks()) <= 9
    assert 0 <= axis.at(values[0]) <= 100
