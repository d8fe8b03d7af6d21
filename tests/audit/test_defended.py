"""Audits under a defense: who ignored it, how many draws were attacked, and what it proves."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gradleak.audit import AuditSpec, run_audit
from gradleak.core.errors import GradleakError
from gradleak.records.schema import GuaranteeRecord, Record
from gradleak.report.verdict import UNEXPLAINED, write_epsilons, write_guarantees


def audited(defenses: Sequence[str], **changes: Any) -> Record:
    settings = {
        "target": "tiny",
        "attacks": ["dlg:steps=2", "dlg:steps=2,adaptive=false", "blind"],
        "limit": 2,
        **changes,
    }
    return run_audit(
        AuditSpec.from_plain({**settings, "defenses": list(defenses), "metrics": ["rouge1"]})
    ).record


def list_flags(record: Record) -> dict[str, set[str]]:
    new = {"not_adaptive", "one_draw", "seen_before_defense"}
    return {
        key: {flag.name for flag in attack.flags} & new for key, attack in record.attacks.items()
    }


def test_who_ignores_a_defense_is_flagged() -> None:
    assert list_flags(audited(["pruning"])) == {
        "dlg:steps=2": set(),
        "dlg:steps=2,adaptive=false": {"not_adaptive"},
        "blind": set(),
    }
    assert list_flags(audited([])) == {
        "dlg:steps=2": set(),
        "dlg:steps=2,adaptive=false": set(),
        "blind": set(),
    }


def test_who_is_not_told_of_a_defense_cannot_adapt() -> None:
    told = ["labels", "lengths", "batch_size"]
    assert list_flags(audited(["sign"], know=told, attacks=["dlg:steps=2"])) == {
        "dlg": {"not_adaptive"}
    }


def test_one_draw_of_a_random_defense_is_flagged_and_two_are_not() -> None:
    one, two = (
        audited(["masking:fraction_zeroed=0.5"], attacks=["dlg:steps=2"], draws=draws)
        for draws in (1, 2)
    )
    assert list_flags(one) == {"dlg": {"one_draw"}} and {flag.name for flag in one.flags} >= {
        "one_draw"
    }
    assert list_flags(two) == {"dlg": set()}
    assert [batch.update_norm for batch in two.attacks["dlg"].batches[:2]] == [
        batch.update_norm for batch in one.attacks["dlg"].batches
    ]
    assert len({batch.update_norm for batch in two.attacks["dlg"].batches}) == 4


def test_draws_of_one_secret_are_not_counted_as_secrets() -> None:
    one, three = (audited([], attacks=["dlg:steps=2"], draws=draws) for draws in (1, 3))
    assert one.data == replace(three.data, hash=one.data.hash)
    few = next(flag for flag in three.flags if flag.name == "few_examples")
    assert few.detail.startswith("2 examples")
    ours, theirs = (record.attacks["dlg"].scores["rouge1"] for record in (one, three))
    assert theirs.n == 6
    assert three.worst_case["rouge1"].high - three.worst_case["rouge1"].low >= 0.99 * (
        theirs.high - theirs.low
    )
    assert ours.high - ours.low > 0


def test_draws_count_from_one() -> None:
    with pytest.raises(GradleakError, match="draws count from 1"):
        audited([], draws=0)


def test_noise_of_the_server_is_said_to_come_too_late() -> None:
    pytest.importorskip("opacus")
    record = audited(["central_dp"], attacks=["dlg:steps=2"])
    assert list_flags(record) == {"dlg": {"seen_before_defense"}}
    assert all("not against the server" in line for line in write_guarantees(record))


def test_a_record_says_which_accountant_found_which_epsilon() -> None:
    pytest.importorskip("opacus")
    record = audited(
        ["dp_sgd:noise_multiplier=1,clip=0.5,sampling_rate=0.01,steps=1000"],
        attacks=["dlg:steps=2"],
        draws=2,
    )
    alone, run = write_guarantees(Record.from_json(record.to_json()))
    assert (
        alone
        == "dp_sgd, one release, per example: ε 4.377 (analytic Gaussian), ε 4.387 (PRV (Opacus)),"
        " ε 4.729 (RDP (Opacus)) at δ 1e-05"
    )
    assert (
        run
        == "dp_sgd, whole run (q = 0.01, T = 1,000), per example: ε 1.838 (PRV (Opacus)), ε 2.101"
        " (RDP (Opacus)) at δ 1e-05"
    )
    assert list_flags(record) == {"dlg": set()}


@pytest.mark.parametrize("kept", [False, True], ids=["just audited", "read from its file"])
def test_a_record_says_why_there_is_no_epsilon(kept: bool) -> None:
    pytest.importorskip("opacus")
    for noise, expected in (
        (
            "0",
            (
                "ε infinite: there is no noise, so nothing is proven (analytic Gaussian, PRV"
                " (Opacus), RDP (Opacus)) at δ 1e-05"
            ),
        ),
        (
            "0.01",
            (
                "ε not known: the privacy loss is too large for this accountant to compute (PRV"
                " (Opacus)), ε 5612 (RDP"
            ),
        ),
    ):
        record = audited(
            [f"dp_sgd:noise_multiplier={noise},sampling_rate=1,steps=1"], attacks=["blind"]
        )
        alone, _ = write_guarantees(Record.from_json(record.to_json()) if kept else record)
        assert expected in alone


def test_a_record_of_before_reasons_were_kept_says_that_epsilon_is_not_known() -> None:
    old = GuaranteeRecord("dp_sgd", "whole run", "example", "PRV (Opacus)", None, 1e-5)
    assert list(write_epsilons([old])) == [f"ε {UNEXPLAINED} (PRV (Opacus))"]
    assert UNEXPLAINED.startswith("not known: ")
