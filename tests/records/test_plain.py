"""Laws of the codec: what it writes it reads back, and what does not fit is refused by place."""

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from gradleak.records.files import RecordError
from gradleak.records.plain import from_plain, to_plain


@dataclass(frozen=True)
class Leaf:
    pixels: bytes
    fate: Literal["ran", "cut"] = "ran"
    loss: float | None = None


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...]
    pair: tuple[int, float]
    by_name: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


TREE = Tree((Leaf(b"\x00\xff"), Leaf(b"", "cut", 0.5)), (1, 2.0), {"a": [0.5, 1.0]})


def test_what_is_written_is_read_back() -> None:
    assert from_plain(Tree, json.loads(json.dumps(to_plain(TREE))), "tree") == TREE


def test_what_is_not_finite_is_null_unless_it_is_to_be_kept() -> None:
    pair = Tree((), (1, math.inf))
    assert to_plain(pair)["pair"] == [1, None]
    kept = json.loads(json.dumps(to_plain(pair, keep_nan=True)))
    assert from_plain(Tree, kept, "tree") == pair
    assert math.isnan(from_plain(Tree, to_plain(pair), "tree").pair[1])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"leaves": "my secret"}, "tree.leaves cannot be of type str"),
        ({"leaves": [{"pixels": "", "loss": "my secret"}]}, r"tree.leaves\[0\].loss cannot be"),
        ({"leaves": [{"pixels": ""}, {}]}, r"lacks tree.leaves\[1\].pixels"),
        ({"pair": [1, 2, 3]}, "tree.pair must hold 2 values, not 3"),
        ({"pair": [True, 1.0]}, "cannot be of type bool"),
        ({"by_name": {"a": [0.5, "my secret"]}}, r"tree.by_name.a\[1\] cannot be of type str"),
        ({"notes": "my secret"}, "tree.notes cannot be of type str"),
        ({"pair": 1}, "tree.pair cannot be of type int"),
        ([], "tree cannot be of type list"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place_and_never_quoted(
    broken: Any, message: str
) -> None:
    plain = {**to_plain(TREE), **broken} if isinstance(broken, dict) else broken
    with pytest.raises(RecordError, match=message) as refused:
        from_plain(Tree, plain, "tree")
    assert "my secret" not in str(refused.value)
