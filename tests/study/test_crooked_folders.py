"""The gate is open on a whole and honest run, and shut, by name, on every way in which one was
seen or feared to be crooked."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gradleak.audit.client import private_examples
from gradleak.audit.writing import data_hash
from gradleak.cli import main
from gradleak.records.flags import RaisedFlag
from gradleak.records.schema import (
    AttackRecord,
    DataRecord,
    ExampleRecord,
    FindingRecord,
    Record,
    Score,
    TargetRecord,
    spec_id,
)
from gradleak.records.store import open_key, read_record, write_record
from gradleak.study.cells import read_study
from gradleak.study.plan import write_plan

N = 60  # of which none leaks: enough for a bound of 5 %
BOUND = ("--max", "exact_match=0.05")
STUDY = """name: notes
target: tiny
data: {data}
attacks: ['tag:steps=2', 'dlg:steps=2']
seed: [0, 1]
limit: {n}
metrics: [rouge1, exact_match]
"""
Captured = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Made:
    """A run of four cells, as `gradleak run` leaves it."""

    folder: Path
    study: Path
    data: Path

    @property
    def paths(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.json") if path.name != "study.json")


def scored(metric: str, values: list[float | None], blind: float) -> Score:
    there = [value for value in values if value is not None]
    unit, direction = ("squared pixel", "lower") if metric == "mse" else ("fraction", "higher")
    mean = sum(there) / len(there) if there else None
    return Score(mean, mean, mean, blind, blind, blind, unit, direction, len(there))


def record_of(
    spec: dict[str, Any], key: str, hashed: str, leaking: int = 0, version: int = 1
) -> Record:
    """A record by one attack, which rebuilt the first so many notes word for word, and of the
    others what blind did."""
    values: list[dict[str, float | None]] = [
        {"rouge1": 1.0 if place < leaking else 0.1, "exact_match": float(place < leaking)}
        for place in range(N)
    ]
    chance: dict[str, float | None] = {"rouge1": 0.1, "exact_match": 0.0}
    examples = tuple(
        ExampleRecord(place, 0, None, None, False, one, chance) for place, one in enumerate(values)
    )
    scores = {
        metric: scored(metric, [one[metric] for one in values], chance[metric] or 0.0)
        for metric in chance
    }
    flags = () if leaking else (RaisedFlag("near_chance", "Why."),)
    return Record(
        created="2026-01-02T03:04:05+00:00",
        spec=spec,
        versions={},
        machine={},
        data=DataRecord(hashed, N, N),
        target=TargetRecord("tiny", "ff", 1, 1),
        secrets=(),
        attacks={
            key: AttackRecord(
                spec["attacks"][0], scores, examples, (), flags=flags, version=version
            )
        },
        worst_case=scores,
    )


@pytest.fixture
def made(tmp_path: Path) -> Made:
    data, study, folder = tmp_path / "notes.csv", tmp_path / "notes.yaml", tmp_path / "runs"
    data.write_text(
        "text,label\n" + "".join(f"note number {place} of mine,{place % 2}\n" for place in range(N))
    )
    study.write_text(STUDY.format(data=data, n=N))
    whole = read_study(study)
    write_plan(folder, whole)
    hashed = data_hash(open_key(folder), private_examples(whole.cells[0].spec))
    for cell in whole.cells:
        key, attack = next(iter(cell.spec.attack_keys().items()))
        write_record(folder, record_of(cell.spec.to_dict(), key, hashed, version=attack.version))
    return Made(folder, study, data)


def first(made: Made) -> Record:
    return read_record(made.paths[0])


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """By hand, as an editor would."""
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain, indent=1))


def cut(path: Path, share: float) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])


def leaking(made: Made, where: str, seed: int = 0) -> Path:
    """A record of which 50 of 60 notes leak, in a folder that is no study's."""
    like = first(made)
    spec = {**like.spec, "seed": seed}
    return write_record(
        made.folder.parent / "runs" / where,
        record_of(spec, next(iter(like.attacks)), "other", leaking=50),
    )


def of_pictures(made: Made) -> None:
    like = first(made)
    example = ExampleRecord(0, 0, None, None, False, {"mse": 0.001}, {"mse": 0.1})
    scores = {"mse": scored("mse", [0.001], 0.1)}
    attack = AttackRecord(
        {"name": "ig"}, scores, tuple(replace(example, batch=place) for place in range(N)), ()
    )
    spec = {**like.spec, "attacks": [{"name": "ig"}], "target": {"name": "lenet"}}
    write_record(
        made.folder / "pictures",
        replace(like, spec=spec, attacks={"ig": attack}, worst_case=scores),
    )


