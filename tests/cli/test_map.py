"""`gradleak map` as a user meets it."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from gradleak.cli import main

Captured = pytest.CaptureFixture[str]
QUICK = [
    "map",
    "--target",
    "tiny",
    "--data",
    "canaries",
    "--attack",
    "tag:steps=2",
    "--limit",
    "2",
    "--device",
    "cpu",
]


def test_the_map_is_shown_and_kept_and_its_records_can_be_read_back(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*QUICK, "--modules", "whole,query", "--layers", "2", "--out", str(tmp_path)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    flat = " ".join(out.split())
    for part in (
        "Leak map: rouge1",
        "whole",
        "35.07 %",
        "1,024",
        "2.83 %",
        "query scores highest",
        "Search failed",
        "word for word",
    ):
        assert part in flat
    assert "Cell 2 of 2: layer=2, module=query" in err
    assert "\x1b" not in out
    assert (tmp_path / "map.json").is_file()
    ElementTree.parse(tmp_path / "heat_map.svg")
    # The list of records has a column for everything that differs
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["show", str(tmp_path)]) == 0
    assert "tiny" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--modules", "whole,querry"], "Unknown module 'querry' (did you mean 'query'?)"),
        (["--modules", "pooler"], "pooler lies in no layer"),
        (["--layers", "0"], "Layers are written as all, 5, 3-6 or 1,4-6"),
        (["--know", "none"], "tag requires"),
        (["--data", "colla"], "colla"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*QUICK, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert not list(tmp_path.iterdir())


def test_a_layer_beyond_the_model_is_refused(tmp_path: Path, capsys: Captured) -> None:
    assert main([*QUICK, "--layers", "1-5", "--out", str(tmp_path)]) == 2
    assert "There is no layer 5: this model has 2 layers" in capsys.readouterr().err
