"""The report of a run: verdict first, worst case over records, nothing private unless asked for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_schema import write_schema

from gradleak.records.files import RecordError
from gradleak.records.schema import FindingRecord, NoiseRecord, Record, Score, TargetRecord
from gradleak.records.settings import settings_of
from gradleak.records.store import columns_of, read_summaries, read_summary, write_record
from gradleak.report.naming import rank_naturally
from gradleak.report.page import build_report
from gradleak.report.page.charts import AttacksUnderDefenses
from gradleak.report.page.forms import write_html, write_json, write_markdown
from gradleak.report.page.guesses import GuessGallery, Searches, measure_likeness
from gradleak.report.page.opening import Opening, SettingList

Make = Callable[..., Record]
DOCS = Path(__file__).parents[2] / "docs"


def nothing(record: Record) -> dict[tuple[int, int], str]:
    return {}


def with_spec(record: Record, **fields: Any) -> Record:
    return replace(record, spec={**record.spec, **fields})


@pytest.fixture
def run(tmp_path: Path, make_record: Make) -> Path:
    """Two attacks in records of their own on one setting, and one of them under a defense."""
    noise = [{"name": "gaussian_noise", "std": 0.1}]
    write_record(
        tmp_path,
        with_spec(make_record(("tag",), 0.5, kept=True), attacks=[{"name": "tag", "steps": 3}]),
    )
    strong = make_record(("dlg",), 0.9, kept=True, guess="My PIN is 4471")
    write_record(tmp_path, with_spec(strong, attacks=[{"name": "dlg"}]))
    weak = make_record(("tag",), 0.1, kept=True, flags=("near_chance", "search_failed"))
    write_record(tmp_path, with_spec(weak, attacks=[{"name": "tag", "steps": 3}], defenses=noise))
    return tmp_path


def test_a_summary_says_what_the_whole_record_says(run: Path) -> None:
    for summary in read_summaries(run):
        whole = summary.whole()
        assert summary.record.id == whole.id
        assert summary.record.worst_case == whole.worst_case
        assert summary.columns == {key: columns_of(attack) for key, attack in whole.attacks.items()}
        assert all(
            not attack.examples and not attack.batches for attack in summary.record.attacks.values()
        )


def test_a_broken_record_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / f"{'a' * 16}.json"
    path.write_text('{"schema": "gradleak.record/1", "attacks": {}}')
    with pytest.raises(RecordError, match=str(path)):
        read_summary(path)


def test_attacks_in_records_of_their_own_share_one_worst_case(run: Path) -> None:
    settings = settings_of(read_summaries(run))
    assert sorted(len(setting.attacks) for setting in settings) == [1, 2]
    both = next(setting for setting in settings if len(setting.attacks) == 2)
    assert both.worst("rouge1").mean == both.mean("rouge1") == 0.9
    assert set(both.merge().attacks) == {"tag", "dlg"}


def test_the_verdict_names_the_worst_setting_its_gain_and_its_doubts(run: Path) -> None:
    report = build_report(run, nothing)
    assert (report.records, report.settings_run, report.settings_leaking) == (3, 2, 1)
    assert report.find(Opening).verdict.leaks
    assert "1 of 2 settings leak" in report.find(Opening).verdict.headline
    assert (
        "90.0" in report.find(Opening).verdict.headline
        and "blind 20.0" in report.find(Opening).verdict.headline
    )
    assert "Most was rebuilt under: no defense." in report.find(Opening).verdict.sentences
    assert {flag.name: flag.settings for flag in report.find(Opening).verdict.flags} == {
        "search_failed": 1,
        "near_chance": 1,
    }
    assert [row.leaks for row in report.find(SettingList).settings] == [True, False]


def test_the_heat_map_has_every_pair_that_ran_and_marks_the_doubtful(run: Path) -> None:
    heat = build_report(run, nothing).find(AttacksUnderDefenses).heat
    assert heat.defenses == ("no defense", "gaussian_noise:std=0.1")
    assert {(cell.attack, cell.defense, cell.score.mean, cell.in_doubt) for cell in heat.cells} == {
        ("dlg", "no defense", 0.9, False),
        ("tag", "no defense", 0.5, False),
        ("tag", "gaussian_noise:std=0.1", 0.1, True),
    }


def test_nothing_leaking_is_never_called_safe(tmp_path: Path, make_record: Make) -> None:
    write_record(tmp_path, make_record(("tag",), 0.1, flags=("near_chance", "search_failed")))
    verdict = build_report(tmp_path, nothing).find(Opening).verdict
    assert not verdict.leaks and verdict.in_doubt
    assert "not a proof of safety" in verdict.headline


@pytest.mark.parametrize("draw", [write_html, write_markdown, write_json])
def test_private_words_are_in_no_form_of_the_report_unless_asked_for(
    run: Path, draw: Callable[..., str]
) -> None:
    hidden, shown = (draw(build_report(run, nothing, show_secrets=show)) for show in (False, True))
    for word in ("4471", "my dog"):
        assert word not in hidden
    assert "4471" in shown
    assert "My PIN is 4471" in shown


def test_markdown_counts_settings_only_where_there_are_several(
    run: Path, make_record: Make, tmp_path: Path
) -> None:
    assert "- `search_failed` (1 of 2 settings): Why search_failed." in write_markdown(
        build_report(run, nothing)
    )
    (tmp_path / "alone").mkdir()
    write_record(tmp_path / "alone", make_record(flags=("few_examples",)))
    text = write_markdown(build_report(tmp_path / "alone", nothing))
    assert "- `few_examples`: Why few_examples." in text and "Fractions in %" in text


def test_the_noise_of_a_defense_is_named_once(tmp_path: Path, make_record: Make) -> None:
    write_record(tmp_path, replace(make_record(), noise=NoiseRecord(1.5, 1.5, 1.5, {})))
    assert "- noise: 1.5 times the norm of what is seen\n" in write_markdown(
        build_report(tmp_path, nothing)
    )


def test_marks_survive_redaction(run: Path) -> None:
    marks = [
        [word.mark for word in item.words]
        for item in build_report(run, nothing).find(GuessGallery).gallery
        if item.attack == "dlg"
    ]
    assert marks == [["pair"] * 4]


def test_the_page_refers_to_nothing_outside_itself(run: Path) -> None:
    page = write_html(build_report(run, nothing))
    assert "http" not in page.replace("http-equiv", "")
    for outside in ("<link", "<img", "<iframe", "@import", "url(", "fetch(", 'src="'):
        assert outside not in page


def test_texts_under_audit_cannot_write_markup(tmp_path: Path, make_record: Make) -> None:
    write_record(tmp_path, make_record(guess="<script>alert(1)</script>", kept=True))
    page = write_html(build_report(tmp_path, nothing, show_secrets=True))
    assert "<script>alert" not in page


def test_searches_are_drawn_over_time(run: Path) -> None:
    trace = next(
        one for one in build_report(run, nothing).find(Searches).traces if one.attack == "dlg"
    )
    assert [(point.step, point.median) for point in trace.objective] == [(0, 5.0), (3, 1.0)]
    assert [point.median for point in trace.similarity] == [
        measure_likeness("My PIN is 4471", "the dog"),
        0.75,
    ]


def test_the_published_schema_is_of_this_version_and_fits(run: Path) -> None:
    text = (DOCS / "report.schema.json").read_text(encoding="utf-8")
    assert text == write_schema()
    published = json.loads(text)
    plain = build_report(run, nothing).plain
    assert list(misfits(published, plain, published)) == []
    assert list(misfits(published, {**plain, "records": "three"}, published)) == ["$.records"]


def misfits(schema: dict[str, Any], value: Any, root: dict[str, Any], where: str = "$") -> Any:
    """Places that do not fit the few words of JSON Schema that ours uses."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        if all(list(misfits(one, value, root, where)) for one in schema["anyOf"]):
            yield where
        return
    if "const" in schema:
        if value != schema["const"]:
            yield where
        return
    kinds = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(
        value is None if name == "null" else isinstance(value, kinds[name]) for name in named
    ):
        yield where
        return
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where}.{name}"
    for name, inner in schema.get("properties", {}).items():
        if name in value:
            yield from misfits(inner, value[name], root, f"{where}.{name}")
    if isinstance(value, list):
        for item in value:
            yield from misfits(schema["items"], item, root, f"{where}[]")


