"""An audit that is interrupted at any moment loses one call at most, and ends with the record of
an undisturbed one."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.attacks.recipes.lamp import LampPlus
from gradleak.attacks.span import Span
from gradleak.audit import AuditSpec, run_audit
from gradleak.audit.client import private_batches
from gradleak.audit.group import batches_in_a_call
from gradleak.audit.runner import has_parts
from gradleak.core.attack import Attack, Bench, Cost, Reconstruction
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.records.schema import Record

MEMBERS = (Span, EnergyAttack, LampPlus)
BATCHES = 8


class Counter:
    """Members that count their calls instead of taking long: which member has which
    observations, and when to interrupt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[tuple[str, tuple[int, ...]]] = []
        self.stop_at: int | None = None
        for member in MEMBERS:
            monkeypatch.setattr(member, "reconstruct", self._stand_in(member))

    def _stand_in(self, member: type[Attack]) -> Any:
        def reconstruct(
            attack: Attack, observations: Sequence[Observation], bench: Bench
        ) -> list[Reconstruction]:
            self.begun.append((attack.name, tuple(one.index for one in observations)))
            if self.stop_at == len(self.begun):
                raise KeyboardInterrupt
            return [self._guess(member, one, bench) for one in observations]

        return reconstruct

    def _guess(
        self, member: type[Attack], observation: Observation, bench: Bench
    ) -> Reconstruction:
        """Words at random, by the observation's own stream; every third is certified, so that
        members get different ones."""
        generator = bench.streams_of(observation).child(member.__name__, 0).generator()
        lengths = observation.knows.lengths or (4,)
        words = tuple(
            tuple(torch.randint(5, 100, (length,), generator=generator).tolist())
            for length in lengths
        )
        certified = observation.index % 3 == MEMBERS.index(member)  # type: ignore[arg-type]
        return Reconstruction(words, certified, cost=Cost(1.0, 1))


def settings(**changes: Any) -> AuditSpec:
    plain = {
        "target": "tiny",
        "dtype": "float64",
        "limit": BATCHES,
        "prior": "frequent_words",
        "metrics": ["rouge1", "exact_match"],
    }
    return AuditSpec.from_plain({**plain, **changes})


def without_time(record: Record) -> Any:
    plain = record.to_json()
    # Hashes are keyed, and each folder has a key of its own
    for name in ("created", "machine", "data", "secrets"):
        del plain[name]
    return _without_cost(plain)


def _without_cost(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_cost(item)
            for key, item in value.items()
            if key not in ("cost", "seconds")
        }
    return [_without_cost(item) for item in value] if isinstance(value, list) else value


def assert_interrupts_cost_a_call_each(
    spec: AuditSpec, interrupts: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradleak.audit.group.batches_in_a_call", lambda *_: 2)
    counter = Counter(monkeypatch)
    calm = run_audit(spec, out=folder / "calm").record
    wanted = list(counter.begun)
    # Members on pairs of batches, where any of a pair is left to them
    assert len(wanted) == len(set(wanted)) > spec.limit
    counter.begun.clear()
    draw = random.Random(0)
    for number in range(interrupts):
        # Calls that it gets through before the one in which it is cut
        finished = number % 3 == 0 and draw.randint(0, 1)
        counter.stop_at = len(counter.begun) + 1 + finished
        with pytest.raises(KeyboardInterrupt):
            run_audit(spec, out=folder / "cut")
    counter.stop_at = None
    found = run_audit(spec, out=folder / "cut").record
    assert set(counter.begun) == set(wanted)
    # Each interrupt cost the call in which it fell, and no other
    assert len(counter.begun) == len(wanted) + interrupts
    assert without_time(found) == without_time(calm)
    assert not has_parts(folder / "cut", [spec])


def test_interrupts_repeat_a_call_each_and_leave_the_record_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_interrupts_cost_a_call_each(settings(limit=3), 4, tmp_path, monkeypatch)


@pytest.mark.long
def test_twenty_interrupts_of_eight_batches_do_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_interrupts_cost_a_call_each(settings(), 20, tmp_path, monkeypatch)


def test_a_portfolio_that_is_cut_is_kept_as_each_member_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter(monkeypatch)
    for stop, ran in ((1, ["span"]), (3, ["span", "energy"]), (4, ["energy"])):
        counter.begun.clear()
        counter.stop_at = stop if stop == 1 else len(ran)
        with pytest.raises(KeyboardInterrupt):
            run_audit(settings(), out=tmp_path)
        assert [name for name, _ in counter.begun] == ran
        assert has_parts(tmp_path, [settings()]) == (stop > 1)
    counter.begun.clear()
    counter.stop_at = None
    stages = run_audit(settings(), out=tmp_path).record.attacks["portfolio"].stages
    assert [name for name, _ in counter.begun] == ["energy", "lamp_plus"]
    assert [stage.attack for stage in stages] == ["span", "energy", "lamp_plus"]
    assert len(stages[0].batches) == BATCHES > len(stages[1].batches) > len(stages[2].batches) > 0


def test_a_part_that_was_being_written_is_no_part(tmp_path: Path) -> None:
    folder = tmp_path / "parts" / f"{settings().id}-cpu-ab"
    folder.mkdir(parents=True)
    for name in ("call.json", ".0-0-8.json.3f2a.tmp", ".tmpx1.tmp"):
        (folder / name).write_text("[]")
    assert not has_parts(tmp_path, [settings()])
    (folder / "0-0-8.checkpoint").write_text("{}")
    assert has_parts(tmp_path, [settings()])


def test_a_call_is_foretold_a_minute_whatever_the_machine(tiny: Target) -> None:
    private = private_batches(settings(), tiny)
    few, many = LampPlus(steps=200), LampPlus(steps=2000)
    assert batches_in_a_call(few, tiny, private) // batches_in_a_call(many, tiny, private) == 10
    assert batches_in_a_call(LampPlus(steps=10**9), tiny, private) == 1  # never less than a batch
    (portfolio,) = settings().attacks
    assert (
        batches_in_a_call(portfolio, tiny, private)
        == batches_in_a_call(many, tiny, private)
        > BATCHES
    )


def test_a_time_limit_is_for_a_whole_group_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradleak.audit.group.batches_in_a_call", lambda *_: 1)
    counter = Counter(monkeypatch)
    run_audit(settings(time_limit=600.0, limit=3), out=tmp_path)
    assert counter.begun[0] == ("span", (0, 1, 2))
    counter.begun.clear()
    run_audit(settings(limit=3), out=tmp_path)
    assert counter.begun[0] == ("span", (0,))
