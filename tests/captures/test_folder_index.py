"""Several rounds and clients in one folder: found by their headers, with or without an index."""

import dataclasses
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gradleak.captures import (
    CaptureError,
    CaptureHeader,
    index_folder,
    name_capture,
    survey_folder,
)
from gradleak.captures import folders as module

Write = Callable[..., Path]


@pytest.fixture
def rounds(write: Write, header: CaptureHeader) -> list[CaptureHeader]:
    """Three captures, by round and client."""
    made = [
        dataclasses.replace(header, round=number, client=client)
        for number, client in ((1, "b"), (2, "a"), (10, ""))
    ]
    for one in reversed(made):
        write(name_capture(one), one)
    return made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the captures that were opened."""
    names: list[str] = []
    read = module.read_header

    def note(path: Path) -> CaptureHeader:
        names.append(path.name)
        return read(path)

    monkeypatch.setattr(module, "read_header", note)
    return names


def test_captures_are_listed_by_round_and_client_with_their_headers(
    tmp_path: Path, rounds: list[CaptureHeader]
) -> None:
    assert index_folder(tmp_path) == [(tmp_path / name_capture(one), one) for one in rounds]


def test_the_index_spares_opening_captures_that_did_not_change(
    tmp_path: Path, write: Write, rounds: list[CaptureHeader], opened: list[str]
) -> None:
    first = index_folder(tmp_path)
    assert len(opened) == 3
    assert index_folder(tmp_path) == first and len(opened) == 3
    changed = dataclasses.replace(rounds[0], when="before clipping")
    write(name_capture(rounds[0]), changed)
    (tmp_path / name_capture(rounds[1])).unlink()
    assert [header for _, header in index_folder(tmp_path)] == [changed, rounds[2]]
    assert len(opened) == 4
    assert json.loads((tmp_path / "index.json").read_text())["captures"].keys() == {
        name_capture(rounds[0]),
        name_capture(rounds[2]),
    }


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"format": "gradleak.captures/1"}',
        '{"format": "gradleak.captures/1", "captures": 3}',
        '{"format": "gradleak.captures/1", "captures": {"a": {"state": [1, 2]}}}',
        '{"format": "gradleak.captures/1", "captures": ' + "[" * 100_000,
        '{"format": "gradleak.captures/1", "captures": {"../../x": {"state": [1, 2], "header": {},'
        ' "reason": ""}}}',
    ],
    ids=lambda content: content[-20:],
)
def test_a_broken_index_is_made_anew(
    tmp_path: Path, rounds: list[CaptureHeader], content: str
) -> None:
    (tmp_path / "index.json").write_text(content)
    assert [header for _, header in index_folder(tmp_path)] == rounds
    if "gradleak" in content:
        assert len(json.loads((tmp_path / "index.json").read_text())["captures"]) == 3


def test_somebody_elses_index_is_left_alone(tmp_path: Path, rounds: list[CaptureHeader]) -> None:
    (tmp_path / "index.json").write_text('{"pages": []}')
    assert len(index_folder(tmp_path)) == len(rounds)
    assert (tmp_path / "index.json").read_text() == '{"pages": []}'


def test_captures_that_cannot_be_read_stand_in_the_index_with_their_reasons(
    tmp_path: Path, rounds: list[CaptureHeader], opened: list[str]
) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"123")
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        found = survey_folder(tmp_path)
        assert len(found.captures) == len(rounds)
        reasons = {path.name: reason for path, reason in found.unreadable}
        assert reasons.keys() == {
            f"{name}.safetensors" for name in ("cut", "gone", "folder", "pipe")
        }
        assert "too short" in reasons["cut.safetensors"]
        assert all(reason.endswith(".") for reason in reasons.values())
    assert opened.count("cut.safetensors") == 1


def test_the_index_is_its_owners_alone_and_nothing_else_is_written(
    tmp_path: Path, rounds: list[CaptureHeader]
) -> None:
    before = set(tmp_path.iterdir())
    index_folder(tmp_path)
    assert set(tmp_path.iterdir()) - before == {tmp_path / "index.json"}
    assert stat.S_IMODE((tmp_path / "index.json").stat().st_mode) == 0o600


def test_a_folder_without_captures_is_left_as_it_is(tmp_path: Path) -> None:
    assert index_folder(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="is not a folder"):
        index_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "client", ["../../x", "/etc/passwd", "a/b", "ä b", "a" * 999, "..", ".", "con\\x", "ok-1"]
)
def test_a_capture_stays_in_its_folder_whatever_its_client_calls_itself(
    header: CaptureHeader, client: str
) -> None:
    name = name_capture(dataclasses.replace(header, client=client))
    assert Path(name).name == name and name.isascii() and len(name) < 120
    assert name.startswith("round-00003-client-") and name.endswith(".safetensors")


def test_clients_that_are_written_alike_have_files_of_their_own(header: CaptureHeader) -> None:
    names = {
        name_capture(dataclasses.replace(header, client=client)) for client in ("a/b", "a b", "a_b")
    }
    assert len(names) == 3
