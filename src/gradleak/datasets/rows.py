"""Rows of a data file, whatever its format: tsv, csv, jsonl, plain text (each also as .gz or .xz),
parquet; and of each row what is the text, what the label and which spans are secret."""

import csv
import gzip
import importlib
import io
import itertools
import json
import lzma
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradleak.core.batch import ClassNumber, Example, Label
from gradleak.core.errors import GradleakError, did_you_mean, near_paths

Format = Literal["auto", "tsv", "csv", "jsonl", "parquet", "text"]
Delimiter = Literal["auto", "comma", "semicolon", "tab", "bar"]

FORMATS_BY_EXTENSION: dict[str, Format] = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
}
# The likeliest first
DELIMITERS: dict[str, str] = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}
LOOKED_AT = 100  # rows that tell what cuts the columns
BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
LONGEST_CELL = 2**30  # letters; the library stops at 2**17, and a document may be longer
_COMPRESSED: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}


@dataclass(frozen=True)
class Row:
    """One record of a file and the line it begins on, counted from 1 (parquet: the row); no
    values where it cannot be read."""

    where: str
    values: dict[str, Any]
    problem: str = ""  # why it cannot be read


@dataclass(frozen=True)
class Content:
    """The rows of a file, and what was found out about it: its encoding, and what cuts a csv
    into columns."""

    rows: list[Row]
    encoding: str = ""
    delimiter: str = ""


def read_rows(path: Path, format: Format = "auto", header: bool = True) -> list[Row]:
    """All rows of a UTF-8 file."""
    return read_file(path, format, header, "auto", "utf-8").rows


def read_file(
    path: Path, format: Format, header: bool, delimiter: Delimiter, encoding: str
) -> Content:
    """All rows of a file; without a header, columns are called "1", "2", … as `cut -f` counts
    them."""
    if path.is_dir():
        raise GradleakError(f"{path} is a folder; name one of the files in it.")
    if not path.is_file():
        raise GradleakError(f"There is no file {path}; {near_paths(str(path), 'check the path.')}")
    found = known_format(path) if format == "auto" else format
    if found is None:
        raise GradleakError(
            f"Cannot tell the format of {path} by its extension (known:"
            f" {', '.join(FORMATS_BY_EXTENSION)}); add format=tsv|csv|jsonl|parquet|text."
        )
    _refuse_idle(path, found, delimiter, encoding)
    content = (
        Content(list(_parquet(path)))
        if found == "parquet"
        else _read_text(path, found, header, delimiter, encoding)
    )
    if not content.rows:
        raise GradleakError(f"{path} is empty: it holds no examples.")
    return content


def _refuse_idle(path: Path, format: str, delimiter: str, encoding: str) -> None:
    if delimiter != "auto" and format != "csv":
        raise GradleakError(
            f"delimiter={delimiter} is for csv, and {path} is {format}: leave it out, or add"
            " format=csv."
        )
    if format == "parquet" and encoding not in ("auto", "utf-8"):
        raise GradleakError(
            f"encoding={encoding} is for text, and {path} is parquet: leave it out."
        )


def _read_text(
    path: Path, format: str, header: bool, delimiter: Delimiter, encoding: str
) -> Content:
    text, found = decode(path, encoding)
    csv.field_size_limit(LONGEST_CELL)
    if format != "csv":
        return Content(list(_PARSERS[format](path, text, header)), found)
    cut = find_delimiter(text) if delimiter == "auto" else delimiter
    reader = csv.reader(io.StringIO(text.rstrip("\r\n"), newline=""), delimiter=DELIMITERS[cut])
    return Content(list(_table(path, reader, header)), found, cut)


def known_format(path: Path) -> Format | None:
    """The format an extension stands for, with .gz or .xz looked through; None if there is none."""
    packed = path.suffix.lower() in _COMPRESSED
    inner = path.with_suffix("") if packed else path
    found = FORMATS_BY_EXTENSION.get(inner.suffix.lower())
    return None if packed and found == "parquet" else found  # parquet compresses within itself


def decode_text(path: Path, fallback: str = "utf-8") -> str:
    """The file's text, unpacked if need be: UTF-8, or else the fallback encoding."""
    try:
        return decode(path, "utf-8")[0]
    except GradleakError:
        return decode(path, fallback)[0]


def decode(path: Path, encoding: str) -> tuple[str, str]:
    """The file's text, unpacked if need be, and its encoding; `auto`: by its first bytes, else
    UTF-8, else Windows' cp1252."""
    try:
        content = _COMPRESSED.get(path.suffix.lower(), bytes)(path.read_bytes())
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise GradleakError(f"Cannot read {path}: {error}.") from error
    marked = next(
        (found for mark, found in BYTE_ORDER_MARKS.items() if content.startswith(mark)), None
    )
    tried = [encoding] if encoding != "auto" else [marked] if marked else ["utf-8", "cp1252"]
    for name in tried:
        try:
            return content.decode(name).removeprefix("\ufeff"), name
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
        except LookupError as error:
            raise GradleakError(
                f"There is no encoding {name!r}: write for example encoding=latin-1 or cp1252."
            ) from error
    way_out = f"say what it is, such as --data {shlex.quote(f'{path}:encoding=latin-1')}"
    raise GradleakError(f"{path}, line {line}: the text is not {' or '.join(tried)}; {way_out}.")


