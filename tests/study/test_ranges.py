"""Which combinations a search tries."""

import math
import statistics

import pytest

from gradleak.attacks.recipes.baselines import Tag
from gradleak.attacks.recipes.lamp import LampCos, LampL2L1, LampQuick
from gradleak.core.attack import Attack
from gradleak.core.errors import GradleakError
from gradleak.core.registry import find
from gradleak.core.specs import from_string, to_dict, to_string
from gradleak.core.streams import Streams
from gradleak.study.tuning import (
    DEFAULT_RANGES,
    SearchRange,
    draw_combinations,
    ranges_for,
    read_range,
    read_written_fields,
)

STREAMS = Streams.root("tuning", 0)
NOTHING: frozenset[str] = frozenset()


def drawn(count: int, seed: int = 0, attack: Attack | None = None) -> list[Attack]:
    attack = attack or Tag()
    return draw_combinations(
        attack, ranges_for(attack, NOTHING, ()), count, Streams.root("tuning", seed)
    )


def test_the_first_combination_is_the_attack_as_it_is() -> None:
    short = Tag(steps=5)
    found = drawn(4, attack=short)
    assert found[0] == short
    assert len(set(found)) == 4 and {attack.steps for attack in found} == {5}  # type: ignore[attr-defined]


def test_a_seed_gives_the_same_combinations_and_more_do_not_change_the_first() -> None:
    assert drawn(5) == drawn(9)[:5]
    assert drawn(5)[1:] != drawn(5, seed=1)[1:]


def test_one_more_range_does_not_change_what_is_drawn_for_the_others() -> None:
    more = draw_combinations(
        Tag(), ranges_for(Tag(), NOTHING, [SearchRange.between("longest", 4, 40)]), 5, STREAMS
    )
    assert [attack.learning_rate for attack in more] == [
        attack.learning_rate for attack in drawn(5)
    ]  # type: ignore[attr-defined]
    assert all(isinstance(attack.longest, int) for attack in more)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", DEFAULT_RANGES)
def test_drawn_values_lie_in_their_ranges_and_survive_the_line(name: str) -> None:
    attack = find("attack", name)()
    assert isinstance(attack, Attack)
    ranges = ranges_for(attack, NOTHING, ())
    assert {one.field for one in DEFAULT_RANGES[name]} - {one.field for one in ranges} <= {"decay"}
    for other in draw_combinations(attack, ranges, 20, STREAMS)[1:]:
        assert all(one.low <= to_dict(other)[one.field] <= one.high for one in ranges)
        assert from_string("attack", to_string(other)) == other
        assert all(
            to_dict(other)[one.field] == float(f"{to_dict(other)[one.field]:.3g}") for one in ranges
        )


def test_ranges_of_more_than_a_decade_are_logarithmic() -> None:
    logarithmic = {
        (name, one.field) for name, ranges in DEFAULT_RANGES.items() for one in ranges if one.log
    }
    fields = {
        name: {field for which, field in logarithmic if which == name} for name in DEFAULT_RANGES
    }
    assert fields["lamp_cos"] == {"norm_weight", "learning_rate"}
    assert fields["lamp_l2l1"] == {"l1_weight", "learning_rate", "prior_weight", "norm_weight"}
    values = [
        SearchRange.between("x", 1e-4, 1e4).draw(STREAMS.child(number)) for number in range(200)
    ]
    assert abs(math.log10(statistics.median(values))) < 1


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("learning_rate=0.001:0.5", SearchRange("learning_rate", 0.001, 0.5, True)),
        ("learning_rate=1e-3:0.5:linear", SearchRange("learning_rate", 0.001, 0.5, False)),
        (" steps = 10 : 20 : log", SearchRange("steps", 10, 20, True)),
    ],
)
def test_a_range_is_read_as_it_is_written(written: str, expected: SearchRange) -> None:
    assert read_range(written) == expected


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("learning_rate", "write field=low:high"),
        ("learning_rate=0.1", "write field=low:high"),
        ("learning_rate=a:b", "write field=low:high"),
        ("learning_rate=1:2:cubic", "write field=low:high"),
        (
            "learning_rate=2:1",
            "from a number to a larger one, not from 2 to 1.*--set learning_rate",
        ),
        ("learning_rate=1:nan", "from a number to a larger one"),
        ("learning_rate=0:1:log", "begins at 0, where there is no logarithm"),
    ],
)
def test_a_range_that_cannot_be_is_refused(written: str, message: str) -> None:
    with pytest.raises(GradleakError, match=message):
        read_range(written)


def test_held_fields_are_not_searched_unless_a_range_names_them() -> None:
    held = read_written_fields("lamp_l2l1:norm_weight=3,prior_weight=60")
    fields = {one.field for one in ranges_for(LampL2L1(), held, ())}
    assert "l1_weight" in fields and not fields & held
    assert "norm_weight" in {
        one.field
        for one in ranges_for(LampL2L1(), held, [SearchRange.between("norm_weight", 1, 2)])
    }


@pytest.mark.parametrize(
    ("attack", "field", "message"),
    [
        (Tag(), "learnin_rate", "'tag' has no field 'learnin_rate' .did you mean 'learning_rate'"),
        (LampCos(), "l1_weight", "'lamp_cos' has no field 'l1_weight'.*Numbers: steps"),
        (LampCos(), "labels", "labels of attack 'lamp_cos' is not a number"),
    ],
)
def test_a_field_that_cannot_be_searched_is_refused_by_name(
    attack: Attack, field: str, message: str
) -> None:
    with pytest.raises(GradleakError, match=message):
        ranges_for(attack, NOTHING, [SearchRange.between(field, 1, 2)])


def test_an_attack_without_default_ranges_needs_one() -> None:
    with pytest.raises(
        GradleakError, match="nothing to tune in lamp_quick: add a range, such as --range"
    ):
        ranges_for(LampQuick(), NOTHING, ())
