"""How much memory may be used, and how much was."""

import pytest
import torch

from gradleak.core.errors import GradleakError
from gradleak.core.memory import (
    free_memory,
    in_words,
    limit_by_default,
    measured_peak,
    memory_left,
    parse_memory,
    used_memory,
)

CPU = torch.device("cpu")
BLOCK = 200_000_000


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("6GB", 6 * 10**9),
        ("512MB", 512 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("800 mb", 8 * 10**8),
        ("2g", 2 * 10**9),
        ("4096", 4096),
    ],
)
def test_amounts_are_read_as_people_write_them(text: str, amount: int) -> None:
    assert parse_memory(text) == amount


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0MB", "6 apples", "1.2.3GB", "iB"])
def test_what_is_no_amount_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(GradleakError, match="is no amount of memory: write for example 6GB"):
        parse_memory(text)


def test_amounts_are_said_in_short() -> None:
    assert [in_words(12.4e9), in_words(1.5e9), in_words(3e8)] == ["12 GB", "1.5 GB", "300 MB"]


def test_what_is_left_is_the_limit_less_what_is_held() -> None:
    if not used_memory(CPU):
        pytest.skip("this system does not say what a process holds")
    assert memory_left(1000, CPU) == 0  # and what the tests before have freed is handed back
    held = used_memory(CPU)
    assert memory_left(held + 10**9, CPU) == pytest.approx(10**9, rel=0.2)


def test_without_a_limit_less_than_all_that_is_free_may_be_used() -> None:
    free, limit = free_memory(CPU), limit_by_default(CPU)
    if free is None or limit is None:
        pytest.skip("this system does not say what is free")
    assert 0 < memory_left(None, CPU) < free_memory(CPU)  # type: ignore[operator]
    assert limit < used_memory(CPU) + free


def test_the_peak_is_seen_though_what_made_it_is_gone() -> None:
    held = used_memory(CPU)
    if not held:
        pytest.skip("this system does not say what a process holds")
    with measured_peak(CPU) as peak:
        block = torch.ones(BLOCK // 4)
        torch.cumsum(block, 0, out=block)  # long enough for a look
        del block
    assert peak.bytes is not None
    assert held + 0.9 * BLOCK < peak.bytes < held + 3 * BLOCK
