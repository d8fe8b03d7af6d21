"""A small whole record."""

import pytest

from gradleak.records.flags import RaisedFlag
from gradleak.records.schema import (
    AttackRecord,
    BatchRecord,
    CostRecord,
    DataRecord,
    ExampleRecord,
    FindingRecord,
    Record,
    Score,
    SecretRecord,
    TargetRecord,
)


@pytest.fixture
def record() -> Record:
    score = Score(0.5, 0.4, 0.6, 0.1, 0.0, 0.2, "fraction", "higher", 1)
    attack = AttackRecord(
        spec={"name": "lamp_cos", "steps": 20},
        scores={"rouge1": score},
        examples=(
            ExampleRecord(
                0,
                0,
                "a cat",
                "[CLS] a cat [SEP]",
                True,
                {"rouge1": 0.5, "secret_recall": None},
                {"rouge1": 0.1},
            ),
        ),
        batches=(
            BatchRecord(0, 0.1, 0.1, 0.2, 3.0, ((1, 0.5), (2, None)), ((2, ("a cat",)),), 1.5, 20),
        ),
        knowledge=("labels",),
        flags=(RaisedFlag("few_examples", "1 example."),),
        cost=CostRecord(1.5, 20, None),
    )
    return Record(
        created="2026-01-02T03:04:05+00:00",
        spec={"target": "tiny", "attacks": ["lamp_cos"], "seed": 0},
        versions={"python": "3.11"},
        machine={"device": "cpu", "cpu_count": 2},
        data=DataRecord("ab12", 1, 1),
        target=TargetRecord("tiny", "ff00", 100, 50),
        secrets=(SecretRecord(0, 0, "cd34", 5),),
        attacks={"lamp_cos": attack},
        worst_case={"rouge1": score},
        flags=(RaisedFlag("few_examples", "1 example."),),
        findings=(
            FindingRecord(0, "bag_of_words", True, "rows of the word embeddings", 3, (), 1.0, 1.0),
            FindingRecord(0, "distinct_tokens", False, "a rank", 1, (5,)),
        ),
    )
