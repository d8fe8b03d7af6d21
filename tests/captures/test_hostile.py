"""Files that are broken or that somebody made to do harm: each is a sentence, and takes little
memory."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gradleak.captures import (
    FORMAT,
    CaptureError,
    is_capture,
    read_capture,
    read_header,
    read_layout,
)
from gradleak.captures.header import MOST_MARKS
from gradleak.captures.layout import LONGEST_HEADER

from .conftest import entry, metadata_of

Forge = Callable[..., Path]
Write = Callable[..., Path]
MOST_MEMORY = 192 * 2**20  # bytes that the worst header may take while it is read
ONE = {"w": entry("F32", [2], 0)}
ONES = b"\x00\x00\x80\x3f"


def refuse(path: Path, said: str) -> None:
    """Reading must end with a sentence that names the file, for the header as for all of it."""
    with pytest.raises(CaptureError) as caught:
        read_capture(path)
    message = str(caught.value)
    assert said in message
    assert message.startswith(str(path)) and message.endswith(".")
    assert message.isprintable() and len(message) < 500 + len(str(path))
    assert caught.value.exit_code == 2


def test_the_smallest_forged_capture_is_read(forge: Forge) -> None:
    """What the others change is right."""
    assert torch.equal(read_capture(forge()).tensors["w"], torch.ones(2))


# Bytes


@pytest.mark.parametrize("length", [0, 1, 7, 8])
def test_a_file_that_is_too_short(tmp_path: Path, length: int) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(b"\x00" * length)
    refuse(path, "too short" if length < 8 else "does not begin with a brace")


def test_every_truncation(write: Write) -> None:
    path = write()
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        refuse(path, "capture the update again")


def test_bytes_that_were_appended(write: Write) -> None:
    path = write()
    path.write_bytes(path.read_bytes() + b"x")
    refuse(path, "1 bytes behind its last tensor belong to none")


@pytest.mark.parametrize("claimed", [LONGEST_HEADER + 1, 2**40, 2**63, 2**64 - 1])
def test_a_header_that_is_said_to_be_huge(tmp_path: Path, claimed: int) -> None:
    path = tmp_path / "huge.safetensors"
    path.write_bytes(claimed.to_bytes(8, "little") + b"{}")
    refuse(path, f"it claims a header of {claimed:,} bytes, and a capture's has at most")


def test_a_header_that_ends_behind_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes((1000).to_bytes(8, "little") + b"{}")
    refuse(path, "it claims a header of 1,000 bytes and has 10 in all")


def test_40_gigabytes_claimed_in_1_kilobyte(forge: Forge) -> None:
    path = forge({"w": entry("F32", [10**10], 0)})
    assert path.stat().st_size < 1024
    refuse(path, "its tensors take 40,000,000,000 bytes and 8 are there")


def test_a_file_with_holes_that_is_larger_than_memory(forge: Forge) -> None:
    entries = 2**40
    path = forge({"w": entry("F32", [entries], 0)}, b"")
    try:
        os.truncate(path, path.stat().st_size + 4 * entries)
    except OSError:
        pytest.skip("files are not that long here")
    refuse(path, "of memory are free")


def test_a_file_that_becomes_shorter_while_it_is_read(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(holding={"w": torch.ones(100_000)})  # more than is read in one go
    monkeypatch.setattr(
        "gradleak.captures.capture_file._check_memory",
        lambda wanted: os.truncate(path, path.stat().st_size - 1),
    )
    refuse(path, "became shorter while it was read")


# The list of tensors


@pytest.mark.parametrize(
    ("entries", "data", "said"),
    [
        ({"a": entry("F32", [2], 0), "b": entry("F32", [2], 4)}, 12, "“b” shares bytes with"),
        ({"a": entry("F32", [2], 0), "b": entry("F32", [2], 0)}, 8, "“b” shares bytes with"),
        ({"a": entry("F32", [2], 0), "b": entry("F32", [2], 12)}, 20, "“b” leaves a gap behind"),
        ({"a": entry("F32", [2], 4)}, 12, "“a” leaves a gap behind"),
        ({"a": entry("F32", [2], -8)}, 8, "data_offsets of its tensor “a”"),
        ({"a": entry("F32", [2], 8, 0)}, 8, "data_offsets of its tensor “a”"),
        ({"a": entry("F32", [2], 0, 2**70)}, 8, "data_offsets of its tensor “a”"),
        ({"a": {**entry("F32", [2], 0), "data_offsets": [0, 8.0]}}, 8, "data_offsets of its"),
        ({"a": {**entry("F32", [2], 0), "data_offsets": [0, 8, 8]}}, 8, "data_offsets of its"),
        ({"a": {**entry("F32", [2], 0), "data_offsets": [False, 8]}}, 8, "data_offsets of its"),
        ({"a": {**entry("F32", [2], 0), "data_offsets": "08"}}, 8, "data_offsets of its"),
        ({"a": entry("F32", [2], 0, 9)}, 9, "has other bytes than its shape and dtype need"),
        ({"a": entry("F32", [2], 0, 4)}, 4, "has other bytes than its shape and dtype need"),
        ({"a": entry("I64", [2], 0)}, 16, "has the dtype “I64”, and a capture holds float64"),
        ({"a": entry("BOOL", [2], 0)}, 2, "has the dtype “BOOL”"),
        ({"a": {**entry("F32", [2], 0), "dtype": "F8_E4M3"}}, 8, "has the dtype “F8_E4M3”"),
        ({"a": {**entry("F32", [2], 0), "dtype": ["F32"]}}, 8, "has the dtype"),
        ({"a": {**entry("F32", [2], 0), "dtype": "\x1b[31m" * 99}}, 8, "\\x1b[31m"),
        ({"a": entry("F32", [0, 2**60], 0)}, 0, "a shape that no parameter has"),
        ({"a": entry("F32", [2**60, 2**60], 0, 8)}, 8, "has other bytes than its shape"),
        ({"a": entry("F32", [10**300], 0, 8)}, 8, "a shape that no parameter has"),
        ({"a": entry("F32", [1] * 71, 0)}, 4, "a shape that no parameter has"),
        ({"a": entry("F32", [-1, -2], 0)}, 8, "a shape that no parameter has"),
        ({"a": {**entry("F32", [2], 0), "shape": [2.0]}}, 8, "a shape that no parameter has"),
        ({"a": {**entry("F32", [2], 0), "shape": [True, 2]}}, 8, "a shape that no parameter has"),
        ({"a": {**entry("F32", [2], 0), "shape": 2}}, 8, "a shape that no parameter has"),
        ({"a": {**entry("F32", [2], 0), "more": 1}}, 8, "dtype, shape and data_offsets alone"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "dtype, shape and data_offsets alone"),
        ({"a": 3}, 8, "dtype, shape and data_offsets alone"),
        ({"a": None}, 8, "dtype, shape and data_offsets alone"),
        ({}, 0, "it holds no tensor"),
        ({}, 8, "it holds no tensor"),
    ],
)
def test_tensors_that_cannot_lie_in_a_file(
    forge: Forge, entries: dict[str, Any], data: int, said: str
) -> None:
    refuse(forge(entries, b"\x01" * data), said)


def test_tensors_in_any_order_of_the_list_are_read_where_they_lie(forge: Forge) -> None:
    path = forge({"b": entry("F32", [1], 4), "a": entry("F32", [1], 0)}, ONES + 2 * b"\x00\x40")
    assert list(read_capture(path).tensors) == ["a", "b"]


@pytest.mark.parametrize(
    "name",
    ["../../x", "/etc/passwd", "a/b", "a\\b", "C:\\x", "", "a\nb", "a\x00b", "a\x1b[2Jb",
     "a\u202eb", "\ud800", "a\u200bb", "n" * 513],
)  # fmt: skip
def test_names_that_no_model_has(forge: Forge, name: str) -> None:
    refuse(forge({name: entry("F32", [2], 0)}), "tensor name")


def test_empty_tensors_by_the_hundred_thousand(forge: Forge) -> None:
    few = {f"t{number}": entry("F32", [0], 0) for number in range(3)}
    path = forge(few, b"")
    with safe_open(path, "pt") as file:  # safetensors takes them
        assert len(list(file.keys())) == 3
    refuse(path, "its tensor “t0” has a shape that no parameter has")
    piece = json.dumps(few["t0"])
    many = ",".join(f'"t{number}":{piece}' for number in range(100_000))
    raw = f'{{"__metadata__": {json.dumps(metadata_of())}, {many}}}'
    refuse(forge(raw=raw.encode(), data=b""), "its JSON holds more than 500,000 values")


# The JSON


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"[]", "does not begin with a brace"),
        (b" {}", "does not begin with a brace"),
        (b"\xef\xbb\xbf{}", "does not begin with a brace"),
        (b'{"a":', "its JSON cannot be read"),
        (b"{} {}", "its JSON cannot be read"),
        (b'{"a": \xff}', "its header is no UTF-8"),
        (b'{"a": NaN}', "its JSON holds NaN"),
        (b'{"a": -Infinity}', "its JSON holds -Infinity"),
        (b'{"a": 1e999}', "a number that is too large"),
        (b'{"a":' + b"9" * 5000 + b"}", "its JSON cannot be read"),
        (b'{"a":' + b"[" * 100_000, "its JSON is nested too deeply"),
        (b'{"a":' + b'{"a":' * 100_000, "its JSON is nested too deeply"),
        (b'{"a":[' + b"[]," * MOST_MARKS + b"0]}", "its JSON holds more than 500,000 values"),
        (b'{"__metadata__": 3}', "without a capture's header"),
        (b'{"__metadata__": {"format": 3}}', "without a capture's header"),
        (b'{"__metadata__": {"format": "pt"}}', "the form “pt” and no capture"),
        (b'{"__metadata__": {"format": "gradleak.capture/2"}}', "Use the version of gradleak"),
        (b'{"__metadata__": {"format": "gradleak.capture/1"}}', "it lacks the header"),
    ],
    ids=lambda value: str(value[:40]),
)
def test_json_that_is_no_header(forge: Forge, raw: bytes, said: str) -> None:
    refuse(forge(raw=raw), said)


def test_a_name_that_stands_twice(forge: Forge) -> None:
    metadata = json.dumps(metadata_of())
    one, two = json.dumps(entry("F32", [2], 0)), json.dumps(entry("F32", [2], 8))
    first = forge(raw=f'{{"__metadata__": {metadata}, "w": {one}, "w": {one}}}'.encode())
    with safe_open(first, "pt") as file:  # safetensors takes one of them
        assert list(file.keys()) == ["w"]
    refuse(first, "it holds “w” twice")
    escaped = f'{{"__metadata__": {metadata}, "w": {one}, "\\u0077": {two}}}'
    refuse(forge(raw=escaped.encode(), data=ONES * 4), "it holds “w” twice")
    both = f'{{"__metadata__": {metadata}, "__metadata__": {metadata}, "w": {one}}}'
    refuse(forge(raw=both.encode()), "it holds “__metadata__” twice")
    shapes = f'{{"__metadata__": {metadata}, "w": {{"shape": [9], {one[1:]}}}'
    refuse(forge(raw=shapes.encode()), "it holds “shape” twice")


def test_a_header_that_hides_its_brackets_as_codes(forge: Forge) -> None:
    inner = '{"a":[' + "[]," * (MOST_MARKS // 2 + 1) + "0]}"
    raw = json.dumps({"__metadata__": {"format": FORMAT, "header": "HERE"}, **ONE})
    hidden = inner.replace('"', '\\"').replace("[", "\\u005b").replace(",", "\\u002c")
    refuse(forge(raw=raw.replace("HERE", hidden).encode()), "more than 500,000 values")


WORST = {
    "objects": b'{"a":[' + b'{"b":1.5},' * 249_000 + b"0]}",
    "texts": b'{"a":[' + b'"abcd",' * 490_000 + b"0]}",
    "names": b"{" + b",".join(b'"%d":0' % number for number in range(490_000)) + b"}",
    "one text": b'{"a":"' + "𝕏".encode() * 2_000_000 + b'"}',
}


# What the header says


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "pickle"}, "kind must be one of"),
        ({"kind": ["gradients"]}, "header.kind cannot be of type list"),
        ({"model": None}, "header.model cannot be of type NoneType"),
        ({"protocol": {"name": "fedsgd"}}, "lacks header.protocol.learning_rate"),
        ({"protocol": {"name": "fedsgd", "learning_rate": 10**400, "steps": 1}}, "too large"),
        ({"protocol": {"name": "fedsgd", "learning_rate": 0, "steps": 1}}, "above 0"),
        ({"protocol": {"name": "fedsgd", "learning_rate": True, "steps": 1}}, "of type bool"),
        ({"granted": {"batch_size": 10**30}}, "batch_size must be a whole number from 1"),
        ({"granted": {"batch_size": 2, "labels": [1]}}, "labels has 1 values for a batch of 2"),
        ({"granted": {"labels": [0.5]}}, "labels[0] cannot be of type float"),
        ({"round": 2**40}, "round must be a whole number from 0"),
        ({"client": "\x1b]0;owned\x07"}, "client must be one line"),
        ({"when": "a" * 1001}, "when must be one line of at most 1000 letters"),
        ({"defenses": ["a\nb"]}, "defenses[0] must be one line"),
        ({"versions": {"torch": "\x00"}}, "versions.“torch” must be one line"),
        ({"created": "now"}, "created must be a date"),
        ({"other_records": {"a": "\ud800"}}, "lone surrogate"),
        ({"other_records": {"a": float("inf")}}, "holds Infinity"),
        (
            {"model": {"class_name": "M", "config": {}, "weights_hash": "", "names": ["../w"]}},
            "tensor name “../w”",
        ),
    ],
)  # fmt: skip
def test_a_header_that_says_what_cannot_be(forge: Forge, changes: Any, said: str) -> None:
    refuse(forge(metadata=metadata_of(**changes)), said)


@pytest.mark.parametrize(
    "tied",
    ["[]", "{", '{"w": "w"}', '{"v": "u"}', '{"v": 3}', '{"../v": "w"}', '{"v":"w","v":"w"}'],
)
def test_a_list_of_tied_tensors_that_cannot_be(forge: Forge, tied: str) -> None:
    refuse(forge(metadata={**metadata_of(), "tied": tied}), "capture the update again")


def test_fields_of_a_later_version_are_left_out(forge: Forge) -> None:
    path = forge(metadata={**metadata_of(later=3), "more": "text"})
    assert read_header(path).kind == "gradients"


# Values


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (b"\x00\x00\x80\x7f", "“w” holds infinity"),
        (b"\x00\x00\x80\xff", "“w” holds infinity"),
        (b"\x00\x00\xc0\x7f", "“w” holds NaN"),
        (b"\x00\x00\x00\x00", "every entry of it is zero"),
    ],
)
def test_values_that_say_nothing(forge: Forge, values: bytes, said: str) -> None:
    other = b"\x00" * 4 if "zero" in said else ONES
    refuse(forge(data=other + values), said)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_nan_among_many_is_found_in_every_dtype(
    write: Write, forge: Forge, dtype: torch.dtype
) -> None:
    tensor = torch.ones(3, 3_000_000, dtype=dtype)
    path = write(holding={"w": tensor})
    content = bytearray(path.read_bytes())
    content[-tensor.element_size() :] = b"\xff" * tensor.element_size()
    path.write_bytes(content)
    refuse(path, "“w” holds NaN")


def test_an_update_of_another_model(write: Write) -> None:
    path = write()
    for expected, said in (
        ({"w": torch.Size([4, 3]), "c": torch.Size([4])}, "“b” is no tensor of the model"),
        ({"w": torch.Size([3, 4]), "b": torch.Size([4])}, "4 × 3 and the model's “w” 3 × 4"),
    ):
        with pytest.raises(CaptureError, match=said) as caught:
            read_capture(path, expected)
        assert str(caught.value).startswith(str(path))


# Files


def test_what_is_no_file_of_ones_own(tmp_path: Path) -> None:
    folder, pipe, nowhere = (tmp_path / f"{name}.safetensors" for name in ("folder", "pipe", "no"))
    folder.mkdir()
    os.mkfifo(pipe)  # opening it would wait for a writer
    loop = tmp_path / "loop.safetensors"
    loop.symlink_to(loop)
    refuse(folder, "is a folder")
    refuse(pipe, "is no ordinary file")
    refuse(nowhere, "cannot be opened (No such file or directory)")
    refuse(loop, "cannot be opened")
    with pytest.raises(CaptureError, match="is no ordinary file"):
        read_capture("/dev/zero")
    with pytest.raises(CaptureError, match="cannot be opened"):
        read_capture(tmp_path / "a\x00b.safetensors")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(write: Write) -> None:
    path = write()
    path.chmod(0)
    refuse(path, "cannot be opened (Permission denied)")


def test_a_pickle_and_a_foreign_safetensors_file_are_no_captures(tmp_path: Path) -> None:
    pickled = tmp_path / "model.safetensors"
    torch.save({"w": torch.ones(2)}, pickled)
    refuse(pickled, "it is no safetensors file")
    foreign = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(2)}, foreign)
    refuse(foreign, "without a capture's header. Write it with gradleak.captures.write_capture")
    assert not is_capture(pickled) and not is_capture(foreign)


def test_reading_writes_nothing(write: Write, tmp_path: Path) -> None:
    path = write()
    before = {one: one.stat().st_mtime_ns for one in tmp_path.rglob("*")}
    read_capture(path)
    read_layout(path)
    assert {one: one.stat().st_mtime_ns for one in tmp_path.rglob("*")} == before


def test_claims_of_any_size_fit_a_process_with_little_room(forge: Forge, tmp_path: Path) -> None:
    """All of it in a process that may take 256 MB beyond what its libraries take."""
    forge({"w": entry("F32", [10**10], 0)}, name="claim.safetensors")
    holes = forge({"w": entry("F32", [2**40], 0)}, b"", name="holes.safetensors")
    with contextlib.suppress(OSError):  # files are not that long everywhere
        os.truncate(holes, holes.stat().st_size + 2**42)
    for number, raw in enumerate(WORST.values()):
        forge(raw=raw, name=f"worst{number}.safetensors")
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "import torch\n"
        "from gradleak.captures import CaptureError, read_capture\n"
        "def kilobytes(name):\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith(name))\n"
        "Path('/proc/self/clear_refs').write_text('5')  # the most it held is what it holds\n"
        "before = kilobytes('VmHWM')\n"
        "room = 1024 * kilobytes('VmSize') + 256 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_AS, (room, room))\n"
        "refused = 0\n"
        "for path in sorted(Path(sys.argv[1]).iterdir()):\n"
        "    try:\n"
        "        read_capture(path)\n"
        "    except CaptureError:\n"
        "        refused += 1\n"
        "print(refused, kilobytes('VmHWM') - before)\n"
    )
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the system does not say how large a process is")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    refused, kilobytes = map(int, done.stdout.split())
    print(kilobytes)
    assert refused == 2 + len(WORST)
    assert kilobytes * 1024 < MOST_MEMORY