def find_delimiter(content: str) -> str:
    """What cuts a csv into columns: what cuts its first row into several, and the most rows into
    as many as that."""

    def alike(delimiter: str) -> float:
        reader = csv.reader(io.StringIO(content, newline=""), delimiter=DELIMITERS[delimiter])
        try:
            counts = [len(cells) for cells in itertools.islice(reader, LOOKED_AT) if cells]
        except csv.Error:
            return 0.0
        return counts.count(counts[0]) / len(counts) if counts and counts[0] > 1 else 0.0

    return max(DELIMITERS, key=alike)  # the first of several: a comma where nothing tells


def text_lines(content: str) -> list[str]:
    """Lines as files count them, without the empty ones at the end.

    str.splitlines would also cut at characters such as U+0085, which film reviews read as latin-1
    contain.
    """
    return content.replace("\r\n", "\n").rstrip("\n").split("\n") if content.strip("\r\n") else []


def _tsv(path: Path, content: str, header: bool) -> Iterator[Row]:
    # no quoting: in GLUE's files a quotation mark is a part of the sentence
    reader = csv.reader(text_lines(content), delimiter="\t", quoting=csv.QUOTE_NONE)
    return _table(path, reader, header)


def _table(path: Path, reader: Any, header: bool) -> Iterator[Row]:
    columns: list[str] | None = None
    begins = 1  # a quoted cell may go over several lines
    try:
        for cells in reader:
            where, begins = f"line {begins}", reader.line_num + 1
            if columns is None:
                if not any(cells):
                    continue  # before the first line there is nothing to miss
                columns = (
                    _unique(path, cells)
                    if header
                    else [str(number) for number in range(1, len(cells) + 1)]
                )
                if header:
                    continue
            if not any(cells):
                yield Row(where, {}, "the line is empty")
            elif len(cells) != len(columns):
                yield Row(where, {}, f"{len(cells)} columns where {len(columns)} are expected")
            else:
                yield Row(where, dict(zip(columns, cells, strict=True)))
    except csv.Error as error:
        raise GradleakError(f"{path}, line {reader.line_num}: {error}.") from error


def _unique(path: Path, columns: list[str]) -> list[str]:
    if len(set(columns)) < len(columns):
        raise GradleakError(
            f"{path}: two columns have the same name among {', '.join(columns)}; rename one."
        )
    return columns


def parse_jsonl(content: str) -> Iterator[Row]:
    """One row for each line of JSON objects."""
    for number, line in enumerate(text_lines(content), start=1):
        where = f"line {number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            wrong = f"not JSON ({error.msg}); write one object a line"
            yield Row(where, {}, wrong if line.strip() else "the line is empty")
            continue
        if isinstance(values, dict):
            yield Row(where, values)
        else:
            yield Row(where, {}, 'not a JSON object; write for example {"text": "…", "label": 0}')


def _text(path: Path, content: str, header: bool) -> Iterator[Row]:
    for number, line in enumerate(text_lines(content), start=1):
        yield Row(f"line {number}", {"text": line})


_PARSERS: dict[str, Callable[[Path, str, bool], Iterable[Row]]] = {
    "tsv": _tsv,
    "jsonl": lambda path, content, header: parse_jsonl(content),
    "text": _text,
}


def _parquet(path: Path) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise GradleakError(
            f"Reading {path} needs pyarrow: pip install gradleak[parquet]."
        ) from error
    try:
        records = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these two
        raise GradleakError(f"Cannot read {path} as parquet: {error}.") from error
    for number, values in enumerate(records, start=1):
        yield Row(f"row {number}", values)


WITH_FRACTION = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")  # 1.0 is what spreadsheets and pandas make of a 1
PLACES = 12  # lines that are named for each kind of problem