def of_blind(made: Made) -> None:
    like = first(made)
    spec = {**like.spec, "attacks": [{"name": "blind"}], "seed": 5}
    write_record(made.folder / "below", record_of(spec, "blind", "other"))


def without_scores(made: Made) -> None:
    """One of two attacks on a client was not scored by what is bounded."""

    def change(plain: dict[str, Any]) -> None:
        for key, attack in plain["attacks"].items():
            del attack["scores"]["exact_match"]
            del plain["columns"][key]["values"]["exact_match"]
            del plain["columns"][key]["blind"]["exact_match"]
        del plain["worst_case"]["exact_match"]

    edit(made.paths[0], change)


def with_no_values(made: Made) -> None:
    def change(plain: dict[str, Any]) -> None:
        for key, attack in plain["attacks"].items():
            values = plain["columns"][key]["values"]
            values["exact_match"] = [None] * len(values["exact_match"])
            attack["scores"]["exact_match"]["mean"] = None
        plain["worst_case"]["exact_match"]["mean"] = None

    like = first(made)
    path = write_record(
        made.folder / "below",
        record_of({**like.spec, "seed": 9}, next(iter(like.attacks)), "other"),
    )
    edit(path, change)


def flagged(flag: str) -> Callable[[Made], None]:
    def change(plain: dict[str, Any]) -> None:
        for attack in plain["attacks"].values():
            attack["flags"].append({"name": flag, "detail": "Why."})

    def apply(made: Made) -> None:
        for path in made.paths:
            edit(path, change)

    return apply


def naming(made: Made) -> None:
    said = FindingRecord(0, "bag_of_words", True, "rows", 3, (), 1.0, 1.0)
    write_record(made.folder, replace(first(made), findings=(said,)))


def less_scored(plain: dict[str, Any]) -> None:
    for attack in plain["attacks"].values():
        attack["scores"]["rouge1"]["mean"] = 0.01


def older(plain: dict[str, Any]) -> None:
    for attack in plain["attacks"].values():
        attack["version"] = 99


def of_other_data(plain: dict[str, Any]) -> None:
    plain["data"]["hash"], plain["created"] = "ab", "2025-01-01T00:00:00+00:00"


def fewer_examples(plain: dict[str, Any]) -> None:
    for columns in plain["columns"].values():
        columns["batches"] = columns["batches"][:-1]


def linked(made: Made) -> None:
    outside = made.folder.parent / "outside"
    shutil.move(leaking(made, "below", seed=4), outside.with_suffix(".json"))
    outside.mkdir()
    like = first(made)
    write_record(
        outside, record_of({**like.spec, "seed": 4}, next(iter(like.attacks)), "other", leaking=50)
    )
    shutil.rmtree(made.folder / "below")
    (made.folder / "below").symlink_to(outside, target_is_directory=True)


def only_one(made: Made) -> None:
    for path in made.paths[1:]:
        path.unlink()


def failed(made: Made) -> None:
    made.paths[0].with_suffix(".failed.txt").write_text("Traceback\nRuntimeError: out of memory\n")


def nested_study(made: Made) -> None:
    shutil.copytree(made.folder, made.folder / "second")
    sorted((made.folder / "second").glob("[0-9a-f]*.json"))[0].unlink()


def larger_study(made: Made) -> None:
    made.study.write_text(made.study.read_text().replace("seed: [0, 1]", "seed: [0, 1, 2]"))


def half_nested(made: Made) -> None:
    cut(leaking(made, "below", seed=3), 0.5)


def copied_below(made: Made) -> None:
    """Three copies of one cell below each other, of which the middle one leaks: none may hide
    another."""
    like = first(made)
    leaks = record_of(like.spec, next(iter(like.attacks)), like.data.hash, leaking=50)
    for name, record in (("a", like), ("b", leaks), ("c", like)):
        write_record(made.folder / name, record)


def trained(made: Made) -> None:
    leaking(made, "training", seed=6)


def renamed(made: Made) -> None:
    path = leaking(made, "below", seed=6)
    path.rename(path.with_name("before the fix.json"))


def begun(made: Made) -> None:
    (made.folder / "below" / "parts" / f"{'a' * 16}-cpu-x").mkdir(parents=True)


def edited(made: Made) -> None:
    made.data.write_text(made.data.read_text().replace("mine", "his"))


