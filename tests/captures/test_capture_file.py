"""A capture that is written is read back as it was, by us and by safetensors alone."""

import dataclasses
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

from gradleak.captures import (
    Capture,
    CaptureError,
    CaptureHeader,
    Granted,
    ModelFacts,
    ProtocolFacts,
    read_capture,
    read_header,
    read_layout,
    subtract_states,
    write_capture,
)

Write = Callable[..., Path]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="/\\"),
    min_size=1,
    max_size=30,
)
LINES = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp", "Zs")), max_size=40
)
COUNTS = st.integers(1, 2**31 - 1)
NUMBERS = st.floats(1e-12, 1e6)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LINES, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def headers(draw: st.DrawFn) -> CaptureHeader:
    batch = draw(st.none() | st.integers(1, 4))
    several = (
        st.none()
        if batch is None
        else st.none() | st.lists(st.integers(1, 99), min_size=batch, max_size=batch).map(tuple)
    )
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    return CaptureHeader(
        draw(st.sampled_from(("gradients", "difference", "tensors"))),
        ModelFacts(
            draw(LINES),
            draw(st.dictionaries(LINES, PLAIN, max_size=3)),
            draw(st.sampled_from(("", "0f" * 32))),
            tuple(names),
        ),
        ProtocolFacts(
            draw(st.sampled_from(("fedsgd", "fedavg"))),
            draw(st.none() | NUMBERS),
            draw(st.none() | COUNTS),
            draw(LINES),
            draw(NUMBERS),
        ),
        Granted(batch, draw(several), draw(several)),
        tuple(draw(st.lists(LINES, max_size=2))),
        draw(LINES),
        draw(st.none() | st.integers(0, 2**31 - 1)),
        draw(LINES),
        draw(st.dictionaries(LINES, PLAIN, max_size=3)),
        draw(st.dictionaries(LINES, LINES, min_size=1, max_size=2)),
        draw(st.datetimes().map(lambda when: when.isoformat())),
    )


