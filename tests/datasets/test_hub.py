"""The hub dataset, with a stand-in for the library: no test touches the network."""

import os
import sys
from types import SimpleNamespace

import pytest

from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError
from gradleak.datasets import Hub

ROWS = [{"sentence": "a b", "label": 1}, {"sentence": "c d", "label": 0}]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str]]:
    calls: list[tuple[str, str | None, str]] = []

    def load_dataset(path: str, name: str | None, split: str) -> list[dict[str, object]]:
        calls.append((path, name, split))
        return ROWS  # type: ignore[return-value]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


@pytest.fixture(autouse=True)
def unset_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_DISABLE_TELEMETRY", "HF_UPDATE_DOWNLOAD_COUNTS"):
        monkeypatch.setenv(name, "")  # so that monkeypatch puts back whatever was there
        monkeypatch.delenv(name)


def test_rows_become_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    assert Hub("glue", "cola", text="sentence").load() == [Example("a b", 1), Example("c d", 0)]
    assert calls == [("glue", "cola", "train")]


def test_telemetry_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = SimpleNamespace(HF_HUB_DISABLE_TELEMETRY=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    stand_in(monkeypatch)
    Hub("glue", "cola", text="sentence").load()
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1" and constants.HF_HUB_DISABLE_TELEMETRY


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(GradleakError, match=r"pip install gradleak\[hub\]"):
        Hub("glue", "cola").load()


def test_an_unknown_column_names_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    with pytest.raises(
        GradleakError,
        match=(
            "hub dataset glue/cola, train split, row 1: no column 'text'.*Columns: sentence, label"
        ),
    ):
        Hub("glue", "cola").load()


def test_what_the_library_cannot_load_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_dataset(path: str, name: str | None, split: str) -> None:
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(
        GradleakError, match="Cannot load hub dataset nowhere, train split: offline. Check the id"
    ):
        Hub("nowhere").load()
