"""Attacks made of several: each one's own score, on the batches that reached it."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.attacks.recipes.lamp import LampPlus
from gradleak.attacks.span import Span
from gradleak.audit import AuditSpec, run_audit
from gradleak.audit.outcomes import CallParts, Outcome
from gradleak.audit.scoring import facts_behind
from gradleak.core.attack import Bench, Cost, Reconstruction, Stage
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.records.schema import Record
from gradleak.report.terminal.record_screen import print_record


def test_a_portfolio_keeps_the_score_and_cost_of_each_of_its_attacks(tmp_path: Path) -> None:
    (tmp_path / "short.csv").write_text(
        "text,label\nthe cat is red .,1\nshe never paid the bank,0\n"
    )
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
    record = run_audit(
        AuditSpec.from_plain({"target": "tiny", "limit": 1, "attacks": ["tag:steps=1"]})
    ).record
    assert record.attacks["tag"].stages == ()


def refuse(attack: Span, observations: list[Observation], bench: Bench) -> list[Reconstruction]:
    raise GradleakError("This one refuses.")


def fail(
    attack: EnergyAttack, observations: list[Observation], bench: Bench
) -> list[Reconstruction]:
    if any(one.index == 1 for one in observations):
        raise MemoryError("no room")
    return [Reconstruction(((2, 3),)) for _ in observations]


def guess(attack: LampPlus, observations: list[Observation], bench: Bench) -> list[Reconstruction]:
    return [
        Reconstruction(tuple((2,) * length for length in one.knows.lengths)) for one in observations
    ]


def test_what_became_of_every_member_is_recorded_flagged_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Span, "reconstruct", refuse)
    monkeypatch.setattr(EnergyAttack, "reconstruct", fail)
    monkeypatch.setattr(LampPlus, "reconstruct", guess)
    plain = {"target": "tiny", "limit": 2, "attacks": ["portfolio"], "prior": "frequent_words"}
    record = run_audit(AuditSpec.from_plain(plain), out=tmp_path).record
    (attack,) = record.attacks.values()
    assert [(stage.attack, stage.batches) for stage in attack.stages] == [
        ("span", ()),
        ("energy", (0,)),
        ("lamp_plus", (0, 1)),
    ]
    fates = [
        [(one.fate, one.batches, one.reason) for one in stage.fates] for stage in attack.stages
    ]
    assert fates == [
        [("refused", (0, 1), "This one refuses.")],
        [("failed", (1,), "MemoryError: no room")],
        [],
    ]
    details = {flag.name: flag.detail for flag in attack.flags}
    assert (
        details["member_failed"]
        == "span refused: This one refuses. energy failed: MemoryError: no room."
    )
    assert "member_out_of_time" not in details
    assert (
        Record.from_json(json.loads(json.dumps(record.to_json()))).attacks["portfolio"].stages
        == attack.stages
    )
    console = Console(record=True, width=200, file=io.StringIO())
    print_record(console, record, {})
    said = console.export_text()
    assert "span: refused 2 batches: This one refuses." in said
    assert "failed on 1 batch: MemoryError: no room" in said
    assert "! member_failed (portfolio): span refused" in said


def test_a_part_keeps_what_became_of_members(tmp_path: Path) -> None:
    parts = CallParts(tmp_path, "audit")
    stages = (
        Stage("span", (), False, Cost(1.0), "refused", "It does not apply."),
        Stage("energy", ((1, 2),), False, Cost(2.0, 3)),
    )
    outcome = Outcome(Reconstruction(((1, 2),), stages=stages), 0.5)
    parts.save("part", [outcome])
    assert parts.load("part") == [outcome]


def test_under_noise_a_wrong_word_of_energys_is_a_failed_search_by_so_many_nats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = {"target": "tiny", "limit": 1, "attacks": ["energy"], "prior": "frequent_words"}
    spec = AuditSpec.from_plain(
        plain | {"defenses": ["gaussian_noise:std=0.01"], "dtype": "float64"}
    )
    (example,) = spec.data.load(1)
    words: list[tuple[int, ...]] = []

    def wrong(
        attack: EnergyAttack, observations: list[Observation], bench: Bench
    ) -> list[Reconstruction]:
        target = observations[0].target
        right = target.encode([example.text])[0]
        words.append((*right[:2], target.encode(["bank"])[0][1], *right[3:]))
        return [Reconstruction((words[-1],))]

    monkeypatch.setattr(EnergyAttack, "reconstruct", wrong)
    attack = run_audit(spec).record.attacks["energy"]
    (batch,) = attack.batches
    assert batch.objective_unit == "nats" and batch.objective_rounding == 1.0
    assert batch.objective_at_guess is not None and batch.objective_at_truth is not None
    worse = batch.objective_at_guess - batch.objective_at_truth
    assert worse > 10
    details = {flag.name: flag.detail for flag in attack.flags}
    assert (
        details["search_failed"]
        == f"The guess is worse than the truth in 1 of 1 batches, by {worse:.3g} nats at the"
        " median."
    )
    assert "other_answer_fits" not in details


def proven_by(member: str, certified: bool = True) -> Outcome:
    stage = Stage(member, ((2, 3),), certified, Cost())
    return Outcome(Reconstruction(((2, 3),), certified=certified, stages=(stage,)), 1.0)


def test_guesses_rest_on_what_the_attack_was_told_that_proved_them() -> None:
    spec = AuditSpec.from_plain({"target": "tiny", "limit": 2, "attacks": ["portfolio"]})
    (attack,) = spec.attacks
    assert not facts_behind(spec, attack, [proven_by("span")] * 2) & {Fact.LABELS, Fact.LENGTHS}
    assert Fact.LENGTHS in facts_behind(spec, attack, [proven_by("span"), proven_by("energy")])
    assert facts_behind(
        spec, attack, [proven_by("span"), proven_by("span", certified=False)]
    ) == spec.facts_for(attack)
    assert facts_behind(spec, attack, [proven_by("lamp_plus")]) >= {Fact.LABELS, Fact.LENGTHS}


def test_what_is_proven_needs_no_objective_and_is_no_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proven = [replace(Reconstruction(((2, 3),)), certified=True)]
    monkeypatch.setattr(
        Span, "reconstruct", lambda attack, observations, bench: proven * len(observations)
    )
    record = run_audit(
        AuditSpec.from_plain({"target": "tiny", "limit": 1, "attacks": ["span"]})
    ).record
    assert [flag.name for flag in record.attacks["span"].flags] == ["few_examples"]
