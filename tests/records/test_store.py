"""Laws of the record folder."""

import hashlib
import hmac
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gradleak.records import store
from gradleak.records.files import RecordError
from gradleak.records.schema import Record
from gradleak.records.store import (
    DETAILS,
    SecretKey,
    Summary,
    check_writable,
    columns_of,
    keyed_hash,
    open_key,
    read_record,
    read_summaries,
    read_summary,
    write_record,
)


def test_a_written_record_is_read_back_from_the_file_of_its_id(
    tmp_path: Path, record: Record
) -> None:
    path = write_record(tmp_path / "new" / "folder", record)
    assert path.name == f"{record.id}.json" and read_record(path) == record


def test_writing_again_replaces_and_leaves_nothing_else(tmp_path: Path, record: Record) -> None:
    write_record(tmp_path, record)
    write_record(tmp_path, replace(record, created="later"))
    write_record(tmp_path, replace(record, secrets=()))
    (own,), (details,) = tmp_path.glob("*.json"), (tmp_path / DETAILS).iterdir()
    assert own.name == f"{record.id}.json" and details == read_summary(own).details_path
    assert len(list(tmp_path.rglob("*"))) == 3 and read_record(own).secrets == ()


def test_a_write_that_fails_leaves_the_old_record_whole(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_record(tmp_path, record)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match="No space left"):
        write_record(tmp_path, replace(record, created="later"))
    details = read_summary(path).details_path
    assert read_record(path) == record
    assert sorted(tmp_path.rglob("*")) == sorted([path, details.parent, details])


def test_a_write_that_is_cut_between_its_two_files_leaves_the_old_record_whole(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = write_record(tmp_path, record), replace(record, secrets=())

    def cut(summary: Summary) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "rewrite_summary", cut)
        with pytest.raises(KeyboardInterrupt):
            write_record(tmp_path, other)
    assert read_record(path) == record
    write_record(tmp_path, other)
    assert read_record(path) == other and len(list((tmp_path / DETAILS).iterdir())) == 1


def test_a_record_without_its_details_has_its_scores_and_no_text(
    tmp_path: Path, record: Record
) -> None:
    path = write_record(tmp_path, record)
    assert "a cat" not in path.read_text() and path.stat().st_mode & 0o077 == 0
    summary = read_summary(path)
    assert summary.details_path.stat().st_mode & 0o077 == 0 and summary.has_details
    assert summary.columns["lamp_cos"].values["rouge1"] == [0.5]
    assert summary.columns == {"lamp_cos": columns_of(record.attacks["lamp_cos"])}
    summary.details_path.unlink()
    assert read_summary(path) == summary and not summary.has_details
    with pytest.raises(RecordError, match=r"holds scores only.*Put it back, or run the audit"):
        read_record(path)


def test_details_that_were_changed_are_refused(tmp_path: Path, record: Record) -> None:
    path = write_record(tmp_path, record)
    details = read_summary(path).details_path
    details.write_text(details.read_text().replace("a cat", "a dog"))
    with pytest.raises(RecordError, match=r"is not what .* was written with") as refused:
        read_record(path)
    assert "a dog" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("details", "../../elsewhere"), ("details", None), ("columns", {}), ("columns", {"x": 1})],
)
def test_a_record_that_does_not_name_its_details_is_refused(
    tmp_path: Path, record: Record, field: str, value: object
) -> None:
    path = write_record(tmp_path, record)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(RecordError, match=r"record.(columns|details).* the audit again"):
        read_summary(path)


def test_a_folder_is_read_in_the_order_of_ids_without_its_keys(
    tmp_path: Path, record: Record
) -> None:
    records = [replace(record, spec={"seed": seed}) for seed in range(5)]
    for one in records:
        write_record(tmp_path, one)
    open_key(tmp_path)
    (tmp_path / ".half.json").write_text("{")
    assert [one.id for one in read_summaries(tmp_path)] == sorted(one.id for one in records)


def test_the_key_is_made_once_private_and_ignored_by_git(tmp_path: Path) -> None:
    key = open_key(tmp_path)
    assert key == open_key(tmp_path) != open_key(tmp_path, "other")
    assert (
        len(key.value) == 32
        and key.value.hex() not in repr(key)
        and str(key.value) not in repr(key)
    )
    assert stat.S_IMODE((tmp_path / "keys" / "secrets.key").stat().st_mode) == 0o600
    assert (tmp_path / "keys" / ".gitignore").read_text().split() == ["*"]
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == [
        ".gitignore",
        "other.key",
        "secrets.key",
    ]


def test_a_broken_key_is_refused(tmp_path: Path) -> None:
    open_key(tmp_path)
    (tmp_path / "keys" / "secrets.key").write_bytes(b"short")
    with pytest.raises(RecordError, match="32 bytes, not 5"):
        open_key(tmp_path)


def test_the_keyed_hash_is_hmac_sha256_and_depends_on_the_key() -> None:
    key, other = SecretKey(bytes(32)), SecretKey(bytes(31) + b"\x01")
    assert keyed_hash(key, "é") == hmac.new(bytes(32), "é".encode(), hashlib.sha256).hexdigest()
    assert len({keyed_hash(key, "a"), keyed_hash(other, "a"), keyed_hash(key, "b")}) == 3


def test_check_writable_makes_the_folder_and_leaves_it_empty(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_in_the_way_is_told_before_work_starts(tmp_path: Path, record: Record) -> None:
    (tmp_path / "taken").write_text("")
    for attempt in (
        lambda: check_writable(tmp_path / "taken"),
        lambda: write_record(tmp_path / "taken", record),
    ):
        with pytest.raises(
            RecordError, match=r"Cannot write records into .*taken.*Choose a folder"
        ):
            attempt()
    with pytest.raises(RecordError, match="Cannot keep a key"):
        open_key(tmp_path / "taken")


def test_no_permission_is_told_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, exist_ok: bool = True) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)  # a read-only folder would not stop root
    with pytest.raises(RecordError, match="Permission denied. Choose a folder"):
        check_writable(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"schema": ', "not a whole JSON file"),
        (b"\xff\xfe", "not a whole JSON file"),
        (b'{"schema": "x"}', "schema 'x'"),
        (b"[]", "schema"),
    ],
)
def test_a_file_that_is_no_record_is_refused_with_its_path(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(RecordError, match=f"bad.json.*{message}"):
        read_record(tmp_path / "bad.json")


def test_a_missing_file_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        read_record(tmp_path / "none.json")
    with pytest.raises(RecordError, match="none is not there"):
        read_summaries(tmp_path / "none")


def test_records_are_text_a_person_can_read(tmp_path: Path, record: Record) -> None:
    path = write_record(tmp_path, replace(record, machine={"device": "Łódź"}))
    assert (
        "Łódź" in path.read_text(encoding="utf-8")
        and json.loads(path.read_text(encoding="utf-8"))["id"] == record.id
    )


def test_records_need_neither_torch_nor_the_rest_of_gradleak() -> None:
    program = (
        "import sys, gradleak.records.store, gradleak.records.statistics,"
        " gradleak.records.flags\nforeign = {'torch', 'scipy', 'transformers'} &"
        " set(sys.modules)\nours = [name for name in sys.modules if name.startswith('gradleak.')"
        " and not name.startswith('gradleak.records')]\nassert not foreign and not ours, (foreign,"
        " ours)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