def test_names_are_sorted_as_people_do() -> None:
    names = ["noise:std=0.1", "noise:std=0.01", "no defense", "a:x=10", "a:x=2"]
    assert sorted(names, key=rank_naturally) == [
        "no defense",
        "a:x=2",
        "a:x=10",
        "noise:std=0.01",
        "noise:std=0.1",
    ]


def test_pictures_are_drawn_where_they_may_be_seen_and_withheld_otherwise(
    tmp_path: Path, make_record: Make
) -> None:
    pixels = "data:image/png;base64,iVBORw0KGgo="
    write_record(tmp_path, make_record(guess=pixels))
    hidden, shown = (
        write_html(build_report(tmp_path, nothing, show_secrets=show)) for show in (False, True)
    )
    assert pixels not in hidden
    assert f'<img class="pixels" src="{pixels}" alt="the guess">' in shown


def test_words_that_updates_name_are_the_headline_even_where_no_attack_succeeds(
    tmp_path: Path, make_record: Make
) -> None:
    said = (FindingRecord(0, "bag_of_words", True, "some rows", 5, (), 0.8, 1.0),)
    write_record(
        tmp_path, replace(make_record(("tag",), 0.1, flags=("near_chance",)), findings=said)
    )
    verdict = build_report(tmp_path, nothing).find(Opening).verdict
    assert verdict.leaks and verdict.headline.startswith(
        "The updates themselves name every word in 1 of 1 batches"
    )


