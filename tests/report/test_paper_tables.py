"""The papers' numbers, and ours beside them."""

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradleak.records.schema import Record, Score
from gradleak.records.store import Summary
from gradleak.report.papers.paper_tables import (
    Filled,
    PaperTable,
    fill_table,
    fits,
    read_paper_tables,
    write_csv,
    write_latex,
    write_tables_markdown,
)
from gradleak.study.cells import read_study

Make = Callable[..., Record]
COS = {
    "name": "lamp_cos",
    "distance": "cosine",
    "discrete": "alternate",
    "prior_weight": 0.2,
    "norm_weight": 1.0,
}
COS |= {"starts": 500, "faithful": False}


def table(name: str) -> PaperTable:
    return next(one for one in read_paper_tables() if one.name == name)


@pytest.fixture
def ran(make_record: Make) -> Callable[..., Summary]:
    """A record of an attack on MiniLM and CoLA."""

    def make(attack: dict[str, Any], **spec: Any) -> Summary:
        plain = make_record((str(attack["name"]),))
        scores = {
            name: Score(0.9, 0.8, 0.95, 0.2, 0.1, 0.3, "fraction", "higher", 100)
            for name in ("rouge1_legacy", "rougeL_legacy")
        }
        ours = replace(plain.attacks[str(attack["name"])], spec=attack, scores=scores)
        fields = {
            "target": {"name": "minilm"},
            "data": {"name": "cola"},
            "batch_size": 1,
            "protocol": {"name": "fedsgd"},
        }
        whole = {**fields, "view": {"name": "lamp"}, "defenses": [], "attacks": [attack], **spec}
        return Summary(
            Path("x.json"), replace(plain, spec=whole, attacks={str(attack["name"]): ours}), {}
        )

    return make


def places(filled: Filled) -> dict[tuple[str, str], float | None]:
    return {
        (line.row, line.column): line.ours[0].mean
        for line in filled.lines
        if line.ours[0] is not None
    }


def test_every_printed_place_has_a_number_for_every_metric() -> None:
    sizes = {one.name: sum(len(row.values) for row in one.rows) for one in read_paper_tables()}
    assert sizes == {
        "lamp_table1": 48,
        "lamp_table2": 36,
        "lamp_table4": 21,
        "lamp_table5": 16,
        "lamp_table7": 4,
        "lamp_table8": 5,
        "lamp_table9": 6,
        "lamp_fedavg": 1,
        "partial_table2": 28,
        "partial_table3": 108,
        "partial_table4": 63,
        "lti_table1": 12,
        "lti_table2": 12,
        "partial_figure2": 12,
        "partial_figure3": 48,
        "partial_figure4": 24,
        "partial_figure6": 84,
        "partial_figure7": 84,
    }
    for one in read_paper_tables():
        columns = {column.name for column in one.columns}
        for row in one.rows:
            assert set(row.values) <= columns
            drawn = "figure" in one.name  # the paper prints no values
            assert all(
                len(values) == (0 if drawn else len(one.metrics)) for values in row.values.values()
            )


def test_numbers_that_two_papers_tables_share_agree() -> None:
    first, second = table("lamp_table1"), table("lamp_table2")
    for one, other in zip(first.rows, second.rows, strict=True):
        assert one.values["BERT-base"] == other.values["B = 1"]
    # LAMP cos on CoLA, its headline
    assert table("lamp_table1").rows[2].values["BERT-base"] == [89.6, 51.9, 76.2]
    assert (
        table("lamp_table4").rows[0].values["CoLA"] == table("lamp_table9").rows[1].values["CoLA"]
    )


def test_patterns_fit_what_has_all_they_name() -> None:
    assert fits({"a": 1}, {"a": 1, "b": 2})
    assert not fits({"a": 1}, {"b": 2})
    assert fits([{"name": "x"}, {"name": "y"}], {"name": "y"})
    assert not fits([], [{"name": "sign"}])
    assert fits([], [])
    assert fits({"faithful": False}, {}) and not fits({"faithful": True}, {})
    assert fits("*bert-base*", "google/BERT-base-uncased")


