"""`gradleak capture show` says what a capture holds, within 80 columns, and refuses what it cannot
read with exit code 2."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.captures import (
    Capture,
    CaptureHeader,
    Granted,
    ModelFacts,
    ProtocolFacts,
    name_capture,
    write_capture,
)
from gradleak.cli import main
from gradleak.cli.capture import find_place

Captured = pytest.CaptureFixture[str]
HEADER = CaptureHeader(
    "gradients",
    ModelFacts("BertForSequenceClassification", {}, "a1" * 32, ()),
    ProtocolFacts("fedavg", 0.5, None, scale=4.0),
    Granted(2, None, (1, 0)),
    ("clipping:clip=1", "gaussian_noise:std=0.1"),
    "after the last of four local steps, before anything is added",
    7,
    "hospital of a town with a long name",
    {"metrics": {"loss": 0.25, "note": "\x1b[2Jpatient"}, "examples": 12},
    {"torch": "2.13.0"},
    "2026-01-02T03:04:05+00:00",
)


def say(path: Path, capsys: Captured) -> str:
    """What is shown, each line within its columns."""
    assert main(["capture", "show", str(path)]) == 0
    said = capsys.readouterr().out
    # The path is the test's own, and longer than any reader's
    lines = said.replace(str(path), "update.safetensors").splitlines()
    assert [line for line in lines if len(line) > 80 or not line.isprintable()] == []
    return said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two rounds of two clients."""
    for number, client in ((2, "b"), (1, "b"), (1, "a"), (10, "../../c")):
        header = dataclasses.replace(HEADER, round=number, client=client)
        tensors = {"w": torch.ones(2)}
        write_capture(tmp_path / name_capture(header), Capture(header, tensors))
    return tmp_path


@pytest.mark.parametrize("architecture", ["Bert", "GPT2", "Llama", "GPTNeoX", "MPNet"])
def test_every_tensor_is_shown_with_its_place_shape_and_share(
    tmp_path: Path, random_model: Callable[..., Any], capsys: Captured, architecture: str
) -> None:
    model = random_model(architecture)
    tensors = {f"module.{name}": p.detach().clone() for name, p in model.named_parameters()}
    path = tmp_path / "update.safetensors"
    names = tuple(name for name, _ in model.named_parameters())
    header = dataclasses.replace(HEADER, model=ModelFacts(type(model).__name__, {}, "", names))
    write_capture(path, Capture(header, tensors))
    said = say(path, capsys)
    rows = [line.split() for line in said.splitlines() if " % " in line]
    assert sum(int(row[2]) for row in rows) == len(tensors)
    assert sum(float(row[4]) for row in rows) == pytest.approx(100, abs=0.1)
    assert {"-", "1", "2"} == {row[0] for row in rows}
    assert {"word_embedding", "layernorm", "ffn_in", "ffn_out", "head"} <= {row[1] for row in rows}
    assert f"Tensors: {len(names)} of the model's {len(names)}" in said


