"""YAML to cells: which lists are axes, and all problems at once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gradleak.core.errors import GradleakError
from gradleak.study.cells import Study, read_study

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def one(text: str) -> Path:
        path = tmp_path / "grid.yaml"
        path.write_text(text)
        return path

    return one


def titles(study: Study) -> list[str]:
    return [cell.title for cell in study.cells]


def test_lists_are_axes_and_the_first_varies_slowest(write: Write) -> None:
    study = read_study(write("target: tiny\nattacks: [tag, 'dlg:steps=3']\nseed: [0, 1]\n"))
    assert study.name == "grid"
    assert titles(study) == [
        "attacks=tag, seed=0",
        "attacks=tag, seed=1",
        "attacks=dlg:steps=3, seed=0",
        "attacks=dlg:steps=3, seed=1",
    ]


def test_a_flat_list_of_metrics_facts_or_defenses_is_one_value(write: Write) -> None:
    text = "target: tiny\nmetric: [rouge1, rouge2]\nknow: [labels, lengths, batch_size]\n"
    (cell,) = read_study(
        write(text + "defense: [gaussian_noise, 'gaussian_noise:std=0.1']\n")
    ).cells
    assert (len(cell.spec.metrics), len(cell.spec.know), len(cell.spec.defenses)) == (2, 3, 2)
    assert cell.axes == {}


def test_a_list_of_lists_of_defenses_is_an_axis_of_chains(write: Write) -> None:
    study = read_study(
        write(
            "target: tiny\ndefenses: [[], [gaussian_noise], [gaussian_noise,"
            " 'gaussian_noise:std=1']]\n"
        )
    )
    assert titles(study) == [
        "defenses=none",
        "defenses=gaussian_noise",
        "defenses=gaussian_noise + gaussian_noise:std=1",
    ]


def test_a_list_inside_attacks_is_one_cell_with_a_worst_case(write: Write) -> None:
    study = read_study(write("target: tiny\nattacks: [[tag, dlg], blind]\n"))
    assert [len(cell.spec.attacks) for cell in study.cells] == [2, 1]


def test_cells_that_are_the_same_audit_are_run_once(write: Write) -> None:
    assert titles(read_study(write("target: tiny\nattacks: [tag, 'tag:steps=2500', dlg]\n"))) == [
        "attacks=tag",
        "attacks=dlg",
    ]


def test_all_bad_values_are_reported_at_once_with_their_field(write: Write) -> None:
    text = (
        "target: [tiny, tinny]\nattacks: [tagg, 'dlg:stps=3']\nseed: [0, x]\nknow: [[labels],"
        " [colour]]\ntime_limit: abc\n"
    )
    with pytest.raises(GradleakError) as caught:
        read_study(write(text))
    lines = str(caught.value).splitlines()
    assert "6 problems; nothing was run" in lines[0]
    fields = ["target", "attacks", "attacks", "seed", "know", "time_limit"]
    assert [line.strip().split(": ")[1] for line in lines[1:]] == fields
    assert [line.strip().split(":")[0] for line in lines[1:]] == [
        f"line {number}" for number in (1, 2, 2, 3, 4, 5)
    ]
    assert "did you mean 'tiny'" in lines[1]


def test_combinations_that_do_not_go_together_are_named_by_their_axes(write: Write) -> None:
    with pytest.raises(
        GradleakError, match=r"1 problem.*\n  line 3: know=none, attacks=tag: tag requires"
    ):
        read_study(
            write(
                "target: tiny\nknow: [[], [labels, lengths, batch_size]]\nattacks: [tag, blind]\n"
            )
        )


def test_a_missing_data_file_is_found_before_anything_runs(write: Write) -> None:
    with pytest.raises(GradleakError, match=r"data: .*nowhere\.csv"):
        read_study(write("target: tiny\ndata: nowhere.csv\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attacks: [tag\n", "is not valid YAML"),
        ("- tag\n", "must be a mapping"),
        ("atacks: tag\n", "no field 'atacks'.*did you mean 'attacks'"),
        ("attack: tag\nattacks: dlg\n", "'attacks' is given twice"),
        ("seed: []\n", "seed is an empty list"),
        ("name: ../up\n", "becomes a folder"),
    ],
)
def test_bad_yaml_is_refused_with_a_sentence(write: Write, text: str, message: str) -> None:
    with pytest.raises(GradleakError, match=message):
        read_study(write(text))


def test_cases_change_fields_together_and_are_crossed_with_the_axes(write: Write) -> None:
    text = (
        "target: tiny\nattacks: [tag, dlg]\ncases:\n  plain: {}\n  noise: {defenses:"
        " gaussian_noise, attacks: [tag, blind]}\n"
    )
    study = read_study(write(text))
    assert titles(study) == [
        "case=plain, attacks=tag",
        "case=plain, attacks=dlg",
        "case=noise, attacks=tag",
        "case=noise, attacks=blind",
    ]
    assert [len(cell.spec.defenses) for cell in study.cells] == [0, 0, 1, 1]


@pytest.mark.parametrize("cases", ["[a, b]", "{}", "{noise: gaussian_noise}"])
def test_cases_that_name_no_fields_are_refused(write: Write, cases: str) -> None:
    with pytest.raises(GradleakError, match="cases must name the fields each one changes"):
        read_study(write(f"target: tiny\ncases: {cases}\n"))


def test_problems_of_every_kind_are_told_at_once_each_with_its_line(write: Write) -> None:
    text = (
        "target: tiny\natacks: tag\nseed: []\nlimit: many\nname: ../up\nknow:\n  - [labels]\n  -"
        " [colour]\nlimit: 3\n"
    )
    with pytest.raises(GradleakError) as caught:
        read_study(write(text + "cases:\n  one: {sed: 1}\n  two:\n    defenses: nose\n"))
    told = [line.strip().partition(": ") for line in str(caught.value).splitlines()[1:]]
    starts = {line: text.split(" ")[0] for line, _, text in told}
    assert list(starts) == [f"line {number}" for number in (2, 3, 4, 5, 8, 11, 13)]
    assert {
        "line 4": "'limit'",
        "line 8": "know:",
        "line 13": "defenses:",
    }.items() <= starts.items()


def test_a_value_that_the_command_line_sets_has_no_line(write: Write) -> None:
    with pytest.raises(GradleakError, match=r"\n  attacks: Unknown attack 'tagg'"):
        read_study(write("target: tiny\nattacks: tag\n"), ["attacks=tagg"])