@dataclass(frozen=True)
class TextColumns:
    """Which columns to read. `source` names the data in errors; `marked`: a "secrets" column may
    mark spans of the text."""

    source: str
    text: str
    label: str | None
    marked: bool = False
    # Names of the classes 0, 1, …; none: labels are numbers, or names that the target knows
    labels: tuple[str, ...] = ()
    skip_bad: bool = False  # leave out rows that cannot be used

    def examples(self, rows: Sequence[Row]) -> list[Example]:
        """One example a row. Rows that cannot be used are refused, all at once, or left out
        where that is asked for."""
        good, bad = self.sort(rows)
        if bad and not self.skip_bad:
            raise GradleakError(
                f"{self.source}: {_share_of(len(bad), len(rows))} cannot be used.\n"
                + "\n".join(f"  {line}" for line in list_problems(bad))
                + "\nMend or remove them, or leave them out: add --skip-bad, or skip_bad=true to"
                " the fields of the data."
            )
        if not good:
            raise GradleakError(f"{self.source}: no row can be used. {list_problems(bad)[0]}.")
        return good

    def describe_left_out(self, rows: Sequence[Row]) -> tuple[str, ...]:
        """How many rows are left out and why, in a sentence; nothing where none are."""
        bad = self.sort(rows)[1] if self.skip_bad else []
        return (
            (
                (
                    f"{_share_of(len(bad), len(rows))} cannot be used and were left out:"
                    f" {'; '.join(list_problems(bad))}."
                ),
            )
            if bad
            else ()
        )

    def sort(self, rows: Sequence[Row]) -> tuple[list[Example], list[Row]]:
        """Rows as examples, and those that cannot be used with what is wrong with each."""
        self._refuse_columns(rows)
        good: list[Example] = []
        bad: list[Row] = []
        for number, row in enumerate(rows):
            try:
                good.append(self._example(row, number))
            except _Unfit as problem:
                bad.append(Row(row.where, {}, str(problem)))
        return good, bad

    def _refuse_columns(self, rows: Sequence[Row]) -> None:
        """A column that no row has is one problem, not as many as there are rows."""
        readable = [row for row in rows if not row.problem]
        for field, column in (("text", self.text), ("label", self.label)):
            if (
                column is not None
                and readable
                and all(column not in row.values for row in readable)
            ):
                there = [str(name) for name in readable[0].values]
                otherwise = ", or label=null for no labels" if field == "label" else ""
                raise GradleakError(
                    f"{self.source}, {readable[0].where}: no column"
                    f" {column!r}{did_you_mean(column, there)} Columns:"
                    f" {', '.join(there) or 'none'}. Choose with {field}=…{otherwise}."
                )

    def _example(self, row: Row, number: int) -> Example:
        if row.problem:
            raise _Unfit(row.problem)
        text = self._cell(row, self.text)
        if text is None or (isinstance(text, str) and not text.strip()):
            raise _Unfit("the text is empty")
        if not isinstance(text, str):
            raise _Unfit(f"the text must be a string, not {type(text).__name__}")
        label = None if self.label is None else self._label(self._cell(row, self.label))
        secrets = _secrets(row, text) if self.marked else ()
        return Example(text, label, secrets, row=number, where=f"{self.source}, {row.where}")

    def _cell(self, row: Row, column: str) -> Any:
        if column not in row.values:
            raise _Unfit(f"no column {column!r}")
        return row.values[column]

    def _label(self, value: Any) -> Label:
        """A class by number or name, or a number with a fraction; in a list, several of them."""
        if isinstance(value, (list, tuple)) or type(value).__name__ == "ndarray":
            return tuple(self._one_label(one) for one in value)
        return self._one_label(value)

    def _one_label(self, value: Any) -> int | str | float:
        written = (
            str(value).strip()
            if isinstance(value, (str, int, float)) and not isinstance(value, bool)
            else None
        )
        if value is None or written == "":
            raise _Unfit("the label is empty")
        if written is None:
            raise _Unfit(f"the label must be a number or a name, not {type(value).__name__}")
        if not self.labels and WITH_FRACTION.fullmatch(written) and not WHOLE.fullmatch(written):
            return float(written)
        number = int(written.split(".")[0]) if WHOLE.fullmatch(written) else None
        if not self.labels:
            return written if number is None else number
        name = written if written in self.labels or number is None else str(number)
        if name not in self.labels:
            # not which it is: a wrong column may hold whole private texts, and this goes into
            # records
            raise _Unfit(f"the label is none of labels=[{','.join(self.labels)}]; case counts")
        return ClassNumber(self.labels.index(name))


class _Unfit(Exception):
    """Why a row cannot be used: a sentence without its end, and without anything of the row's
    text."""


def list_problems(bad: Iterable[Row]) -> list[str]:
    """`lines 4, 9 and 12: the text is empty`, one for each kind of problem, in the order of the
    file."""
    places: dict[str, list[str]] = {}
    for row in bad:
        places.setdefault(row.problem, []).append(row.where)
    return [f"{_join_places(where)}: {problem}" for problem, where in places.items()]


def _join_places(where: Sequence[str]) -> str:
    """`lines 4, 9 and 12` of `line 4`, `line 9` and `line 12`."""
    if len(where) == 1:
        return where[0]
    unit = where[0].split()[0]
    numbers = [place.split()[-1] for place in where]
    if len(numbers) > PLACES:
        numbers = [*numbers[:PLACES], f"{len(numbers) - PLACES} more"]
    return f"{unit}s {', '.join(numbers[:-1])} and {numbers[-1]}"


def _share_of(bad: int, of: int) -> str:
    return f"{bad} of {of} rows" if of > 1 else "its only row"


def _secrets(row: Row, text: str) -> tuple[tuple[int, int], ...]:
    spans = row.values.get("secrets") or []
    if not isinstance(spans, list) or not all(_is_span(span, len(text)) for span in spans):
        form = f"a list of [start, end] with 0 <= start < end <= {len(text)}, the text's length"
        raise _Unfit(f"secrets must be {form}")  # the value may be the secret itself
    return tuple((start, end) for start, end in spans)


def _is_span(span: Any, length: int) -> bool:
    is_pair = isinstance(span, list) and [type(offset) for offset in span] == [int, int]
    return is_pair and 0 <= span[0] < span[1] <= length
