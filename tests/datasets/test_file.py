"""Files of every format, and what is wrong with bad ones."""

import gzip
import json
import lzma
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError
from gradleak.datasets import Canaries, File, resolve_dataset

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
    table = pyarrow.table(
        {"text": [example.text for example in TWO], "label": [example.label for example in TWO]}
    )
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
    assert File(written(tmp_path, "a.csv", CSV), label=None).load(1) == [
        Example('a "quoted" word', None)
    ]


def test_the_format_can_be_said_where_the_extension_does_not(tmp_path: Path) -> None:
    path = written(tmp_path, "notes.dat", JSONL)
    assert File(path, format="jsonl").load() == TWO
    with pytest.raises(GradleakError, match="Cannot tell the format .*add format="):
        File(path).load()


def test_marked_secrets_of_jsonl_are_kept(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"text": "code 4471", "label": 0, "secrets": [[5, 9]]}')
    assert File(path).load() == [Example("code 4471", 0, ((5, 9),))]


@pytest.mark.parametrize(
    "secrets",
    ["[[5, 10]]", "[[-1, 3]]", "[[3, 3]]", "[5, 9]", '"4471"', "[[true, 3]]", "[[0, 1, 2]]"],
)
def test_secrets_outside_the_text_are_refused(tmp_path: Path, secrets: str) -> None:
    path = written(
        tmp_path, "a.jsonl", f'{{"text": "code 4471", "label": 0, "secrets": {secrets}}}'
    )
    with pytest.raises(
        GradleakError, match=r"line 1: secrets must be a list of \[start, end\] .* <= 9"
    ):
        File(path).load()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.tsv",
            "lable\ttext\n1\tb\n",
            "line 2: no column 'label' .did you mean 'lable'.*Columns: lable, text.*label=null",
        ),
        (
            "a.jsonl",
            '{"txt": "b", "label": 1}',
            "line 1: no column 'text' .did you mean 'txt'.*Columns: txt, label",
        ),
        ("a.tsv", "text\tlabel\nb\t1\n \t0\n", "line 3: the text is empty"),
        ("a.txt", "one\n\nthree\n", "line 2: the text is empty"),
        ("a.csv", "text,label\nb,1\n\nc,0\n", "line 3: the line is empty"),
        (
            "a.csv",
            "text,label\nb,1\nc, \n",
            "a.csv: 1 of 2 rows cannot be used.\n  line 3: the label is empty",
        ),
        (
            "a.jsonl",
            '{"text": "b", "label": true}',
            "line 1: the label must be a number or a name, not bool",
        ),
        ("a.jsonl", '{"text": 7, "label": 1}', "line 1: the text must be a string, not int"),
        ("a.jsonl", '{"text": "b", "label": 1}\n{', "line 2: not JSON"),
        ("a.jsonl", "[1]", "line 1: not a JSON object"),
        ("a.tsv", "text\tlabel\nonly one\n", "line 2: 1 columns where 2 are expected"),
        ("a.csv", "text,text\na,b\n", "two columns have the same name"),
        ("a.tsv", "", "is empty: it holds no examples"),
        ("a.csv", "text,label\n", "is empty: it holds no examples"),
        ("a.txt", "\n\n", "is empty: it holds no examples"),
        (
            "a.txt",
            b"fine\ncaf\xe9 \x81\n",
            "line 2: the text is not utf-8 or cp1252; say what it is, such as --data ",
        ),
        ("a.tsv.gz", b"not gzip", "Cannot read .*a.tsv.gz"),
        ("a.parquet", b"not parquet", "Cannot read .*a.parquet as parquet|pip install"),
    ],
)
def test_bad_content_is_refused_by_its_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(GradleakError, match=message):
        File(written(tmp_path, name, content)).load()


def test_all_bad_rows_are_refused_at_once_by_their_lines(tmp_path: Path) -> None:
    content = 'text,label\na,1\n\n"two\nlines",0\n ,1\nb,\nc\n ,0\n'
    with pytest.raises(GradleakError) as refused:
        File(written(tmp_path, "a.csv", content)).load()
    said = str(refused.value)
    assert "a.csv: 5 of 7 rows cannot be used.\n" in said
    for line in (
        "line 3: the line is empty",
        "lines 6 and 9: the text is empty",
        "line 7: the label is empty",
        "line 8: 1 columns",
    ):
        assert f"\n  {line}" in said
    assert "--skip-bad" in said and "skip_bad=true" in said


def test_bad_rows_are_left_out_where_that_is_asked_for_and_said(tmp_path: Path) -> None:
    data = File(
        written(tmp_path, "a.jsonl", f'{{"text": " ", "label": 1}}\n\n{JSONL}\n{{"label": 0}}\n'),
        skip_bad=True,
    )
    assert data.load() == TWO
    assert [example.row for example in data.load()] == [2, 3]  # numbered as in the file
    (said,) = data.remarks()
    assert (
        said
        == "3 of 5 rows cannot be used and were left out: line 1: the text is empty; line 2: the"
        " line is empty; line 5: no column 'text'."
    )
    assert File(data.path).without_bad_rows() == data
    with pytest.raises(GradleakError, match="no row can be used. line 2: the text is empty"):
        File(written(tmp_path, "b.csv", "text,label\n ,1\n"), skip_bad=True).load()
    with pytest.raises(GradleakError, match="canaries has no rows that cannot be used"):
        Canaries().without_bad_rows()