SPEC = ("--spec", "notes.yaml")
CROOKED: dict[str, tuple[Callable[[Made], object], str, tuple[str, ...]]] = {
    "a cell was not run": (lambda made: made.paths[0].unlink(), "missing", ()),
    "one of four was run": (only_one, "missing", ()),
    "nothing was run yet": (lambda made: [path.unlink() for path in made.paths], "missing", ()),
    "a cell failed": (
        lambda made: made.paths[0].rename(made.paths[0].with_suffix(".failed.txt")),
        "failed",
        (),
    ),
    "a later try of a cell failed": (failed, "failed", ()),
    "a record is cut in half": (lambda made: cut(made.paths[0], 0.5), "unreadable", ()),
    "a record is cut within its examples": (lambda made: cut(made.paths[0], 0.9), "unreadable", ()),
    "a record is empty": (lambda made: made.paths[0].write_text(""), "unreadable", ()),
    "a record is no text": (
        lambda made: made.paths[0].write_bytes(b"\xff\xfe\x00"),
        "unreadable",
        (),
    ),
    "a record is a list": (lambda made: made.paths[0].write_text("[]"), "unreadable", ()),
    "a record is of another schema": (
        lambda made: edit(made.paths[0], lambda one: one.update(schema="x/2")),
        "unreadable",
        (),
    ),
    "a record was copied over another": (
        lambda made: shutil.copy(made.paths[0], made.paths[1]),
        "unreadable",
        (),
    ),
    "a spec was changed": (
        lambda made: edit(made.paths[0], lambda one: one["spec"].update(seed=8)),
        "unreadable",
        (),
    ),
    "a record has no attack": (
        lambda made: edit(made.paths[0], lambda one: one.update(attacks={})),
        "unreadable",
        (),
    ),
    "an example was taken out": (
        lambda made: edit(made.paths[0], fewer_examples),
        "unreadable",
        (),
    ),
    "a score was changed": (lambda made: edit(made.paths[0], less_scored), "unreadable", ()),
    "a worst case was changed": (
        lambda made: edit(made.paths[0], lambda one: one["worst_case"]["rouge1"].update(mean=0.01)),
        "unreadable",
        (),
    ),
    "a plan is cut": (lambda made: cut(made.folder / "study.json", 0.5), "unreadable", ()),
    "a leak lies one folder down": (lambda made: leaking(made, "below"), "exact_match", ()),
    "a leak lies three folders down": (lambda made: leaking(made, "a/b/c"), "exact_match", ()),
    "a leak lies behind a link": (linked, "exact_match", ()),
    "a leak was renamed": (renamed, "exact_match", ()),
    "a leak lies among trainings": (trained, "exact_match", ()),
    "a leak has copies": (copied_below, "exact_match", ()),
    "a cut record lies one folder down": (half_nested, "unreadable", ()),
    "a study below lacks a cell": (nested_study, "missing", ()),
    "an audit was begun and cut": (begun, "missing", ()),
    "a record of another study lies beside": (
        lambda made: leaking(made, "", seed=7),
        "foreign",
        (),
    ),
    "a record is of data before a change": (
        lambda made: edit(made.paths[0], of_other_data),
        "other_data",
        (),
    ),
    "the data was edited since": (edited, "other_data", ()),
    "pictures lie among texts": (of_pictures, "no_bound", ()),
    "only blind looked": (of_blind, "only_blind", ()),
    "one attack was not scored": (without_scores, "exact_match", ()),
    "a bound applies to nothing": (with_no_values, "exact_match", ()),
    "searches failed": (flagged("search_failed"), "search_failed", ()),
    "time was up": (flagged("member_out_of_time"), "member_out_of_time", ()),
    "updates name the words": (naming, "names_words", ()),
    "the plan is gone and a cell with it": (
        lambda made: [(made.folder / "study.json").unlink(), made.paths[0].unlink()],
        "missing",
        SPEC,
    ),
    "the study grew": (larger_study, "missing", SPEC),
    "an attack is of another version": (lambda made: edit(made.paths[0], older), "outdated", SPEC),
    "the key is gone": (lambda made: shutil.rmtree(made.folder / "keys"), "other_data", SPEC),
    "a record of no cell lies below": (
        lambda made: leaking(made, "below", seed=8),
        "foreign",
        SPEC,
    ),
}


def gate(made: Made, *words: str) -> int:
    at = [str(made.study) if word == SPEC[1] else word for word in words]
    return main(["gate", str(made.folder), *BOUND, *at])


