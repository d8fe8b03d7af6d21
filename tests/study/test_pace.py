"""What `check` foretells: every phase of a search counts, and so does every kind of cell."""

from pathlib import Path

import pytest

from gradleak.core import attack
from gradleak.core.attack import Progress
from gradleak.study.cells import read_study
from gradleak.study.pace import probe_cells, stretch


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(attack, "time", made)
    return made


def at(clock: Clock, moment: float, progress: Progress, done: int, total: int) -> None:
    clock.now = moment
    progress.report(done, total)


def test_a_search_that_was_cut_in_its_first_phase_is_not_taken_for_done_with_the_second(
    clock: Clock,
) -> None:
    progress = Progress()
    at(clock, 2.0, progress, 0, 300)  # 2 s for the start
    at(clock, 3.0, progress, 10, 300)  # a tenth of a second a step
    # Out of time: one of two rounds, 5 s each; half of it, as the blackboard has it
    at(clock, 8.0, progress, 1, 2)
    assert stretch(progress, 0.0, 8.0) == pytest.approx(2 + 300 * 0.1 + 2 * 5)


def test_further_tries_are_foretold_and_what_follows_the_last_report_counts(clock: Clock) -> None:
    progress = Progress(tries=3)
    at(clock, 1.0, progress, 0, 10)
    at(clock, 2.0, progress, 5, 10)
    assert stretch(progress, 0.0, 2.5) == pytest.approx(3 * (1 + 2 + 0.5))


def test_a_phase_of_one_report_goes_on_as_it_began(clock: Clock) -> None:
    progress = Progress()
    at(clock, 4.0, progress, 2, 8)
    assert stretch(progress, 0.0, 4.0) == pytest.approx(4 + 6 * 2)
    assert stretch(Progress(), 0.0, 4.0) == 4.0


def test_kinds_of_defense_are_tried_apart_and_batches_are_counted_over_all_cells(
    tmp_path: Path,
) -> None:
    path = tmp_path / "study.yaml"
    attacks = "attacks: ['tag:steps=4', 'lamp_quick:steps=4000,starts=1,polish_rounds=1']"
    defenses = "defenses: [[], [sign], ['gaussian_noise:std=0.1'], ['gaussian_noise:std=0.2']]"
    path.write_text(f"target: tiny\nlimit: 3\n{attacks}\n{defenses}\n")
    found = {
        (one.attack, one.defense): one for one in probe_cells(read_study(path).cells, "cpu", 0.3)
    }
    assert {(name, defense) for name, defense in found if name.startswith("tag")} == {
        ("tag:steps=4", "none"), ("tag:steps=4", "sign"), ("tag:steps=4", "gaussian_noise"),
    }  # fmt: skip
    assert found["tag:steps=4", "gaussian_noise"].batches == 6  # of two cells
    assert all(one.seconds > 0 and not one.problem for one in found.values())
    cut = next(
        one
        for (name, defense), one in found.items()
        if name.startswith("lamp_quick") and defense == "none"
    )
    # It ended with the last round of its last phase, and is not done
    assert not cut.whole and cut.seconds_each > 2 * cut.tried
