"""CoLA, SST-2 and Rotten Tomatoes, in small copies of their layouts; the real ones where
GRADLEAK_DATA names them."""

import gzip
import os
from pathlib import Path

import pytest

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError
from gradleak.datasets import Cola, RottenTomatoes, Sst2

real_data = pytest.mark.skipif(
    "GRADLEAK_DATA" not in os.environ, reason="GRADLEAK_DATA is not set: no real datasets here"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("cola", "sst2", "rotten_tomatoes"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("GRADLEAK_DATA", str(tmp_path))
    return tmp_path


def test_cola_has_no_header_and_keeps_quotation_marks(folder: Path) -> None:
    (folder / "cola/train.tsv").write_text(
        's1\t1\t\tThe word "it" rained.\ns1\t0\t*\tRained it the.\n'
    )
    assert Cola(selection="all").load() == [
        Example('The word "it" rained.', 1),
        Example("Rained it the.", 0),
    ]


def test_sst2_is_read_packed_or_not(folder: Path) -> None:
    content = "sentence\tlabel\na fine day \t1\n"
    (folder / "sst2/train.tsv.gz").write_bytes(gzip.compress(content.encode()))
    (folder / "sst2/dev.tsv").write_text(content)
    assert (
        Sst2(selection="all").load()
        == Sst2(split="dev", selection="all").load()
        == [Example("a fine day ", 1)]
    )


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_rotten_tomatoes_is_the_first_four_fifths_of_each_class_positive_first(
    folder: Path, encoding: str
) -> None:
    for ending, word in (("pos", "cliché"), ("neg", "dull")):
        lines = "".join(f"{word} {number} \n" for number in range(10))
        (folder / f"rotten_tomatoes/rt-polarity.{ending}").write_text(lines, encoding=encoding)
    expected = [Example(f"cliché {number}", 1) for number in range(8)] + [
        Example(f"dull {number}", 0) for number in range(8)
    ]
    assert RottenTomatoes(selection="all").load() == expected


@pytest.mark.parametrize("dataset", [Cola(), Sst2(), RottenTomatoes()])
def test_without_the_folder_the_error_says_how_to_name_it(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADLEAK_DATA", raising=False)
    with pytest.raises(
        GradleakError, match="GRADLEAK_DATA is not set; set GRADLEAK_DATA to the folder"
    ):
        dataset.load(1)


@pytest.mark.parametrize("dataset", [Cola(), Sst2(), RottenTomatoes()])
def test_a_folder_without_the_files_is_refused(dataset: Dataset, folder: Path) -> None:
    with pytest.raises(GradleakError, match=f"There is no {dataset.name}/.*put the file there"):
        dataset.load(1)


@real_data
def test_lamp_attacks_sentence_2310_of_cola_first() -> None:
    assert Cola().load(1) == [Cola(selection="all").load()[2310]]


@real_data
@pytest.mark.parametrize(("dataset", "size"), [(Cola, 8551), (Sst2, 67349), (RottenTomatoes, 8530)])
def test_train_splits_have_the_hubs_sizes_and_two_classes(
    dataset: type[Cola | Sst2 | RottenTomatoes], size: int
) -> None:
    examples = dataset(selection="all").load()
    assert len(examples) == size and {example.label for example in examples} == {0, 1}


@real_data
def test_dev_splits_have_glues_sizes() -> None:
    assert len(Cola("dev", "all").load()) == 1043 and len(Sst2("dev", "all").load()) == 872


@real_data
def test_rotten_tomatoes_begins_with_4265_positive_sentences() -> None:
    labels = [example.label for example in RottenTomatoes(selection="all").load()]
    assert labels == [1] * 4265 + [0] * 4265
