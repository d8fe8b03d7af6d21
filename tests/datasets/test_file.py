"""Files of every format, and what is wrong with bad ones."""

import gzip
import json
import lzma
import sys
from pathlib import Path

import pytest

from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError
from gradleak.datasets import File

TWO = [Example('a "quoted" word', 1), Example("second, with a comma", 0)]
TSV = 'label\ttext\n1\ta "quoted" word\n0\tsecond, with a comma\n'
CSV = 'text,label\r\n"a ""quoted"" word",1\r\n"second, with a comma",0\r\n'
JSONL = "\n".join(json.dumps({"text": example.text, "label": example.label}) for example in TWO)


def written(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


@pytest.mark.parametrize(("extension", "content"), [("tsv", TSV), ("csv", CSV), ("jsonl", JSONL)])
def test_formats_agree_packed_or_not(tmp_path: Path, extension: str, content: str) -> None:
    packed = {f"a.{extension}": content, f"a.{extension}.gz": gzip.compress(content.encode())}
    packed[f"a.{extension}.xz"] = lzma.compress(content.encode())
    for name, stored in packed.items():
        assert File(written(tmp_path, name, stored)).load() == TWO


def test_parquet_agrees_with_the_text_formats(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [example.text for example in TWO], "label": [example.label for example in TWO]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert File(str(tmp_path / "a.parquet")).load() == TWO


def test_plain_text_is_one_example_a_line_without_labels(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "\ufefffirst line\nsecond \x85 line\n\n")
    assert File(path).load() == [Example("first line"), Example("second \x85 line")]


def test_headerless_columns_are_numbered_from_one(tmp_path: Path) -> None:
    path = written(tmp_path, "a.tsv", "id7\t1\t*\tsome words\n")
    assert File(path, text="4", label="2", header=False).load() == [Example("some words", 1)]
    with pytest.raises(GradleakError, match="Columns: 1, 2, 3, 4"):
        File(path, header=False).load()


def test_without_a_label_column_labels_are_unknown(tmp_path: Path) -> None:
    assert File(written(tmp_path, "a.csv", CSV), label=None).load(1) == [Example('a "quoted" word', None)]


def test_the_format_can_be_said_where_the_extension_does_not(tmp_path: Path) -> None:
    path = written(tmp_path, "notes.dat", JSONL)
    assert File(path, format="jsonl").load() == TWO
    with pytest.raises(GradleakError, match="Cannot tell the format .*add format="):
        File(path).load()


def test_marked_secrets_of_jsonl_are_kept(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"text": "code 4471", "label": 0, "secrets": [[5, 9]]}')
    assert File(path).load() == [Example("code 4471", 0, ((5, 9),))]


@pytest.mark.parametrize("secrets", ["[[5, 10]]", "[[-1, 3]]", "[[3, 3]]", "[5, 9]", '"4471"', "[[true, 3]]", "[[0, 1, 2]]"])
def test_secrets_outside_the_text_are_refused(tmp_path: Path, secrets: str) -> None:
    path = written(tmp_path, "a.jsonl", f'{{"text": "code 4471", "label": 0, "secrets": {secrets}}}')
    with pytest.raises(GradleakError, match=r"line 1: secrets must be a list of \[start, end\] .* <= 9"):
        File(path).load()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "lable\ttext\n1\tb\n", "line 2: no column 'label' .did you mean 'lable'.*Columns: lable, text.*label=null"),
        ("a.jsonl", '{"txt": "b", "label": 1}', "line 1: no column 'text' .did you mean 'txt'.*Columns: txt, label"),
        ("a.tsv", "text\tlabel\nb\t1\n \t0\n", "line 3: the text is empty"),
        ("a.txt", "one\n\nthree\n", "line 2: the text is empty"),
        ("a.csv", "text,label\nb,1\n\nc,0\n", "line 3: the line is empty"),
        ("a.csv", "text,label\nb,good\n", "a.csv, line 2: the label must be a whole number, not 'good'"),
        ("a.jsonl", '{"text": "b", "label": 0.5}', "line 1: the label must be a whole number, not 0.5"),
        ("a.jsonl", '{"text": "b", "label": true}', "line 1: the label must be a whole number, not True"),
        ("a.jsonl", '{"text": 7, "label": 1}', "line 1: the text must be a string, not int"),
        ("a.jsonl", '{"text": "b", "label": 1}\n{', "line 2: not JSON"),
        ("a.jsonl", "[1]", "line 1: not a JSON object"),
        ("a.tsv", "text\tlabel\nonly one\n", "line 2: 1 columns where 2 are expected"),
        ("a.csv", "text,text\na,b\n", "two columns have the same name"),
        ("a.tsv", "", "is empty: it holds no examples"),
        ("a.csv", "text,label\n", "is empty: it holds no examples"),
        ("a.txt", "\n\n", "is empty: it holds no examples"),
        ("a.txt", b"fine\ncaf\xe9\n", "line 2: the text is not UTF-8"),
        ("a.tsv.gz", b"not gzip", "Cannot read .*a.tsv.gz"),
        ("a.parquet", b"not parquet", "Cannot read .*a.parquet as parquet|pip install"),
    ],
)
def test_bad_content_is_refused_by_its_line(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(GradleakError, match=message):
        File(written(tmp_path, name, content)).load()


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GradleakError, match="There is no file .*gone.tsv; check the path"):
        File(str(tmp_path / "gone.tsv")).load()
    with pytest.raises(GradleakError, match="is a folder"):
        File(str(tmp_path)).load()


def test_asking_for_more_than_the_file_has_says_how_many_there_are(tmp_path: Path) -> None:
    with pytest.raises(GradleakError, match="3 examples were asked of .*a.tsv, which has 2"):
        File(written(tmp_path, "a.tsv", TSV)).load(3)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(GradleakError, match=r"pip install gradleak\[parquet\]"):
        File(written(tmp_path, "a.parquet", b"")).load()
