"""`gradleak publish`: stretches of a study add up to the table of an undisturbed run, and
nothing published holds a text."""

import csv
import lzma
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gradleak.cli import main
from gradleak.core.errors import GradleakError
from gradleak.datasets import Canaries
from gradleak.records.published import read_published
from gradleak.records.store import read_record, read_summaries, rewrite_record
from gradleak.study.publishing import publish_runs

STUDY = """
target: tiny
data: canaries
attacks: 'tag:steps=2'
defenses: [[], ['gaussian_noise:std=0.01']]
batch_size: 2
limit: 3
metrics: [rouge1, exact_match]
"""
# rows, and the folder they are run in
STRETCHES = {"0-1": "first", "2-3": "second", "4-5": "first"}
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study run whole, and in three stretches in two folders."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "some.yaml").write_text(STUDY)
    run(folder, "whole")
    for rows, where in STRETCHES.items():
        run(folder, where, "--set", f"data=canaries:rows={rows}", "--set", "limit=1")
    return folder


def run(folder: Path, where: str, *changes: str) -> None:
    assert (
        main(
            [
                "run",
                str(folder / "some.yaml"),
                "--out",
                str(folder / where),
                "--device",
                "cpu",
                *changes,
            ]
        )
        == 0
    )


def published(place: Path, out: Path, *runs: str) -> Path:
    assert main(["publish", *(str(place / one) for one in runs), "--out", str(out)]) == 0
    return out / "published.xz"


def tables(place: Path, source: Path, out: Path) -> Path:
    assert main(["tables", str(source), "--spec", str(place / "some.yaml"), "--out", str(out)]) == 0
    return out


def numbers(folder: Path) -> list[dict[str, str]]:
    """The table for programs, without what no two runs share."""
    rows = list(csv.DictReader((folder / "results.csv").open(encoding="utf-8")))
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "date")} for row in rows
    ]


def cells(folder: Path) -> list[str]:
    """The lines of the page's table, without seconds."""
    page = (
        (folder / "results.md")
        .read_text(encoding="utf-8")
        .partition("## Cells")[2]
        .partition("## Guesses")[0]
    )
    return [
        re.sub(r"\| [\d.]+ s \|", "|", line) for line in page.splitlines() if line.startswith("| ")
    ]


def test_three_stretches_in_two_folders_give_the_table_of_an_undisturbed_run(
    place: Path, tmp_path: Path
) -> None:
    undisturbed = tables(place, place / "whole" / "some", tmp_path / "undisturbed")
    whole = tables(place, published(place, tmp_path / "w", "whole/some"), tmp_path / "whole")
    added = tables(
        place, published(place, tmp_path / "s", "first/some", "second/some"), tmp_path / "added"
    )
    assert len(numbers(undisturbed)) == 4 and all(row["n"] == "6" for row in numbers(undisturbed))
    assert numbers(whole) == numbers(added) == numbers(undisturbed)
    assert len(cells(undisturbed)) == 4 and any(
        "search_failed" in line for line in cells(undisturbed)
    )
    assert cells(whole) == cells(added) == cells(undisturbed)
    part = tables(place, published(place, tmp_path / "p", "first/some"), tmp_path / "part")
    assert all(row["n"] == "4" for row in numbers(part)) and numbers(part) != numbers(undisturbed)


def test_what_is_published_is_the_same_in_any_order_and_counts_once(
    place: Path, tmp_path: Path
) -> None:
    one = published(place, tmp_path / "one", "first/some", "second/some").read_bytes()
    other = published(place, tmp_path / "other", "second/some")
    assert other.read_bytes() != one
    # Added to what was there
    assert published(place, tmp_path / "other", "first/some").read_bytes() == one
    assert published(place, tmp_path / "other", "first/some").read_bytes() == one
    files = published(place, tmp_path / "files", str(tmp_path / "one" / "published.xz"), str(other))
    assert files.read_bytes() == one


def test_axes_stand_as_the_study_writes_them_and_rows_are_numbers_of_the_data_set(
    place: Path, tmp_path: Path
) -> None:
    found = read_published(published(place, tmp_path, "first/some", "second/some"))
    assert found.study == "some" and len(found.cells) == 2
    assert sorted(cell.axes["defenses"] for cell in found.cells) == [
        "gaussian_noise:std=0.01",
        "none",
    ]
    assert all(
        [batch.rows for batch in cell.batches] == [(0, 1), (2, 3), (4, 5)] for cell in found.cells
    )
    assert {cell.model["fingerprint"] for cell in found.cells} == {"made:seed=0"} and {
        cell.version for cell in found.cells
    } == {1}


def test_nothing_published_holds_a_text_a_hash_or_a_folder(place: Path, tmp_path: Path) -> None:
    text = lzma.decompress(published(place, tmp_path, "whole/some").read_bytes()).decode()
    records = [summary.whole() for summary in read_summaries(place / "whole" / "some")]
    private = [example.text for example in Canaries().load(6)]
    guesses = [
        example.guess
        for record in records
        for attack in record.attacks.values()
        for example in attack.examples
    ]
    hashes = [secret.hash[:8] for record in records for secret in record.secrets] + [
        record.data.hash[:8] for record in records
    ]
    assert any(guesses) and len(hashes) == 14
    assert not [one for one in [*private, *guesses, *hashes, str(place)] if one and one in text]


def test_a_record_that_does_not_say_its_rows_is_refused(place: Path) -> None:
    (path, *_) = (place / "second" / "some").glob("[0-9a-f]*.json")
    record = read_record(path)
    rewrite_record(
        path, replace(record, secrets=tuple(replace(one, row=None) for one in record.secrets))
    )
    with pytest.raises(GradleakError, match=r"does not say which rows .* Run the audit again"):
        publish_runs(place / "second" / "some")


def test_results_of_ones_own_data_are_refused(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "notes.csv").write_text("text,label\nthe dog was here,0\n")
    given = [
        "--data",
        str(tmp_path / "notes.csv"),
        "--limit",
        "1",
        "--out",
        str(tmp_path / "runs"),
        "--device",
        "cpu",
    ]
    assert main(["audit", "--target", "tiny", "--attack", "blind", *given]) == 0
    assert main(["publish", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "'file'" in told and "your own data are not published" in told and "cola" in told
    assert not (tmp_path / "out").exists()
