"""Audits of causal language models, end to end: they run, and say no more than is so of what the
attacker was told."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.audit import AuditSpec, run_audit
from gradleak.audit.client import observe, private_batches
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact
from gradleak.core.target import Target

TEXTS = "the cat is red .\nmy phone number is five .\nshe left the bank\nwe moved on monday\n"


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A plain text file: a language model needs no labels."""
    path = tmp_path / "notes.txt"
    path.write_text(TEXTS)
    return str(path)


def settings(data: str, **changes: Any) -> AuditSpec:
    plain = {
        "target": "tiny_causal",
        "data": data,
        "limit": 2,
        "batch_size": 2,
        "attacks": ["blind"],
    }
    return AuditSpec.from_plain(plain | changes)


@pytest.mark.parametrize("target", ["tiny_causal", "tiny_causal:shape=llama"])
def test_an_audit_runs_and_says_what_the_attacker_was_told(data: str, target: str) -> None:
    attacks = ["blind", "tag:steps=5", "dlg:steps=2", "lamp_cos:steps=2,starts=2"]
    record = run_audit(settings(data, target=target, attacks=attacks)).record
    assert record.spec["know"] == ["batch_size", "defense", "lengths"]
    assert record.attacks["blind"].knowledge == ()
    for name in ("tag", "dlg", "lamp_cos"):
        attack = record.attacks[name]
        assert attack.knowledge == ("batch_size", "lengths")
        details = [flag.detail for flag in attack.flags if flag.name == "generous_knowledge"]
        assert details == ["The attack was given lengths."]
        # The truth explains the update, and the labels of a guess are the guess
        for batch in attack.batches:
            assert abs(batch.objective_at_truth) < 1e-3 < batch.objective_at_guess
    for attack in record.attacks.values():
        assert len(attack.examples) == 4
        assert attack.scores["rouge1"].mean is not None


def test_few_steps_find_words_of_a_short_text(data: str) -> None:
    record = run_audit(
        settings(data, limit=1, batch_size=1, attacks=["lamp_cos:steps=150,starts=20"])
    ).record
    score = record.attacks["lamp_cos"].scores["rouge1"]
    assert score.mean >= 0.6 > score.blind


def test_labels_are_neither_granted_nor_asked_for(data: str) -> None:
    spec = settings(data, attacks=["tag:steps=1"], know=["lengths", "batch_size"])
    assert spec.granted == (Fact.LENGTHS, Fact.BATCH_SIZE)
    everything = settings(data, know=[str(fact) for fact in Fact])
    target = everything.target.open(torch.device("cpu"))
    observation = observe(everything, target, private_batches(everything, target)[0], 0)
    assert observation.knows.labels is None
    assert observation.knows.facts == {Fact.LENGTHS, Fact.BATCH_SIZE, Fact.DEFENSE}
    # One setting, however it is written
    assert everything.id == settings(data, know=["lengths", "batch_size", "defense"]).id
    with pytest.raises(GradleakError, match="tag requires lengths; this audit grants batch_size"):
        settings(data, attacks=["tag"], know=["labels", "batch_size"])


def test_a_classifier_still_needs_its_labels(data: str) -> None:
    with pytest.raises(GradleakError, match="tag requires labels"):
        settings(data, target="tiny", attacks=["tag"], know=["lengths", "batch_size"])


def test_a_guess_is_its_own_labels(causal: Target) -> None:
    batch = causal.batch_of([(5, 6, 7), (8, 9)], None)
    assert batch.ids is not None
    assert torch.equal(batch.labels, batch.ids)
    assert batch.mask.tolist() == [[True, True, True], [True, True, False]]


@pytest.mark.parametrize("lengths", ["derived", "enumerate"])
def test_lengths_can_be_found_without_being_told(data: str, lengths: str) -> None:
    attack = f"tag:steps=1,lengths={lengths},longest=8"
    record = run_audit(
        settings(data, limit=1, batch_size=1, attacks=[attack], know=["batch_size"])
    ).record
    assert record.attacks["tag"].knowledge == ("batch_size",)
    if lengths == "derived":
        assert len(record.attacks["tag"].examples[0].guess_legacy) > 0
