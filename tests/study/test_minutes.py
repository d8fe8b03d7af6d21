"""A given time is filled by priority, ends when it should, and costs no work: told by a clock
that is set by hand."""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gradleak.audit.group import AuditGroup
from gradleak.audit.outcomes import Outcome
from gradleak.cli import main
from gradleak.core.attack import Cost, Silent
from gradleak.core.errors import GradleakError
from gradleak.records.run_folder import claim
from gradleak.records.store import read_record
from gradleak.study import minutes, pace
from gradleak.study.cells import (
    Cell,
    Job,
    PriorityEntry,
    Share,
    read_priority,
    read_study,
    share_by_priority,
    write_plan,
)
from gradleak.study.grid import run_cells
from gradleak.study.minutes import (
    Allowance,
    TimedRun,
    TimeIsUp,
    fill_minutes,
    read_time,
    ring_after,
)
from gradleak.study.pace import Try
from gradleak.study.state import read_state

HEAD = "target: tiny\nmetrics: [rouge1, exact_match]\n"
Captured = pytest.CaptureFixture[str]


@dataclass
class World:
    """A machine on which a batch takes as many seconds as is written here for its attack, and
    nothing else takes any."""

    seconds: dict[str, float] = field(default_factory=dict)  # by attack; 1 where there is none
    # By a trial; the truth where there is none
    foretold: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    end: float | None = None
    attacked: list[str] = field(default_factory=list)  # attack and number of batches, of every call

    def clock(self) -> float:
        return self.now

    @contextlib.contextmanager
    def alarm(self, seconds: float) -> Iterator[None]:
        self.end = self.now + seconds
        try:
            yield
        finally:
            self.end = None

    def spend(self, seconds: float) -> None:
        if self.end is not None and self.now + seconds > self.end:
            self.now = self.end
            raise TimeIsUp
        self.now += seconds

    def each(self, attack: str) -> float:
        return self.seconds.get(attack, 1.0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made, really = World(), AuditGroup._attack

    def attack(self: AuditGroup, key: str, *rest: Any) -> list[Outcome]:
        observations = rest[1]
        made.attacked.append(f"{key} {len(observations)}")
        made.spend(made.each(key) * len(observations))
        found = really(self, key, *rest)
        return [
            replace(one, reconstruction=replace(one.reconstruction, cost=Cost(made.each(key))))
            for one in found
        ]

    def try_out(spec: object, attack: Any, *_: object) -> list[Try]:
        return [Try(made.foretold.get(attack.name, made.each(attack.name)), 0.0, whole=True)]

    monkeypatch.setattr(AuditGroup, "_attack", attack)
    monkeypatch.setattr(pace, "try_out", try_out)
    return made


def job(folder: Path, name: str, text: str) -> Job:
    (folder / f"{name}.yaml").write_text(HEAD + text)
    study = read_study(folder / f"{name}.yaml")
    write_plan(folder / "runs" / name, study)
    return Job(name, folder / "runs" / name, study.cells)


def fill(
    world: World,
    seconds: float,
    jobs: Sequence[Job],
    entries: Sequence[PriorityEntry] = (),
    **rest: Any,
) -> TimedRun:
    """A stretch of so many seconds and a half, so that none ends at the edge; the reserve comes
    on top."""
    reserve = min(minutes.MOST_RESERVE, (seconds + 0.5) * minutes.RESERVE / (1 - minutes.RESERVE))
    allowance = Allowance(world.now, seconds + 0.5 + reserve, world.clock, world.alarm)
    folder = jobs[0].folder.parent
    return fill_minutes(
        share_by_priority(jobs, entries)[0], folder, ["cpu"], 1, allowance, Silent(), **rest
    )


def titles(summary: TimedRun) -> list[str]:
    return [f"{job.name} {result.cell.title}" for job, result in summary.ran]


def scores(cells: Sequence[Cell], folder: Path) -> list[Any]:
    """All of the records that does not tell of time."""
    records = [read_record(folder / f"{cell.spec.id}.json") for cell in cells]
    return [
        (one.worst_case, {key: attack.examples for key, attack in one.attacks.items()})
        for one in records
    ]


@pytest.mark.parametrize(
    ("words", "seconds"),
    [("90s", 90), ("9m", 540), ("1h30m", 5400), ("2h", 7200), ("1h1m1s", 3661)],
)
def test_times_are_read(words: str, seconds: float) -> None:
    assert read_time(words) == seconds


@pytest.mark.parametrize("words", ["9", "", "0m", "m", "9 minutes", "30m1h", "-9m"])
def test_other_times_are_refused_with_what_to_write(words: str) -> None:
    with pytest.raises(GradleakError, match="write a time such as 90s, 9m or 1h30m"):
        read_time(words)


def know(one: Job, **seconds: float) -> None:
    """As if earlier runs had measured these attacks: cells then share calls from the first on."""
    kinds = dict(kind for cell in one.cells for kind in pace.kinds_of(cell.spec).values())
    measured = {kind: seconds[attack.name] for kind, attack in kinds.items()}
    pace.write_pace(one.folder.parent, pace.machine_of("cpu"), pace.Pace(measured=measured))


def test_cells_that_do_not_fit_are_passed_over_and_smaller_ones_further_down_run(
    tmp_path: Path, world: World
) -> None:
    first = job(tmp_path, "first", "attacks: [blind]\nlimit: [4, 2]\nseed: [0, 1]\n")
    second = job(tmp_path, "second", "attacks: [blind]\nlimit: [3, 1]\n")
    summary = fill(world, 9, [first, second])
    assert titles(summary) == [
        "first limit=4, seed=0",
        "first limit=2, seed=0",
        "first limit=2, seed=1",
        "second limit=1",
    ]
    assert [(one.cell.title, one.seconds) for one in summary.waiting] == [
        ("limit=4, seed=1", pytest.approx(4.0, abs=0.1)),
        ("limit=3", pytest.approx(3.0, abs=0.1)),
    ]
    assert len(read_state(second.folder).finished) == 1
    again = fill(world, 60, [first, second])
    assert (len(again.ran), again.before, again.waiting) == (2, 4, ())


def test_kin_share_a_call_once_their_pace_is_known_as_many_as_fit_with_room(
    tmp_path: Path, world: World
) -> None:
    one = job(tmp_path, "one", "attacks: [blind]\nlimit: [3, 1, 2, 5]\n")
    fill(world, 9, [one])
    # alone, then 1 and 2; a call with 5 more would not end in time
    assert world.attacked == ["blind 3", "blind 3"]
    fill(world, 5, [one])
    assert world.attacked[2:] == ["blind 5"]


def test_a_priority_list_goes_before_the_order_of_the_studies(tmp_path: Path, world: World) -> None:
    first = job(tmp_path, "first", "attacks: [blind, 'tag:steps=2']\nlimit: 2\n")
    second = job(tmp_path, "second", "attacks: [blind, 'tag:steps=2']\nlimit: 2\n")
    entries = [
        PriorityEntry("second", {"attacks": ("tag*",)}),
        PriorityEntry("elsewhere", {}),
        PriorityEntry("second", {}),
    ]
    assert titles(fill(world, 4, [first, second], entries)) == [
        "second attacks=tag:steps=2",
        "second attacks=blind",
    ]
    assert titles(fill(world, 2, [first, second], entries)) == ["first attacks=blind"]


def test_a_cell_that_overruns_is_cut_and_goes_on_from_its_finished_parts(
    tmp_path: Path, world: World
) -> None:
    one = job(tmp_path, "one", "attacks: [['blind', 'tag:steps=2']]\nlimit: [2, 1, 4]\n")
    know(one, blind=0.5, tag=0.5)
    world.seconds = {"blind": 2.0, "tag": 5.0}
    # 2 + 1 + 4 batches are foretold 7 s: two attacks, half a second each
    summary = fill(world, 8, [one])
    assert world.now == pytest.approx(8.5)
    assert summary.ran == () and len(summary.waiting) == 3
    assert world.attacked == ["blind 7"]  # cut in it: no part is finished
    # No longer taken for short
    assert all(waiting.seconds is not None and waiting.seconds > 1 for waiting in summary.waiting)


def test_what_was_cut_is_resumed_as_the_same_call_whatever_fits_by_then(
    tmp_path: Path, world: World
) -> None:
    one = job(tmp_path, "one", "attacks: [['blind', 'tag:steps=2']]\nlimit: [2, 1, 4]\n")
    know(one, blind=1.0, tag=1.0)
    world.seconds = {"tag": 3.0}
    # 2 and 1 are foretold 6 s in one call; 4 do not fit; it takes 12
    assert fill(world, 7, [one]).ran == ()
    assert world.attacked == ["blind 3", "tag 3"]
    assert len(read_state(one.folder).begun) == 2
    summary = fill(world, 100, [one])
    assert world.attacked[2:] == ["tag 3", "blind 4", "tag 4"]  # the blind guess of before was kept
    assert len(summary.ran) == 3 and not (one.folder / "parts").exists()
    run_cells(one.cells, tmp_path / "calm", "cpu", Silent())
    assert scores(one.cells, one.folder) == scores(one.cells, tmp_path / "calm")


def test_a_call_longer_than_any_stretch_adds_up_part_by_part(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AuditGroup, "_count_batches_at_once", lambda self: 2)
    one = job(tmp_path, "one", "attacks: [blind]\nlimit: 6\n")
    know(one, blind=1.0)
    world.seconds = {"blind": 3.0}
    # Foretold 6 s, takes 18: a part is finished, the next is cut
    assert fill(world, 7, [one]).ran == ()
    kept = pace.read_pace(one.folder.parent, pace.machine_of("cpu"))
    # As long as what it finished tells
    assert list(kept.measured.values()) == [pytest.approx(7.5 / 2)]
    assert fill(world, 3, [one]).ran == () and len(world.attacked) == 2  # no part of it fits
    assert fill(world, 10, [one]).ran == ()
    assert world.attacked[2:] == ["blind 2", "blind 2"]
    assert len(fill(world, 12, [one]).ran) == 1
    assert world.attacked[4:] == ["blind 2"]


def test_a_run_without_a_time_goes_on_from_what_was_cut_too(tmp_path: Path, world: World) -> None:
    one = job(tmp_path, "one", "attacks: [['blind', 'tag:steps=2']]\nlimit: [2, 1, 4]\n")
    know(one, blind=1.0, tag=1.0)
    world.seconds = {"tag": 3.0}
    fill(world, 7, [one])
    run_cells(one.cells, one.folder, "cpu", Silent())
    assert world.attacked[2:] == ["tag 3", "blind 4", "tag 4"]


def test_three_stretches_give_the_records_of_an_undisturbed_run(
    tmp_path: Path, world: World
) -> None:
    one = job(tmp_path, "one", "attacks: [blind]\nlimit: [2, 3]\nseed: [0, 1, 2]\n")
    counts = [len(fill(world, 6, [one]).ran) for _ in range(3)]
    assert counts == [2, 2, 2]
    assert world.now == pytest.approx(15.0)
    run_cells(one.cells, tmp_path / "calm", "cpu", Silent())
    assert scores(one.cells, one.folder) == scores(one.cells, tmp_path / "calm")


def test_what_cells_really_take_corrects_what_is_foretold(tmp_path: Path, world: World) -> None:
    one = job(
        tmp_path,
        "one",
        "attacks: ['tag:steps=2']\nlimit: 2\nseed: [0, 1]\ndefenses: [[], [sign]]\n",
    )
    world.foretold, world.seconds = {"tag": 1.0}, {"tag": 3.0}
    summary = fill(world, 13, [one], [PriorityEntry("one", {"defenses": ("none",)})])
    # 2 batches take 6 s and not 2; so does seed 1, and by then it is known that signs, of which
    # nothing ran, do not fit in 1 s
    assert len(summary.ran) == 2
    assert [waiting.seconds for waiting in summary.waiting] == [6.0, 6.0]
    assert [waiting.begun for waiting in summary.waiting] == [False, False]
    kept = pace.read_pace(one.folder.parent, pace.machine_of("cpu"))
    assert set(kept.measured.values()) == {3.0} and set(kept.tried.values()) == {1.0}


def test_what_learns_is_begun_where_it_does_not_fit_unless_it_kept_nothing(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job(tmp_path, "one", "attacks: ['tag:steps=2', blind]\nlimit: 2\n")
    monkeypatch.setattr(minutes, "learns", lambda spec: spec.attacks[0].name == "tag")
    world.seconds = {"tag": 500.0}
    # Too short to keep anything: not begun
    assert titles(fill(world, 80, [one])) == ["one attacks=blind"]
    fill(world, 200, [one])
    assert world.attacked == ["blind 2", "tag 2"]
    fill(world, 200, [one])  # it kept nothing in 200 s: not begun again, as it needs more
    assert len(world.attacked) == 2
    fill(world, 400, [one])
    assert len(world.attacked) == 3
    # Every look finds other checkpoints
    monkeypatch.setattr(minutes, "find_fits", lambda folder: object())
    fill(world, 700, [one])
    fill(world, 700, [one])
    assert len(world.attacked) == 5


def test_cells_of_another_run_are_left_to_it(tmp_path: Path, world: World) -> None:
    one = job(tmp_path, "one", "attacks: [blind]\nlimit: [2, 1]\n")
    with claim(one.folder, one.cells[0].spec.id):
        assert titles(fill(world, 60, [one])) == ["one limit=1"]


def test_a_failure_is_told_and_the_rest_runs(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job(tmp_path, "one", "attacks: [blind, 'tag:steps=2']\nlimit: 1\n")
    calm = AuditGroup._attack

    def fail(self: AuditGroup, key: str, *rest: Any) -> Any:
        if key == "blind":
            raise RuntimeError("out of luck")
        return calm(self, key, *rest)

    monkeypatch.setattr(AuditGroup, "_attack", fail)
    summary = fill(world, 60, [one])
    assert [result.cell.title for _, result in summary.failed] == ["attacks=blind"] and len(
        summary.ran
    ) == 1
    assert fill(world, 60, [one]).failed_before == 1  # and is not tried again
    monkeypatch.setattr(AuditGroup, "_attack", calm)
    assert len(fill(world, 60, [one], retry=True).ran) == 1


def test_the_reserve_is_small_and_counted_from_the_start() -> None:
    assert Allowance(0.0, 540.0, lambda: 100.0).left == 540 - 5 - 100
    assert Allowance(0.0, 24.0, lambda: 0.0).left == pytest.approx(20.0)


def test_the_alarm_ends_what_runs_and_is_gone_afterwards() -> None:
    def go_on_for_ever() -> None:
        with ring_after(0.001):
            while True:
                pass

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeIsUp):
        go_on_for_ever()
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_entries_that_match_nothing_are_told_and_cells_come_once(tmp_path: Path) -> None:
    one = job(tmp_path, "one", "attacks: [blind, 'tag:steps=2']\nlimit: [1, 2]\n")
    shares, unused = share_by_priority(
        [one],
        [PriorityEntry("one", {"limit": ("2",)}), PriorityEntry("one", {"atacks": ("blind",)})],
    )
    assert shares == [Share(one, one.cells[1::2]), Share(one, one.cells[0::2])]
    assert unused == ["No cell is one where atacks=blind. Axes of this study: attacks, limit."]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("study: one", "must be a list"),
        ("- one", "Entry 1 of the priority list .* names no study"),
        (
            "- study: one\n- {study: one, were: {limit: 1}}",
            "Entry 2 .* has no field 'were' .did you mean 'where'",
        ),
        ("- {study: one, where: limit}", "where must give axes their values"),
        ("- [", "is not valid YAML"),
    ],
)
def test_a_priority_list_that_cannot_be_read_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "list.yaml").write_text(text)
    with pytest.raises(GradleakError, match=message):
        read_priority(tmp_path / "list.yaml")


