"""A small whole record, with as many attacks as asked."""

from collections.abc import Callable
from typing import Any

import pytest

from gradleak.records.flags import RaisedFlag
from gradleak.records.schema import (
    AttackRecord,
    BatchRecord,
    DataRecord,
    ExampleRecord,
    Record,
    Score,
    SecretRecord,
    TargetRecord,
)

SECRET = "My PIN is 4471"


@pytest.fixture
def make_record() -> Callable[..., Record]:
    def make(
        attacks: tuple[str, ...] = ("tag",),
        mean: float | None = 0.5,
        flags: tuple[str, ...] = (),
        kept: bool = False,
        guess: str | None = "is 4471 my dog",
    ) -> Record:
        low, high = (None, None) if mean is None else (mean - 0.1, mean + 0.1)
        scores = {
            "rouge1": Score(mean, low, high, 0.2, 0.1, 0.3, "fraction", "higher", 1),
            "secret_recall": Score(None, None, None, None, None, None, "fraction", "higher", 0),
        }
        spec: dict[str, Any] = {"name": "tag", "steps": 3}
        example = ExampleRecord(0, 0, guess, guess, False, {"rouge1": mean}, {"rouge1": 0.2})
        batch = BatchRecord(
            0,
            0.1,
            0.1,
            0.2,
            3.0,
            ((0, 5.0), (3, 1.0)),
            ((0, ("the dog",)), (3, ("is 4471 my dog",))),
            1.5,
            3,
        )
        raised = tuple(RaisedFlag(name, f"Why {name}.") for name in flags)
        return Record(
            created="2026-01-02T03:04:05+00:00",
            spec={
                "data": {"name": "canaries", "secrets_only": False},
                "defenses": [],
                "seed": 7,
                "attacks": list(attacks),
            },
            versions={},
            machine={"device": "cpu"},
            data=DataRecord("ab12", 1, 1),
            target=TargetRecord("tiny", "ff00", 100, 50),
            secrets=(SecretRecord(0, 0, "cd34" * 16, 6, SECRET if kept else None),),
            attacks={
                name: AttackRecord({**spec, "name": name}, scores, (example,), (batch,), (), raised)
                for name in attacks
            },
            worst_case=scores,
        )

    return make