def test_a_report_counts_what_is_missing_failed_and_unreadable_and_draws_the_rest(
    run: Path,
) -> None:
    kept, *_, broken = sorted(run.glob("*.json"))
    cells = [kept.stem, broken.stem, *("0" * 15 + end for end in "12")]
    plan = {
        "schema": "gradleak.study/1",
        "name": "s",
        "cells": [{"id": name, "axes": {"seed": name[-1]}} for name in cells],
    }
    broken.write_text(broken.read_text()[:500])
    (run / "study.json").write_text(json.dumps(plan))
    (run / f"{cells[-1]}.failed.txt").write_text("Traceback\nRuntimeError: no memory\n")
    report = build_report(run, nothing)
    sentence = "1 of 4 cells were run: 1 missing, 1 failed, 1 unreadable, 1 foreign."
    assert (
        report.find(Opening).coverage.sentence() == sentence
        and sentence in report.find(Opening).verdict.headline
    )
    for page in (write_html(report), write_markdown(report)):
        assert (
            sentence in page
            and broken.name in page
            and "RuntimeError: no memory" in page
            and "seed=1" in page
        )


def test_records_below_others_are_reported_too(run: Path, make_record: Make) -> None:
    below = with_spec(
        make_record(("dlg",), 1.0), defenses=[{"name": "sign"}], attacks=[{"name": "dlg"}]
    )
    write_record(run / "deeper" / "still", below)
    report = build_report(run, nothing)
    assert (report.records, report.settings_leaking) == (4, 2)
    assert "100.0" in report.find(Opening).verdict.headline


def test_pictures_among_texts_are_reported_by_their_own_metric(
    run: Path, make_record: Make
) -> None:
    like = make_record(("ig",), 0.5)
    error = Score(0.002, 0.001, 0.003, 0.08, 0.07, 0.09, "squared pixel", "lower", 1)
    example = replace(
        like.attacks["ig"].examples[0], values={"mse": 0.002}, blind_values={"mse": 0.08}
    )
    attack = replace(like.attacks["ig"], scores={"mse": error}, examples=(example,))
    pictures = replace(
        like,
        attacks={"ig": attack},
        worst_case={"mse": error},
        target=TargetRecord("lenet", "00", 10, 10),
    )
    path = write_record(
        run, with_spec(pictures, attacks=[{"name": "ig"}], target={"name": "lenet"})
    )
    report = build_report(run, nothing)
    assert (report.records, report.settings_run, report.settings_leaking) == (4, 3, 2)
    assert (
        "gain +70.0 (in %); mse 0.002 [0.001, 0.003], blind 0.08, gain +0.078"
        in report.find(Opening).verdict.headline
    )
    assert {row.metric for row in report.find(SettingList).settings} == {"rouge1", "mse"}
    for page in (write_html(report), write_markdown(report)):
        assert "rouge1 or mse" in page and "mse 0.002" in page
    assert path.stem in write_html(report)


def test_the_headline_quotes_a_setting_that_leaks_and_never_a_higher_one_that_is_not_shown(
    run: Path, make_record: Make
) -> None:
    high = make_record(("dlg",), 0.95, flags=("near_chance",))
    write_record(run, with_spec(high, attacks=[{"name": "dlg"}], defenses=[{"name": "sign"}]))
    report = build_report(run, nothing)
    assert (
        "rouge1 90.0" in report.find(Opening).verdict.headline
        and "95.0" not in report.find(Opening).verdict.headline
    )
    assert report.find(Opening).verdict.headline.startswith(
        "1 of 3 settings leak; 1 not shown either way; 1 could not be judged. "
    )


def test_a_perfect_score_that_may_be_luck_is_said_to_be_so(
    tmp_path: Path, make_record: Make
) -> None:
    write_record(tmp_path, make_record(("tag",), 1.0, flags=("near_chance", "few_examples")))
    said = " ".join(build_report(tmp_path, nothing).find(Opening).verdict.sentences)
    assert "Could not be judged: a gain of +80.0 over a blind guess may be luck with n = 1" in said
    assert "no more" not in said
