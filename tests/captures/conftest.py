"""Captures to be written, and files made by hand that say whatever a test wants."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradleak.captures import (
    FORMAT,
    Capture,
    CaptureHeader,
    Granted,
    ModelFacts,
    ProtocolFacts,
    write_capture,
)

WRITTEN = "2026-01-02T03:04:05+00:00"
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1, "BOOL": 1}


@pytest.fixture
def header() -> CaptureHeader:
    return CaptureHeader(
        "gradients",
        ModelFacts("TinyForSequenceClassification", {"hidden_size": 4}, "a" * 64, ("w", "b")),
        ProtocolFacts("fedsgd", 0.1, 1),
        Granted(2, (5, 7), (0, 1)),
        ("clipping:clip=1",),
        "after backward()",
        3,
        "hospital 7",
        {"metrics": {"loss": 0.5, "examples": 2}},
        {"gradleak": "0.1.0"},
        WRITTEN,
    )


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(4, 3, generator=generator),
        "b": torch.randn(4, generator=generator).bfloat16(),
    }


@pytest.fixture
def write(tmp_path: Path, header: CaptureHeader, tensors: dict[str, Tensor]) -> Callable[..., Path]:
    """Writes a capture under a name, with the given header and tensors or the usual ones."""

    def write_one(
        name: str = "update.safetensors",
        own: CaptureHeader | None = None,
        holding: Mapping[str, Tensor] | None = None,
    ) -> Path:
        path = tmp_path / name
        write_capture(path, Capture(own or header, tensors if holding is None else holding))
        return path

    return write_one


@pytest.fixture
def forge(tmp_path: Path) -> Callable[..., Path]:
    """Writes a safetensors file by hand: any entries, any metadata, any bytes."""

    def write_one(
        entries: Mapping[str, Any] | None = None,
        data: bytes | None = None,
        metadata: Mapping[str, Any] | None = None,
        raw: bytes | None = None,
        name: str = "forged.safetensors",
    ) -> Path:
        entries = {"w": entry("F32", [2], 0)} if entries is None else entries
        if raw is None:
            raw = json.dumps({"__metadata__": metadata or metadata_of(), **entries}).encode()
        if data is None:
            data = b"\x00\x00\x80\x3f" * 2  # 1.0 twice
        path = tmp_path / name
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
        return path

    return write_one


@pytest.fixture
def plain_header() -> dict[str, Any]:
    """The smallest header, as JSON holds it."""
    return json.loads(metadata_of()["header"])  # type: ignore[no-any-return]


def entry(dtype: str, shape: list[int], begin: int, end: int | None = None) -> dict[str, Any]:
    """A tensor as safetensors' header has it."""
    size = SIZES[dtype]
    for axis in shape:
        size *= axis
    return {
        "dtype": dtype,
        "shape": shape,
        "data_offsets": [begin, begin + size if end is None else end],
    }


def metadata_of(**changes: Any) -> dict[str, str]:
    """Metadata of the smallest capture, with fields of its header changed."""
    header = {
        "kind": "gradients",
        "model": {"class_name": "M", "config": {}, "weights_hash": "", "names": ["w"]},
        "protocol": {"name": "fedsgd", "learning_rate": None, "steps": None},
        **changes,
    }
    return {"format": FORMAT, "header": json.dumps(header)}


@contextlib.contextmanager
def measure_growth() -> Iterator[list[int]]:
    """Measures by how many bytes this process grew at most; says nothing where the system does
    not."""
    grown: list[int] = []
    refs = Path("/proc/self/clear_refs")
    if refs.exists():
        refs.write_text("5")  # the most that it held is now what it holds
    before = _peak()
    yield grown
    after = _peak()
    if before is not None and after is not None:
        grown.append(after - before)


def _peak() -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = status.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
