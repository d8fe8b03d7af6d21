"""How datasets are written on a command line."""

from pathlib import Path

import pytest

from gradleak.core.errors import GradleakError
from gradleak.core.registry import list_registered
from gradleak.core.specs import from_string, to_string
from gradleak.datasets import Canaries, Cola, File, Hub, resolve_dataset


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ("canaries", Canaries()),
        ("canaries:secrets_only=true", Canaries(secrets_only=True)),
        ("cola:split=dev,selection=all", Cola("dev", "all")),
        ("hub:path=glue,config=cola,text=sentence", Hub("glue", "cola", text="sentence")),
        ("file:path=a.csv,label=null", File("a.csv", label=None)),
        ("notes.csv", File("notes.csv")),
        (
            "some folder/notes, old.tsv.gz:text=4,label=2,header=false",
            File("some folder/notes, old.tsv.gz", "4", "2", header=False),
        ),
    ],
)
def test_a_line_names_a_dataset_or_a_file(described: str, expected: object) -> None:
    assert resolve_dataset(described) == expected


def test_an_existing_file_needs_no_known_extension(tmp_path: Path) -> None:
    path = tmp_path / "notes: mine"
    path.write_text("one\n")
    assert resolve_dataset(str(path)) == File(str(path))
    (tmp_path / "notes").write_text("one\n")
    assert resolve_dataset(f"{tmp_path / 'notes'}:format=text") == File(
        str(tmp_path / "notes"), format="text"
    )


def test_a_registered_name_wins_over_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cola").write_text("")
    assert resolve_dataset("cola") == Cola()


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (
            "canarys",
            "Unknown dataset 'canarys' .did you mean 'canaries'.*Available: canaries, .*cola",
        ),
        ("notes.csv:txt=note", "has no field 'txt' .did you mean 'text'"),
        ("cola:split=test", "must be one of train|dev"),
        ("", "Unknown dataset ''"),
    ],
)
def test_unknown_names_and_fields_are_refused(described: str, message: str) -> None:
    with pytest.raises(GradleakError, match=message):
        resolve_dataset(described)


def test_every_dataset_of_the_package_is_registered() -> None:
    assert {"canaries", "cola", "file", "hub", "rotten_tomatoes", "sst2"} <= set(
        list_registered("dataset")
    )


@pytest.mark.parametrize(
    "dataset",
    [
        Canaries(True),
        Cola(),
        File("a b.csv", "1", None, "csv", False, "lamp_tune"),
        Hub("glue", "sst2"),
    ],
)
def test_a_dataset_survives_being_written_on_one_line(
    dataset: Canaries | Cola | File | Hub,
) -> None:
    assert from_string("dataset", to_string(dataset)) == dataset
