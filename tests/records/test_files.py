"""Modes of files and folders: private ones are their owner's whatever the umask, published ones
are ordinary."""

import ast
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gradleak
from gradleak.records.files import make_private_folder, write_to_publish, write_whole, written_aside

SOURCE = Path(gradleak.__file__).parent
# These write what holds nothing private, or into a folder that is private: weights of models that
# users train for others.
# The last one tries, and removes
MAY_WRITE = {"records/files.py", "records/store.py", "metrics/perceptual.py", "cli/doctor.py"}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277])
def test_private_files_and_folders_are_their_owners_whatever_the_umask(
    tmp_path: Path, mask: int
) -> None:
    with umask(mask):
        write_whole(tmp_path / "a" / "b" / "secret.json", "text")
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
    assert mode(tmp_path / "a" / "b" / "secret.json") == 0o600


def test_a_folder_that_is_there_keeps_its_mode_and_a_file_that_is_there_becomes_private(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "old.json").chmod(0o644)
    write_whole(tmp_path / "old.json", "new")
    assert (mode(tmp_path), mode(tmp_path / "old.json")) == (0o755, 0o600)


@pytest.mark.parametrize(("mask", "wanted"), [(0o022, 0o644), (0o027, 0o640)])
def test_what_is_published_has_the_modes_of_other_programs_files(
    tmp_path: Path, mask: int, wanted: int
) -> None:
    with umask(mask):
        write_to_publish(tmp_path / "out" / "results.csv", b"a,b\n")
    assert mode(tmp_path / "out" / "results.csv") == wanted


def test_a_file_that_could_not_be_filled_leaves_the_old_one_and_nothing_else(
    tmp_path: Path,
) -> None:
    write_whole(tmp_path / "one", "old")
    with pytest.raises(ZeroDivisionError), written_aside(tmp_path / "one") as aside:
        aside.write_text("half" * (1 // 0))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("one", "old")]


def test_a_file_in_the_way_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(FileExistsError):
        make_private_folder(tmp_path / "taken")


def test_nothing_else_makes_files_or_folders() -> None:
    calls = {"mkdir", "makedirs", "write_text", "write_bytes", "NamedTemporaryFile", "mkstemp"}
    found = {
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        if str(path.relative_to(SOURCE)) not in MAY_WRITE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in calls
    }
    assert found == set()