@st.composite
def updates(draw: st.DrawFn) -> dict[str, Tensor]:
    names = draw(
        st.lists(
            NAMES.filter(lambda name: name != "__metadata__"), unique=True, min_size=1, max_size=4
        )
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return {
        name: (
            torch.rand(draw(st.lists(st.integers(1, 4), max_size=4)), generator=generator) + 0.5
        ).to(draw(st.sampled_from(DTYPES)))
        for name in names
    }


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(header=headers(), tensors=updates())
def test_whatever_is_written_is_read_back(
    tmp_path: Path, header: CaptureHeader, tensors: dict[str, Tensor]
) -> None:
    path = tmp_path / "update.safetensors"
    write_capture(path, Capture(header, tensors))
    read = read_capture(path)
    assert read.header == read_header(path) == header
    assert_same(read.tensors, tensors)
    with safe_open(path, "pt") as file:  # by safetensors alone
        assert_same({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118


def assert_same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_a_capture_is_its_owners_whatever_the_umask(
    tmp_path: Path, header: CaptureHeader, tensors: dict[str, Tensor]
) -> None:
    before = os.umask(0)
    try:
        write_capture(tmp_path / "new" / "u.safetensors", Capture(header, tensors))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new" / "u.safetensors").stat().st_mode) == 0o600


def test_what_cannot_be_written_leaves_the_capture_that_was_there_and_nothing_else(
    write: Write, tmp_path: Path, header: CaptureHeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write()
    before = path.read_bytes()
    with pytest.raises(CaptureError, match="NaN"):
        write(holding={"w": torch.tensor([1.0, float("nan")])})

    def stop_in_the_middle(tensors: object, aside: Path, metadata: object) -> None:
        aside.write_bytes(before[:50])
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", stop_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["update.safetensors"]


def test_tied_and_shared_tensors_are_stored_once_under_the_models_name(
    write: Write, header: CaptureHeader
) -> None:
    model = nn.ModuleDict({"head": nn.Linear(3, 5, bias=False), "words": nn.Embedding(5, 3)})
    model["head"].weight = model["words"].weight
    own = dataclasses.replace(header, model=ModelFacts("M", {}, "", ("words.weight",)))
    path = write(own=own, holding=model.state_dict())
    assert dict(read_layout(path).tied) == {"head.weight": "words.weight"}
    assert_same(read_capture(path).tensors, {"words.weight": model["words"].weight.detach()})


def test_views_of_one_memory_are_stored_as_what_they_are(write: Write) -> None:
    bucket = torch.arange(1.0, 25.0)
    holding = {
        "whole": bucket,
        "first": bucket[:6].view(2, 3),
        "overlapping": bucket[3:9],
        "transposed": bucket[:6].view(2, 3).t(),
        "strided": bucket[::2],
        "expanded": torch.tensor(2.0).expand(3, 2),
        "sparse": torch.eye(3).to_sparse(),
        "learnt": nn.Parameter(torch.ones(2)),
    }
    path = write(holding=holding)
    wanted = {
        name: tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        for name, tensor in holding.items()
    }
    assert_same(read_capture(path).tensors, wanted)
    assert path.stat().st_size < 4096  # a view does not bring the memory behind it


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_difference_is_exact_where_training_changed_little(dtype: torch.dtype) -> None:
    before = {"w": torch.tensor([1.0, -3.0], dtype=dtype), "seen": torch.tensor(3)}
    after = {"w": before["w"] * 1.125, "seen": torch.tensor(4)}
    found = subtract_states(before, after)
    assert found.keys() == {"w"}
    assert found["w"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(found["w"].double(), after["w"].double() - before["w"].double())


def test_the_difference_of_tied_weights_is_tied() -> None:
    words = torch.ones(3, 2)
    trained = torch.full((3, 2), 2.0)
    found = subtract_states({"a": words, "b": words}, {"a": trained, "b": trained})
    assert found["a"].data_ptr() == found["b"].data_ptr()


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"w": torch.ones(3)}, "shape 2 before training and 3 after it"),
        ({"module.w": torch.ones(2)}, "in the state after training alone"),
    ],
)
def test_states_of_different_models_have_no_difference(after: Any, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        subtract_states({"w": torch.ones(2)}, after)


@pytest.mark.parametrize(
    ("holding", "said"),
    [
        ({}, "no parameter had a gradient"),
        ({"w": torch.zeros(3), "b": torch.zeros(1)}, "every entry of it is zero"),
        ({"w": torch.tensor([1.0, float("inf")])}, "“w” holds infinity"),
        ({"w": torch.tensor([1, 2])}, "“w” holds int64, and a capture holds float64"),
        ({"w": torch.tensor([1j])}, "“w” holds complex64"),
        ({"w": torch.empty(0)}, "“w” has no entries here"),
        ({"w": torch.ones(2, device="meta")}, "“w” has no entries here"),
        ({"w": [1.0]}, "“w” is of type list"),
        ({"../../w": torch.ones(2)}, "holds a slash or a control character"),
        ({"": torch.ones(2)}, "1 to 512 letters"),
        ({"w": torch.ones([1] * 9)}, "“w” has 9 axes"),
        ({"__metadata__": torch.ones(2)}, "“__metadata__” is safetensors' own"),
    ],
)
def test_an_update_that_no_reader_would_take_is_not_written(
    write: Write, tmp_path: Path, holding: Any, said: str
) -> None:
    with pytest.raises(CaptureError, match=said):
        write(holding=holding)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "sums"}, "kind must be one of .* not “sums”"),
        ({"round": -1}, "round must be a whole number from 0"),
        ({"round": "3"}, "header.round cannot be of type str"),
        ({"client": "a\x1b[2J"}, "client must be one line"),
        ({"created": "yesterday"}, "ISO 8601"),
        ({"granted": Granted(0)}, "batch_size must be a whole number from 1"),
        ({"granted": Granted(2, (5,))}, "lengths has 1 values for a batch of 2"),
        ({"protocol": ProtocolFacts("fedsgd", -0.1, 1)}, "learning_rate must be a number above 0"),
        ({"protocol": ProtocolFacts("sgd", 0.1, 1)}, "protocol.name must be one of"),
        ({"model": ModelFacts("M", {}, "abc", ())}, "64 hexadecimal digits"),
        ({"model": ModelFacts("M", {}, "", ("w", "w"))}, "a name twice"),
        ({"model": ModelFacts("M", {"f": print}, "", ())}, "plain values only"),
        ({"other_records": {"a": "\ud800"}}, "lone surrogate"),
        ({"other_records": {"a": "b" * 2**23}}, "leave config or other_records out"),
    ],
)
def test_a_header_whose_values_cannot_be_is_not_written(
    write: Write, tmp_path: Path, header: CaptureHeader, changes: Any, said: str
) -> None:
    with pytest.raises(CaptureError, match=said):
        write(own=dataclasses.replace(header, **changes))
    assert list(tmp_path.iterdir()) == []


def test_what_the_header_leaves_open_of_versions_and_time_is_filled_in(
    write: Write, header: CaptureHeader
) -> None:
    read = read_header(write(own=dataclasses.replace(header, versions={}, created="")))
    assert {"gradleak", "torch", "safetensors"} <= read.versions.keys()
    assert read.created.endswith("+00:00")


def test_a_name_that_does_not_end_as_captures_do_is_refused(write: Write) -> None:
    with pytest.raises(CaptureError, match=r"must end in \.safetensors"):
        write("update.bin")


def test_a_folder_that_cannot_be_written_into_is_a_sentence(write: Write, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(CaptureError, match="cannot be written"):
        write("taken/update.safetensors")


def test_the_model_is_checked_before_a_tensor_is_read(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write()
    expected = {"w": torch.Size([4, 3]), "b": torch.Size([4])}
    assert read_capture(path, expected).tensors.keys() == {"w", "b"}

    def fail(file: object, facts: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("gradleak.captures.capture_file._read_tensor", fail)
    with pytest.raises(CaptureError, match="4 × 3 and the model's “w” 4 × 2"):
        read_capture(path, {**expected, "w": torch.Size([4, 2])})
    with pytest.raises(CaptureError, match="“b” is no tensor of the model"):
        read_capture(path, {"w": torch.Size([4, 3])})