def test_a_record_stands_in_its_place_and_the_others_say_not_run(
    ran: Callable[..., Summary],
) -> None:
    filled = fill_table(table("lamp_table1"), [ran(COS)])
    assert places(filled) == {("CoLA, LAMP cos", "BERT-base"): 0.9}
    assert filled.run == 1
    assert (
        "| CoLA, LAMP cos | BERT-base | 90.0 [80.0, 95.0] | 89.6 | not scored | 51.9 |"
        in write_tables_markdown([filled], "x")
    )
    assert "| CoLA, DLG | BERT-base | not run | 59.3 | not run | 7.7 |" in write_tables_markdown(
        [filled], "x"
    )


def test_ablations_noise_and_batches_find_their_places(ran: Callable[..., Summary]) -> None:
    noise = [{"name": "gaussian_noise", "std": 0.005}]
    assert places(fill_table(table("lamp_table4"), [ran({**COS, "distance": "l2"})])) == {
        ("LAMP L2", "CoLA"): 0.9
    }
    assert places(fill_table(table("lamp_table5"), [ran({"name": "tag"}, defenses=noise)])) == {
        ("TAG", "σ = 0.005"): 0.9
    }
    assert places(fill_table(table("lamp_table2"), [ran({"name": "dlg"}, batch_size=4)])) == {
        ("CoLA, DLG", "B = 4"): 0.9
    }
    assert places(fill_table(table("lamp_table1"), [ran({"name": "dlg"}, defenses=noise)])) == {}


def test_attacks_that_the_paper_lacks_stand_below_its_rows(ran: Callable[..., Summary]) -> None:
    filled = fill_table(table("lamp_table1"), [ran({"name": "portfolio"})])
    assert places(filled) == {("CoLA, portfolio (not in this table)", "BERT-base"): 0.9}
    assert filled.run == 0


def test_csv_and_latex_hold_the_same_numbers(ran: Callable[..., Summary]) -> None:
    filled = fill_table(table("lamp_table8"), [ran(COS)])
    rows = list(csv.DictReader(io.StringIO(write_csv([filled]))))
    assert (rows[0]["ours"], rows[0]["low"], rows[0]["paper"], rows[0]["n"]) == (
        "90.0",
        "80.0",
        "89.6",
        "100",
    )
    assert rows[3]["ours"] == "not run"
    drawn = write_latex([filled])
    assert drawn.count(r"\begin{tabular}") == 1
    assert r"75 \% zeroed" in drawn and "90.0 [80.0, 95.0]" in drawn


def test_the_studies_that_run_a_table_are_there() -> None:
    folder = Path(__file__).parents[2] / "studies"
    named = {study for one in read_paper_tables() for study in one.studies}
    assert {
        "lamp_table1",
        "fedavg",
        "partial_table3",
        "partial_figures",
        "partial_figures_reviews",
    } <= named
    assert not [study for study in named if not (folder / f"{study}.yaml").is_file()]


def test_a_figure_without_printed_values_shows_ours_alone(ran: Callable[..., Summary]) -> None:
    view = {"name": "parts", "layers": "3", "modules": ["query"]}
    filled = fill_table(
        table("partial_figure3"),
        [ran({"name": "partial_gradients"}, view=view), ran({"name": "energy"}, view=view)],
    )
    assert filled.run == 1 and filled.places == 48
    drawn = write_tables_markdown([filled], "x")
    assert "| ΔW q | layer 3 | 90.0 [80.0, 95.0] | – |" in drawn
    assert "| ΔW q, energy (not in this table) | layer 3 | 90.0 [80.0, 95.0] | – |" in drawn
    assert "studies/partial_figures.yaml" in drawn  # how to run the rest


def test_local_steps_find_their_places(ran: Callable[..., Summary]) -> None:
    lamp = {"name": "lamp_l2l1", "discrete": "alternate", "starts": 500, "faithful": False}
    protocol = {
        "name": "fedavg",
        "steps": 4,
        "local_batch_size": 1,
        "learning_rate": 5e-5,
        "optimiser": "sgd",
        "clients": 1,
    }
    adamw = ran({"name": "energy"}, batch_size=1, protocol={**protocol, "optimiser": "adamw"})
    filled = fill_table(table("lamp_fedavg"), [ran(lamp, batch_size=4, protocol=protocol), adamw])
    assert places(filled) == {
        ("4 sentences, SGD, LAMP L2+L1", "4 steps"): 0.9,
        ("1 sentence, AdamW, energy (not in this table)", "4 steps"): 0.9,
    }
    assert (filled.run, filled.places) == (1, 1)


