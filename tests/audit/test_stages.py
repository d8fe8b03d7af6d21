"""Attacks made of several: each one's own score, on the batches that reached it."""

from pathlib import Path

from gradleak.audit import AuditSpec, run_audit
from gradleak.records.schema import Record


def test_a_portfolio_keeps_the_score_and_cost_of_each_of_its_attacks(tmp_path: Path) -> None:
    (tmp_path / "short.csv").write_text("text,label\nthe cat is red .,1\nshe never paid the bank,0\n")
    plain = {
        "target": "tiny",
        "data": str(tmp_path / "short.csv"),
        "limit": 2,
        "attacks": ["portfolio:steps=3,starts=2,restarts=0"],
    }
    record = run_audit(AuditSpec.from_plain(plain)).record
    (attack,) = record.attacks.values()
    assert attack.stages[0].attack == "span"
    assert attack.stages[0].batches == (0, 1)
    assert attack.stages[0].scores["exact_match"].n == 2
    assert sum(stage.seconds for stage in attack.stages) == attack.cost.seconds
    assert Record.from_json(record.to_json()).attacks == record.attacks


def test_an_attack_that_is_only_itself_has_no_stages() -> None:
    record = run_audit(AuditSpec.from_plain({"target": "tiny", "limit": 1, "attacks": ["tag:steps=1"]})).record
    assert record.attacks["tag"].stages == ()
