"""Secrets with a form: all of it is tried, and the rank is what brute force says."""

import math
import re

import pytest
import torch

from gradleak.bounds.exposure import expose, find_form, list_forms, make_names
from gradleak.core.batch import Example
from gradleak.core.target import Target
from gradleak.defenses.differential_privacy import DpSgd
from gradleak.matching.noisy_channel import Likelihood, read_channel


@pytest.mark.parametrize(
    ("secret", "name", "count"),
    [
        ("4471", "4 digits", 10_000),
        ("07", "2 digits", 100),
        ("1999-02-28", "a day", 36_525),
        ("555-0142", "555-01xx", 100),
        ("Belchilia", "a made-up name", 5000),
    ],
)
def test_a_form_lists_all_its_members_once(secret: str, name: str, count: int) -> None:
    form = find_form(secret)
    assert form is not None
    assert form.name == name
    assert len(set(form.options)) == len(form.options) == count
    assert secret in form.options


@pytest.mark.parametrize("secret", ["1999-02-30", "2031-01-01", "violet", "123456", "", "4"])
def test_other_secrets_have_no_form(secret: str) -> None:
    assert find_form(secret) is None


def test_names_are_words_of_letters() -> None:
    assert all(re.fullmatch("[A-Z][a-z]+", name) for name in make_names())


def make_example() -> Example:
    text = "my pin is 47 ."
    start = text.index("47")
    return Example(text, 0, ((start, start + 2),))


@pytest.mark.parametrize("noise_multiplier", [1e-4, 0.05, 1e4])
def test_the_rank_is_that_of_brute_force(tiny64: Target, observe, noise_multiplier: float) -> None:  # type: ignore[no-untyped-def]
    example, defenses = make_example(), (DpSgd(clip=0.5, noise_multiplier=noise_multiplier),)
    ((span, form),) = list_forms(example)
    seen = observe(tiny64, (example.text,), [0], defenses=defenses)
    private = tiny64.private_batch([example])
    channel = read_channel(defenses, seen.protocol, 1)
    score = Likelihood(seen, private.batch, 0, channel)
    found = expose(tiny64, example, private.batch, 0, private.lengths[0], span, form, score)
    assert found is not None
    rows = tiny64.encode([example.text.replace("47", f"{number:02}") for number in range(100)])
    assert {len(row) for row in rows} == {private.lengths[0]}
    assert (found.options, found.dropped) == (100, 0)
    values = score(torch.tensor(rows))
    assert found.rank == 1 + int((values > values[47] + 1e-6).sum())
    assert found.posterior == pytest.approx(float(values.softmax(0)[47]))
    assert 0 <= found.bits <= math.log2(100) + 1e-9
    if noise_multiplier < 1e-3:
        assert found.rank == 1
        assert found.bits == pytest.approx(math.log2(100))
    if noise_multiplier > 1e3:
        assert found.posterior == pytest.approx(0.01, rel=0.05)