def test_what_is_told_and_what_is_not_is_said(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "update.safetensors"
    tied = torch.tensor([3.0, 4.0])
    tensors = {"w": tied, "v": tied, "half": torch.zeros(2, 3, dtype=torch.bfloat16)}
    write_capture(path, Capture(HEADER, tensors))
    said = " ".join(say(path, capsys).split())
    for part in (
        "holds gradients.",
        "model BertForSequenceClassification",
        "weights SHA-256 a1a1a1a1a1a1a1a1…",
        "fedavg, steps of sgd (how many: not told), learning rate 0.5, 4 times the mean gradient",
        "taken after the last of four local steps, before anything is added",
        "round 7 client hospital of a town with a long name",
        "Tensors: 2, 8 numbers, 0.00 MB, norm 5",
        "- other 2 float32, bfloat16 100.00 % 2, 2×3",
        "v is the same tensor as w.",
        'metrics.loss 0.25 metrics.note "\\u001b[2Jpatient" examples 12',
        "batch size 2 lengths not told labels 1, 0",
        "defenses clipping:clip=1 + gaussian_noise:std=0.1 (as stated)",
    ):
        assert part in said


def test_a_header_that_tells_nothing_says_so(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "update.safetensors"
    header = CaptureHeader(
        "difference", ModelFacts("", {}, "", ()), ProtocolFacts("fedsgd", None, 1)
    )
    write_capture(path, Capture(header, {"0": torch.tensor(1.0, dtype=torch.float64)}))
    said = " ".join(say(path, capsys).split())
    assert "the difference of weights: after training minus before" in said
    assert (
        "model not told weights not told protocol fedsgd, 1 step of sgd, learning rate not" in said
    )
    assert "Beside the arrays: this file speaks of nothing else." in said
    assert "batch size not told lengths not told labels not told defenses none are stated" in said


def test_arrays_without_names_are_placed_by_the_models_order(
    tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "update.safetensors"
    names = (
        "bert.embeddings.word_embeddings.weight",
        *(f"bert.encoder.layer.{at}.output.dense.weight" for at in range(10)),
    )
    header = dataclasses.replace(HEADER, model=ModelFacts("Bert", {}, "", names))
    tensors = {str(at): torch.ones(at + 1) for at in range(11)}
    write_capture(path, Capture(header, tensors))
    rows = [line.split() for line in say(path, capsys).splitlines() if " % " in line]
    assert [row[:2] + row[-1:] for row in rows] == [
        ["-", "word_embedding", "1"],
        *([str(layer), "ffn_out", str(layer + 1)] for layer in range(1, 11)),
    ]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("bert.encoder.layer.3.attention.self.query.weight", (4, "query")),
        ("bert.encoder.layer.3.attention.self.query.lora_A.weight", (4, "query (LoRA)")),
        ("bert.encoder.layer.0.attention.output.LayerNorm.bias", (1, "layernorm")),
        ("transformer.h.0.attn.c_attn.weight", (1, "query_key_value")),
        ("transformer.h.0.ln_1.weight", (1, "layernorm")),
        ("model.norm.weight", (0, "layernorm")),
        ("classifier.0.weight", (0, "head")),
        ("lm_head.weight", (0, "head")),
        ("features.0.conv1.weight", (1, "convolution")),
        ("anything", (0, "other")),
    ],
)
def test_a_place_is_read_off_a_name(name: str, place: tuple[int, str]) -> None:
    assert find_place(name) == place


def test_a_folder_is_listed_by_round_and_client(folder: Path, capsys: Captured) -> None:
    rows = [line.split() for line in say(folder, capsys).splitlines()]
    assert [row[:2] for row in rows[1:] if row[0].isdigit()] == [
        ["1", "a"],
        ["1", "b"],
        ["2", "b"],
        ["10", "../../c"],
    ]
    assert (folder / "index.json").exists()


def test_captures_that_cannot_be_read_are_listed_with_their_reasons(
    folder: Path, capsys: Captured
) -> None:
    (folder / "cut.safetensors").write_bytes(b"123")
    assert main(["capture", "show", str(folder)]) == 2
    said = capsys.readouterr()
    assert "round-00001-client-a.safetensors" in said.out
    assert "cut.safetensors: it has 3 bytes, which is too short for a capture" in said.err


@pytest.mark.parametrize("what", ["missing", "empty folder", "foreign", "broken"])
def test_what_is_no_capture_is_a_sentence_and_exit_code_2(
    tmp_path: Path, capsys: Captured, what: str
) -> None:
    path = tmp_path / "update.safetensors"
    if what == "empty folder":
        path.mkdir()
    elif what != "missing":
        path.write_bytes(b"\x02\0\0\0\0\0\0\0{}" if what == "foreign" else b"\xff" * 99)
    assert main(["capture", "show", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"Error: {path}") and said.err.count("\n") == 1
