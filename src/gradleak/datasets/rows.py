"""Rows of a data file, whatever its format: tsv, csv, jsonl, plain text (each also as .gz or .xz), parquet."""

import csv
import gzip
import importlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradleak.core.errors import GradleakError

Format = Literal["auto", "tsv", "csv", "jsonl", "parquet", "text"]

FORMATS_BY_EXTENSION: dict[str, Format] = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
}
_COMPRESSED: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}


@dataclass(frozen=True)
class Row:
    """One record of a file and the line it stands on, counted from 1 (parquet: the row)."""

    where: str
    values: dict[str, Any]


def read_rows(path: Path, format: Format = "auto", header: bool = True) -> list[Row]:
    """All rows of a file; without a header, columns are called "1", "2", … as `cut -f` counts them."""
    if path.is_dir():
        raise GradleakError(f"{path} is a folder; name one of the files in it.")
    if not path.is_file():
        raise GradleakError(f"There is no file {path}; check the path.")
    found = known_format(path) if format == "auto" else format
    if found is None:
        known = ", ".join(FORMATS_BY_EXTENSION)
        fix = "add format=tsv|csv|jsonl|parquet|text"
        raise GradleakError(f"Cannot tell the format of {path} by its extension (known: {known}); {fix}.")
    rows = list(_parquet(path) if found == "parquet" else _PARSERS[found](path, decoded(path), header))
    if not rows:
        raise GradleakError(f"{path} is empty: it holds no examples.")
    return rows


def known_format(path: Path) -> Format | None:
    """The format an extension stands for, with .gz or .xz looked through; None if there is none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in _COMPRESSED
    inner = suffixes[-2:-1] if packed else suffixes[-1:]
    found = FORMATS_BY_EXTENSION.get(inner[0]) if inner else None
    return None if packed and found == "parquet" else found  # parquet compresses within itself


def decoded(path: Path, fallback: str | None = None) -> str:
    """The file's text, unpacked if need be: UTF-8, or else the fallback encoding."""
    try:
        content = _COMPRESSED.get(path.suffix.lower(), bytes)(path.read_bytes())
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise GradleakError(f"Cannot read {path}: {error}.") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if fallback is not None:
            return content.decode(fallback)
        line = content[: error.start].count(b"\n") + 1
        raise GradleakError(f"{path}, line {line}: the text is not UTF-8; convert the file with iconv -t utf-8.") from error


def text_lines(content: str) -> list[str]:
    """Lines as files count them, without the empty ones at the end.

    str.splitlines would also cut at characters such as U+0085, which film reviews read as latin-1 contain.
    """
    return content.replace("\r\n", "\n").rstrip("\n").split("\n") if content.strip("\r\n") else []


def _tsv(path: Path, content: str, header: bool) -> Iterator[Row]:
    # no quoting: in GLUE's files a quotation mark is a part of the sentence
    reader = csv.reader(text_lines(content), delimiter="\t", quoting=csv.QUOTE_NONE)
    return _table(path, reader, header)


def _csv(path: Path, content: str, header: bool) -> Iterator[Row]:
    return _table(path, csv.reader(io.StringIO(content.rstrip("\r\n"), newline="")), header)


def _table(path: Path, reader: Any, header: bool) -> Iterator[Row]:
    columns: list[str] | None = None
    try:
        for cells in reader:
            where = f"line {reader.line_num}"
            if columns is None:
                columns = _unique(path, cells) if header else [str(number) for number in range(1, len(cells) + 1)]
                if header:
                    continue
            if not cells:
                raise GradleakError(f"{path}, {where}: the line is empty; remove it.")
            if len(cells) != len(columns):
                raise GradleakError(f"{path}, {where}: {len(cells)} columns where {len(columns)} are expected.")
            yield Row(where, dict(zip(columns, cells, strict=True)))
    except csv.Error as error:
        raise GradleakError(f"{path}, line {reader.line_num}: {error}.") from error


def _unique(path: Path, columns: list[str]) -> list[str]:
    if len(set(columns)) < len(columns):
        raise GradleakError(f"{path}: two columns have the same name among {', '.join(columns)}; rename one.")
    return columns


def parse_jsonl(source: object, content: str) -> Iterator[Row]:
    """One row for each line of JSON objects; `source` names them in errors."""
    for number, line in enumerate(text_lines(content), start=1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise GradleakError(f"{source}, line {number}: not JSON ({error.msg}); write one object a line.") from error
        if not isinstance(values, dict):
            raise GradleakError(f'{source}, line {number}: not a JSON object; write for example {{"text": "…", "label": 0}}.')
        yield Row(f"line {number}", values)


def _jsonl(path: Path, content: str, header: bool) -> Iterator[Row]:
    return parse_jsonl(path, content)


def _text(path: Path, content: str, header: bool) -> Iterator[Row]:
    for number, line in enumerate(text_lines(content), start=1):
        yield Row(f"line {number}", {"text": line})


_PARSERS: dict[str, Callable[[Path, str, bool], Iterable[Row]]] = {"tsv": _tsv, "csv": _csv, "jsonl": _jsonl, "text": _text}


def _parquet(path: Path) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise GradleakError(f"Reading {path} needs pyarrow: pip install gradleak[parquet].") from error
    try:
        records = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these two
        raise GradleakError(f"Cannot read {path} as parquet: {error}.") from error
    for number, values in enumerate(records, start=1):
        yield Row(f"row {number}", values)