@pytest.mark.parametrize(
    ("delimiter", "letter"), [("comma", ","), ("semicolon", ";"), ("tab", "\t"), ("bar", "|")]
)
def test_what_cuts_a_csv_is_found_or_given(tmp_path: Path, delimiter: Any, letter: str) -> None:
    content = "\n".join(
        [f"text{letter}label", f'"one; two | three"{letter}1', f'"four\tfive, six"{letter}0']
    )
    found = File(written(tmp_path, "a.csv", content))
    given = File(found.path, delimiter=delimiter)
    assert (
        found.load()
        == given.load()
        == [Example("one; two | three", 1), Example("four\tfive, six", 0)]
    )
    assert [delimiter in said for said in found.remarks()] == [True] * (letter != ",")
    assert given.remarks() == ()


def test_a_document_may_be_longer_than_the_csv_librarys_limit(tmp_path: Path) -> None:
    text = "word " * 40_000
    assert File(written(tmp_path, "a.csv", f"text;label\n{text};1\n")).load() == [Example(text, 1)]


def test_without_a_header_the_rows_tell_what_cuts_them(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "first; of all,1\nsecond,0\nthird; and; last,1\n")
    assert [example.label for example in File(path, text="1", label="2", header=False).load()] == [
        1,
        0,
        1,
    ]


def test_a_delimiter_that_would_do_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        GradleakError, match=r"delimiter=semicolon is for csv, and .*a.jsonl is jsonl"
    ):
        File(written(tmp_path, "a.jsonl", JSONL), delimiter="semicolon").load()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "cp1252", "utf-16"])
def test_an_encoding_is_found_or_given(tmp_path: Path, encoding: str) -> None:
    path = written(tmp_path, "a.csv", "text,label\ndéjà vu,1\n".encode(encoding))
    assert File(path).load() == File(path, encoding=encoding).load() == [Example("déjà vu", 1)]
    assert bool(File(path).remarks()) == (not encoding.startswith("utf-8"))
    assert File(path, encoding=encoding).remarks() == ()


def test_the_way_out_of_an_unknown_encoding_works_as_printed(tmp_path: Path) -> None:
    path = written(tmp_path, "my notes.csv", b"text,label\ncaf\xe9 \x81,1\n")
    with pytest.raises(GradleakError) as refused:
        File(path).load()
    _, data = shlex.split(str(refused.value).partition("such as ")[2].removesuffix("."))
    assert resolve_dataset(data).load() == [Example("café \x81", 1)]
    with pytest.raises(GradleakError, match="line 2: the text is not utf-8;"):
        File(path, encoding="utf-8").load()
    with pytest.raises(
        GradleakError, match="There is no encoding 'latin-eins': write for example encoding=latin-1"
    ):
        File(path, encoding="latin-eins").load()


def test_labels_are_numbers_names_or_those_of_a_list(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "text,label\na, Good \nb,1.0\nc,+2\n")
    assert [example.label for example in File(path).load()] == ["Good", 1, 2]
    named = written(tmp_path, "b.csv", "text,label\na,good\nb,bad\nc,Bad\n")
    with pytest.raises(GradleakError, match=r"line 4: the label is none of labels=\[bad,good\]"):
        File(named, labels=("bad", "good")).load()
    assert [
        example.label for example in File(named, labels=("bad", "good"), skip_bad=True).load()
    ] == [1, 0]
    with pytest.raises(GradleakError, match="line 4: the label is none of"):
        # A name, not what is said of a label that is no number
        File(named, labels=("bad", "good", "None")).load()


def test_examples_know_their_line(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", CSV)
    assert [example.where for example in File(path).load()] == [
        f"{path}, line 2",
        f"{path}, line 3",
    ]


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GradleakError, match="There is no file .*gone.tsv; check the path"):
        File(str(tmp_path / "gone.tsv")).load()
    written(tmp_path, "notes.csv", CSV)
    with pytest.raises(
        GradleakError, match="There is no file .*notse.csv; did you mean .*/notes.csv"
    ):
        File(str(tmp_path / "notse.csv")).load()
    with pytest.raises(GradleakError, match="is a folder"):
        File(str(tmp_path)).load()


def test_asking_for_more_than_the_file_has_says_how_many_there_are(tmp_path: Path) -> None:
    with pytest.raises(GradleakError, match="3 examples were asked of .*a.tsv, which has 2"):
        File(written(tmp_path, "a.tsv", TSV)).load(3)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(GradleakError, match=r"pip install gradleak\[parquet\]"):
        File(written(tmp_path, "a.parquet", b"")).load()


def test_labels_may_be_several_or_have_fractions(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = ('{"text": "b c", "label": ["O", 1]}', '{"text": "b", "label": 0.5}')
    path.write_text("\n".join(rows))
    assert [one.label for one in File(str(path)).load()] == [("O", 1), 0.5]
    table = tmp_path / "a.csv"
    table.write_text("text,label\nb,-1.5e0\nc,2\n")
    assert [one.label for one in File(str(table)).load()] == [-1.5, 2]
