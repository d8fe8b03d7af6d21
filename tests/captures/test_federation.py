"""The captures of a federated run: what came down once, what left as it left, notes of the rest."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradleak.captures import (
    CaptureError,
    CaptureHeader,
    ModelFacts,
    ProtocolFacts,
    hash_state,
    is_of_captures,
    read_capture,
    survey_federation,
    write_reply,
    write_sent,
)

HEADER = CaptureHeader(
    "weights",
    ModelFacts("", {}, "", ("w",)),
    ProtocolFacts("fedavg", 0.5, 1),
    round=3,
    client="7",
    other_records={"metrics": {"loss": 0.5}},
)


def make(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((2, 3), value), "steps": torch.tensor(4)}


def test_what_came_down_lies_there_once_and_is_found_by_the_reply(tmp_path: Path) -> None:
    digest = write_sent(tmp_path, make(1.0), {})
    assert write_sent(tmp_path, make(1.0), {}) == digest != write_sent(tmp_path, make(2.0), {})
    header = replace(HEADER, model=replace(HEADER.model, weights_hash=digest))
    path = write_reply(tmp_path, header, make(1.5))
    assert path == tmp_path / "client-7" / "round-00003.safetensors"
    federation = survey_federation(tmp_path)
    (one,) = federation.messages
    assert one.has_arrays and torch.equal(federation.read_sent(one)["w"], make(1.0)["w"])
    assert torch.equal(read_capture(path).tensors["w"], make(1.5)["w"])
    assert one.header.other_records == {"metrics": {"loss": 0.5}, "counts": {"steps": 4}}
    assert len(list((tmp_path / "sent").iterdir())) == 2


def test_a_message_without_arrays_is_a_note_and_so_is_one_that_cannot_be_kept(
    tmp_path: Path,
) -> None:
    note = write_reply(tmp_path, HEADER, {}, "evaluate")
    broken = write_reply(tmp_path, HEADER, {"w": torch.tensor([torch.nan])})
    assert [path.name for path in (note, broken)] == [
        "round-00003-evaluate.json",
        "round-00003.json",
    ]
    assert is_of_captures(note) and note.stat().st_mode & 0o077 == 0
    failed, kept = _by_name(tmp_path)
    assert kept.other_records == HEADER.other_records
    assert "NaN" in failed.platform["not_captured"]
    # The next run into the same folder takes its place
    write_reply(tmp_path, HEADER, make(1.0))
    assert not broken.exists() and len(survey_federation(tmp_path).messages) == 2


def _by_name(folder: Path) -> list[CaptureHeader]:
    found = sorted(survey_federation(folder).messages, key=lambda one: one.path.name, reverse=True)
    return [one.header for one in found]


def test_messages_are_listed_by_round_and_client_as_people_count(tmp_path: Path) -> None:
    for client in ("10", "2", "../evil"):
        for round in (1, 0):
            write_reply(tmp_path, replace(HEADER, client=client, round=round), make(1.0))
    listed = [(one.header.round, one.header.client) for one in survey_federation(tmp_path).messages]
    assert listed == [(n, name) for n in (0, 1) for name in ("../evil", "2", "10")]
    assert all(path.parent == tmp_path for path in tmp_path.iterdir())
    assert not (tmp_path.parent / "evil").exists()


def test_what_is_no_federated_run_or_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="is not a folder"):
        survey_federation(tmp_path / "nowhere")
    with pytest.raises(CaptureError, match="holds no captures of clients"):
        survey_federation(tmp_path)
    digest = hash_state(make(1.0))
    header = replace(HEADER, model=replace(HEADER.model, weights_hash=digest))
    write_reply(tmp_path, header, make(2.0))
    federation = survey_federation(tmp_path)
    with pytest.raises(CaptureError, match="the weights that came down to it"):
        federation.read_sent(federation.messages[0])
    (tmp_path / "client-7" / "notes.json").write_text("{}")
    ((path, reason),) = survey_federation(tmp_path).unreadable
    assert path.name == "notes.json" and "no note" in reason