def test_the_blind_guess_the_seed_and_the_machine_stand_beside_ours(
    ran: Callable[..., Summary],
) -> None:
    filled = fill_table(table("lamp_table1"), [ran(COS, seed=7)])
    assert "| 20.0 / – / 20.0 | 100 | tiny, 7, 2026-01-02 |" in write_tables_markdown([filled], "x")
    row = next(
        row for row in csv.DictReader(io.StringIO(write_csv([filled]))) if row["ours"] == "90.0"
    )
    assert (row["blind"], row["seed"], row["machine"]) == ("20.0", "7", "cpu")


def test_a_place_is_filled_by_the_newest_version_and_older_ones_stand_below_it(
    ran: Callable[..., Summary],
) -> None:
    old = ran(COS)
    few = replace(old.record.data, examples=1)
    attack = replace(old.record.attacks["lamp_cos"], version=2)
    new = replace(old, record=replace(old.record, data=few, attacks={"lamp_cos": attack}))
    filled = fill_table(table("lamp_table1"), [old, new])
    lines = [line for line in filled.lines if line.record is not None]
    assert [(line.row, line.in_paper) for line in lines] == [
        ("CoLA, LAMP cos", True),
        ("CoLA, LAMP cos (version 1)", False),
    ]
    assert lines[0].record is new.record and filled.run == 1 and filled.places == 48


def test_places_that_need_weights_of_the_hub_are_counted_apart_with_their_command(
    ran: Callable[..., Summary],
) -> None:
    filled = fill_table(table("lamp_table1"), [ran(COS)])
    assert "1 of 24 places that models at hand can fill were run" in filled.count_in_words
    assert "0 of 24 that need weights from the hub" in filled.count_in_words
    drawn = write_tables_markdown([filled], "x")
    for path in ("bert-base-uncased", "huawei-noah/TinyBERT_General_6L_768D", "bert-large-uncased"):
        assert f"    gradleak run studies/lamp_table1.yaml --set target={path}" in drawn
    assert fill_table(table("lti_table2"), []).count_in_words == "0 of 12 places were run."


def test_a_place_for_weights_of_the_hub_is_not_filled_by_random_ones(
    ran: Callable[..., Summary],
) -> None:
    path = {"name": "huggingface", "path": "models/TinyBERT_6"}
    real = ran(COS, target=path)
    random = replace(
        real,
        record=replace(real.record, target=replace(real.record.target, fingerprint="made:seed=0")),
    )
    real = replace(
        real,
        record=replace(real.record, target=replace(real.record.target, fingerprint="sha256:00")),
    )
    assert places(fill_table(table("lamp_table1"), [real])) == {
        ("CoLA, LAMP cos", "TinyBERT-6"): 0.9
    }
    assert places(fill_table(table("lamp_table1"), [random])) == {}


def test_the_papers_figures_on_its_model_of_six_layers_stand_beside_ours(
    ran: Callable[..., Summary],
) -> None:
    drawn = write_tables_markdown([fill_table(table("lamp_table1"), [ran(COS)])], "x")
    line = next(
        line for line in drawn.splitlines() if line.startswith("| CoLA, LAMP cos | BERT-base")
    )
    assert line.endswith("| 93.9 / 59.3 / 80.2 |")
    assert "are in its domain, and CoLA is not" in drawn
    assert "TinyBERT" not in write_tables_markdown(
        [fill_table(table("lamp_table5"), [ran(COS)])], "x"
    )
    first = {row.name: row for row in table("lamp_table1").rows}
    assert all(
        row.nearest == {"B = 1": first[row.name].values["TinyBERT-6"]}
        for row in table("lamp_table2").rows
    )
    assert (
        table("lamp_table4").rows[0].nearest["SST-2"]
        == first["SST-2, LAMP cos"].values["TinyBERT-6"]
    )


def test_the_commands_for_the_papers_own_models_can_be_read() -> None:
    folder = Path(__file__).parents[2] / "studies"
    asked = {
        (one.studies[0], tuple(column.hub))
        for one in read_paper_tables()
        for column in one.columns
        if column.hub
    }
    assert len(asked) == 4
    for study, fields in asked:
        specs = [
            cell.spec
            for cell in read_study(folder / f"{study}.yaml", [*fields, "data=canaries"]).cells
        ]
        assert {spec.target.name for spec in specs} == {"huggingface"}
