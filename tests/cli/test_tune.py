"""`gradleak tune` as a user meets it."""

import json
from pathlib import Path

import pytest

from gradleak.cli import main
from gradleak.core.registry import find
from gradleak.core.specs import from_string

Captured = pytest.CaptureFixture[str]
QUICK = [
    "--target",
    "tiny",
    "--combinations",
    "3",
    "--coarse",
    "1",
    "--best",
    "1",
    "--fine",
    "2",
    "--device",
    "cpu",
]


def test_the_ranking_is_shown_and_kept_and_the_winner_can_be_pasted(
    tmp_path: Path, capsys: Captured
) -> None:
    words = [
        "tune",
        "tag",
        "--data",
        "canaries",
        *QUICK,
        "--set",
        "steps=2",
        "--range",
        "l1_weight=0.1:0.2",
        "--out",
        str(tmp_path),
    ]
    assert main(words) == 0
    out, err = capsys.readouterr()
    flat = " ".join(out.split())
    for part in (
        "learning_",
        "weight",
        "defaults",
        "gain",
        "The first 3 examples of canaries",
        "must not be reported on",
    ):
        assert part in flat
    assert "Coarse stage: 3 combinations on 1 sentences" in err
    kept = json.loads((tmp_path / "tuning.json").read_text())
    (line,) = [
        line.removeprefix("Winner: ") for line in out.splitlines() if line.startswith("Winner: ")
    ]
    assert kept["winner"] == line
    assert kept["verdict"] in flat
    winner = from_string("attack", line)
    assert isinstance(winner, find("attack", "tag")) and winner.steps == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tagg", "--data", "canaries"], "Unknown attack 'tagg' (did you mean 'tag'?)"),
        (["tag", "--data", "cola:selection=lamp_test"], "holds test sentences"),
        (
            ["tag", "--data", "canaries", "--set", "stps=3"],
            "has no field 'stps' (did you mean 'steps'?)",
        ),
        (["tag:steps=3", "--data", "canaries", "--set", "steps=3"], "'steps' is given twice"),
        (["tag", "--data", "canaries", "--range", "decai=0.1:1"], "has no field 'decai'"),
        (
            ["tag", "--data", "canaries", "--range", "learning_rate"],
            "Cannot read --range 'learning_rate'",
        ),
        (["blind", "--data", "canaries"], "nothing to tune in blind"),
        (
            ["tag", "--data", "canaries", "--metric", "rouge3"],
            "Unknown metric 'rouge3' (did you mean 'rouge",
        ),
        (["tag", "--data", "canaries", "--fine", "1"], "See gradleak tune --help."),
        (["tag"], "Missing option '--data'"),
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
    assert main(["tune", *words, "--target", "tiny", "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert not list(tmp_path.iterdir())