def test_the_shipped_list_names_studies_that_are_there() -> None:
    studies = Path(__file__).parents[2] / "studies"
    entries = read_priority(studies / "priority.yaml")
    assert len(entries) > 15
    assert {entry.study for entry in entries} <= {path.stem for path in studies.glob("*.yaml")}


def test_the_command_fills_a_time_from_several_studies_and_a_list_among_them(
    tmp_path: Path, capsys: Captured
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(HEAD + "attacks: [blind]\nlimit: [1, 2]\n")
    (tmp_path / "bad.yaml").write_text(HEAD + "attacks: [blnd]\n")
    (tmp_path / "list.yaml").write_text(
        "- {study: two, where: {limit: 2}}\n- {study: two, where: {limit: 7}}\n"
    )
    files = [str(tmp_path / f"{name}.yaml") for name in ("bad", "list", "one", "two")]
    words = ["--out", str(tmp_path / "runs"), "--device", "cpu"]
    assert main(["run", *files, *words, "--for", "10m"]) == 0
    out, err = capsys.readouterr()
    assert "4 cells ran, 0 failed, 0 wait; 0 were finished before." in out
    assert (
        f"cannot be read here: {tmp_path / 'bad.yaml'}." in out
        and "did you mean 'blind'" in " ".join(err.split())
    )
    assert "No cell is two where limit=7" in " ".join(err.split())
    assert err.index("two: 1 cell") < err.index("one: 2 cells")
    assert main(["status", str(tmp_path / "runs" / "two")]) == 0
    assert "2 cells: 2 finished" in capsys.readouterr().out
    assert main(["run", *files[2:], *words]) == 0  # one after another, all there
    assert capsys.readouterr().err.count("2 of 2 cells are finished already") == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["one.yaml", "--for", "9"], "Cannot read --for '9'"),
        (["one.yaml", "--for", "9m", "--engine", "ray"], "leave --engine ray out, or --for"),
        (["one.yaml", "--priority", "list.yaml"], "add --for 9m, or leave it out"),
        (["one.yaml", "list.yaml"], "add --for 9m, or leave it out"),
        (
            ["one.yaml", "list.yaml", "other.yaml", "--for", "9m"],
            "list.yaml and other.yaml are priority lists: name one",
        ),
        (["one.yaml", "--priority", "one.yaml", "--for", "9m"], "must be a list"),
        (["one.yaml", "two.yaml", "--only", "seed=1"], "two.yaml: No axis 'seed'"),
        (["one.yaml", "one.yaml"], "as another of these studies is"),
        (["one.yaml", "bad.yaml"], "bad.yaml has 1 problem"),
        (["bad.yaml", "--for", "9m"], "bad.yaml has 1 problem"),
        (["list.yaml", "--for", "9m"], "No study is named"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.yaml").write_text(HEAD + "attacks: [blind]\nseed: [0, 1]\n")
    Path("two.yaml").write_text(HEAD + "attacks: [blind]\n")
    Path("other.yaml").write_text("- study: two\n")
    Path("bad.yaml").write_text(HEAD + "attacks: [blnd]\n")
    Path("list.yaml").write_text("- study: one\n")
    assert main(["run", *words, "--device", "cpu"]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(Path("runs").glob("*/*.json"))


@pytest.mark.long  # each process imports torch
def test_two_processes_fill_a_time_together(tmp_path: Path) -> None:
    one = job(tmp_path, "one", "attacks: ['tag:steps=3', blind]\nseed: [0, 1]\nlimit: 1\n")
    shares = share_by_priority([one], [])[0]
    summary = fill_minutes(
        shares, one.folder.parent, ["cpu"], 2, Allowance(minutes.time.monotonic(), 300.0), Silent()
    )
    assert len(summary.ran) == 4 and summary.seconds < 300
    run_cells(one.cells, tmp_path / "calm", "cpu", Silent())
    assert scores(one.cells, one.folder) == scores(one.cells, tmp_path / "calm")