def test_there_are_thirty_and_more() -> None:
    assert len(CROOKED) >= 30


@pytest.mark.parametrize("words", [(), SPEC])
def test_a_whole_and_honest_run_opens_the_gate(
    made: Made, capsys: Captured, words: tuple[str, ...]
) -> None:
    assert gate(made, *words) == 0
    out, _ = capsys.readouterr()
    assert "The gate is open" in out and "4 of 4 cells were run" in out


@pytest.mark.parametrize("crooked", CROOKED)
def test_a_crooked_folder_shuts_the_gate_by_name(
    made: Made, capsys: Captured, crooked: str
) -> None:
    bend, rule, words = CROOKED[crooked]
    bend(made)
    assert gate(made, *words) == 4
    out, err = capsys.readouterr()
    assert "The gate is shut" in err and rule in err.partition("(")[2]
    assert "The gate is open" not in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--max", "exact_match=5"), "Write --max exact_match=0.05, or --max exact_match=5%"),
        (("--max", "exact_match=500"), "a share from 0 to 1"),
        (("--max", "exact_match=-0.1"), "a share from 0 to 1"),
        (("--max", "exact_match=1"), "holds whatever leaks"),
        (("--max", "exact_match=nan"), "Cannot read"),
        (("--set", "limit=2"), "name its YAML with --spec"),
        (("--accept", "mising"), "did you mean 'missing'"),
        (("--accept", "exact_match"), "Cannot accept"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_can(
    made: Made, capsys: Captured, words: tuple[str, ...], says: str
) -> None:
    assert main(["gate", str(made.folder), *(() if "--max" in words else BOUND), *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("rule", ["missing", "unreadable"])
def test_where_nothing_is_left_to_judge_no_waiver_opens_the_gate(
    made: Made, capsys: Captured, rule: str
) -> None:
    for path in made.paths:
        path.unlink() if rule == "missing" else path.write_text("")
    assert gate(made, "--accept", "missing", "--accept", rule) == 4
    assert "No record is here" in capsys.readouterr().out


def test_a_folder_of_nothing_opens_no_gate(tmp_path: Path) -> None:
    assert main(["gate", str(tmp_path), *BOUND]) == 2


def test_what_is_waived_is_said_with_its_reason_and_what_waived_nothing_too(
    made: Made, capsys: Captured
) -> None:
    made.paths[0].unlink()
    xml, plain = made.folder.parent / "gate.xml", made.folder.parent / "gate.sarif"
    files = ("--junit", str(xml), "--sarif", str(plain))
    assert gate(made, "--accept", "missing=the machine broke", "--accept", "failed", *files) == 0
    out, _ = capsys.readouterr()
    assert (
        "waived" in out
        and "Waived by --accept missing: the machine broke." in out
        and "Waived: missing." in out
    )
    assert "--accept failed waived nothing." in out
    assert 'skipped="1"' in xml.read_text() and "the machine broke" in xml.read_text()
    (result,) = json.loads(plain.read_text())["runs"][0]["results"]
    assert result["suppressions"] == [{"kind": "external", "justification": "the machine broke"}]


def test_a_bound_is_never_waived(made: Made) -> None:
    leaking(made, "below")
    assert (
        gate(
            made,
            *(word for rule in ("foreign", "missing", "unreadable") for word in ("--accept", rule)),
        )
        == 4
    )


def test_files_point_at_the_record_that_has_the_flag(made: Made, capsys: Captured) -> None:
    like = first(made)
    alike = [path for path in made.paths if read_record(path).spec["seed"] == like.spec["seed"]]
    flag = {"name": "search_failed", "detail": "Why."}
    for path in alike[1:]:
        edit(path, lambda one: [attack["flags"].append(flag) for attack in one["attacks"].values()])
    xml, plain = made.folder.parent / "gate.xml", made.folder.parent / "gate.sarif"
    assert gate(made, "--junit", str(xml), "--sarif", str(plain)) == 4
    (result,) = json.loads(plain.read_text())["runs"][0]["results"]
    places = [one["physicalLocation"]["artifactLocation"]["uri"] for one in result["locations"]]
    assert len(alike) == 2 and places == [alike[1].as_uri()]
    assert alike[1].name in xml.read_text() and alike[0].name not in xml.read_text()


def test_a_percent_is_read_as_one(made: Made) -> None:
    assert main(["gate", str(made.folder), "--max", "exact_match=5%"]) == 0
    assert spec_id(first(made).spec) == made.paths[0].stem
