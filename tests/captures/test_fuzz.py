"""Thousands of captures with something changed: each is refused with a sentence, or is a capture
that can be written again and that safetensors reads alike."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gradleak.captures import CaptureError, CaptureHeader, read_capture, write_capture
from gradleak.captures.layout import read_header

from .conftest import measure_growth

Write = Callable[..., Path]
Random = random.Random
MOST_GROWTH = 48 * 2**20  # bytes; the captures that are changed have less than 3,000
HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2, 3, 7, 8, 48, 2**31, 2**53, 2**60, 2**64, 10**400, 0.5, 1e300),
    *("", "w", "b", "F32", "I64", "F8_E5M2", "../../x", "/etc/passwd", "\x1b[2J", "\ud800", "NaN"),
    *([], [0], [0, 2**60], [1] * 71, [-1], [4, 3], [0, 8], [8, 0], {}, {"a": {}}, [[[[]]]]),
)
EXPECTED = {"w": torch.Size([4, 3]), "b": torch.Size([4]), "s": torch.Size([])}


@pytest.fixture
def whole(write: Write, tensors: dict[str, Tensor]) -> bytes:
    """A capture of three tensors, in bytes."""
    return write(holding={**tensors, "s": torch.tensor(2.0, dtype=torch.float64)}).read_bytes()


def change_bytes(chance: Random, content: bytes) -> bytes:
    """A few bytes flipped, inserted, repeated, removed or cut off, mostly in the header."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        end = chance.choice((8, len(changed), len(changed), len(changed)))
        at = chance.randrange(max(1, min(end, len(changed))))
        length = chance.choice((1, 1, 2, 8, 100))
        match chance.randrange(5):
            case 0:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                changed[at:at] = chance.randbytes(length)
            case 2:
                changed[at:at] = changed[at : at + length]
            case 3:
                del changed[at : at + length]
            case _:
                del changed[at + length :]
    return bytes(changed)


def change_structure(chance: Random, content: bytes) -> bytes:
    """A header that is whole JSON, with fields, offsets, names or values changed."""
    count = int.from_bytes(content[:8], "little")
    entries, data = json.loads(content[8 : 8 + count]), bytearray(content[8 + count :])
    metadata = entries.pop("__metadata__")
    own = json.loads(metadata["header"])
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        name = chance.choice(list(entries) or ["w"])
        match chance.randrange(10):
            case 0 | 1 | 2:
                change_somewhere(chance, entries)
            case 3 | 4 | 5:
                change_somewhere(chance, own)
            case 6:
                change_somewhere(chance, metadata)
            case 7 if name in entries:
                new = chance.choice(("module.w", "_orig_mod.b", "x", "../../x", "0", "1", "ä", ""))
                entries[new] = entries.pop(name)
            case 8:
                special = (b"\xff" * 4, b"\x00" * 4, b"\x00\x00\x80\x7f", chance.randbytes(4))
                at = chance.randrange(0, len(data) or 1, 4)
                data[at : at + 4] = chance.choice(special)
            case _:
                move_boundary(chance, entries)
    # Now and then only what it says of itself changed, so that much of it is right
    metadata = {**metadata, "header": own if chance.random() < 0.02 else json.dumps(own)}
    raw = json.dumps({"__metadata__": metadata, **entries}).encode()
    if chance.random() < 0.1:
        twice = chance.choice((b'"w"', b'"shape"', b'"dtype"', b'"format"'))
        raw = raw.replace(b'"b"' if twice == b'"w"' else b'"data_offsets"', twice, 1)
    raw += b" " * chance.choice((0, 0, 3))  # as safetensors pads
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


def change_somewhere(chance: Random, plain: dict[str, Any]) -> None:
    """Walks into a random value, and replaces, removes or doubles it."""
    within: Any = plain
    while True:
        keys = list(within) if isinstance(within, dict) else list(range(len(within)))
        if not keys:
            return
        key = chance.choice(keys)
        if not isinstance(within[key], (dict, list)) or not within[key] or chance.random() < 0.3:
            break
        within = within[key]
    match chance.randrange(5):
        case 0:
            del within[key]
        case 1 if isinstance(within, list):
            within.append(within[key])
        case 2 if isinstance(within[key], int):
            within[key] += chance.choice((-8, -4, -2, -1, 1, 2, 4, 8))
        case _:
            within[key] = chance.choice(HOSTILE)


def move_boundary(chance: Random, entries: dict[str, Any]) -> None:
    """Moves where one tensor begins or ends, and its neighbour and shape with it or not."""
    ordered = [entry for entry in entries.values() if isinstance(entry, dict)]
    if len(ordered) < 2:
        return
    one, two = chance.sample(ordered, 2)
    try:
        if chance.random() < 0.5:
            one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]
            if chance.random() < 0.5:
                one["shape"], two["shape"] = two["shape"], one["shape"]
                one["dtype"], two["dtype"] = two["dtype"], one["dtype"]
        else:
            one["data_offsets"][chance.randrange(2)] += chance.choice((-8, -4, 4, 8))
    except (KeyError, TypeError, IndexError):
        pass  # changed before into what has no boundary


def read_changed(path: Path, chance: Random) -> bool:
    """Whether a changed file was read; raises whatever is neither a capture nor a sentence."""
    try:
        capture = read_capture(path, EXPECTED if chance.random() < 0.3 else None)
    except CaptureError as error:
        said = str(error)
        assert said.startswith(str(path)) and said.endswith(".") and said.isprintable()
        assert len(said) < 600 + len(str(path))
        return False
    assert_equal(capture.tensors, load_file(path))
    assert all(bool(tensor.isfinite().all()) for tensor in capture.tensors.values())
    assert any(bool(tensor.any()) for tensor in capture.tensors.values())
    again = path.with_name("again.safetensors")
    write_capture(again, capture)
    read = read_capture(again)
    assert_equal(read.tensors, capture.tensors)
    filled = {"versions": read.header.versions, "created": read.header.created}
    assert read.header == CaptureHeader(**{**vars(capture.header), **_open(capture.header, filled)})
    assert read_header(path) == capture.header
    return True


def _open(header: CaptureHeader, filled: dict[str, Any]) -> dict[str, Any]:
    """What a writer fills in, because the header left it open."""
    return {name: value for name, value in filled.items() if not getattr(header, name)}


def assert_equal(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def run_seeds(whole: bytes, folder: Path, seeds: range) -> int:
    """Reads one changed capture a seed, every second one changed in its structure; returns how
    many of them could be read."""
    path, read = folder / "changed.safetensors", 0
    for seed in seeds:
        chance = random.Random(seed)
        change = change_structure if seed % 2 else change_bytes
        path.write_bytes(change(chance, whole))
        try:
            read += read_changed(path, chance)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert {one.name for one in folder.iterdir()} <= {
        *("update.safetensors", "changed.safetensors", "again.safetensors")
    }
    return read


def test_500_changed_captures_are_captures_or_sentences(whole: bytes, tmp_path: Path) -> None:
    run_seeds(whole, tmp_path, range(20))  # what is made on first use does not count
    with measure_growth() as grown:
        read = run_seeds(whole, tmp_path, range(500))
    assert 20 < read < 480  # neither are all of them broken, nor is nothing
    assert all(most < MOST_GROWTH for most in grown)


@pytest.mark.long
def test_10000_changed_captures_are_captures_or_sentences(whole: bytes, tmp_path: Path) -> None:
    with measure_growth() as grown:
        read = run_seeds(whole, tmp_path, range(500, 10_500))
    assert 400 < read < 9_600
    assert all(most < MOST_GROWTH for most in grown)
