"""`gradleak tradeoff` as a user meets it."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from gradleak.cli import main

Captured = pytest.CaptureFixture[str]
QUICK = [
    "tradeoff",
    "--target",
    "tiny",
    "--attack",
    "tag:steps=2",
    "--limit",
    "2",
    "--epochs",
    "1",
    "--device",
    "cpu",
]


def test_the_table_is_shown_and_kept(tmp_path: Path, capsys: Captured) -> None:
    words = [
        *QUICK,
        "--defense",
        "none",
        "--defense",
        "clipping:clip=1 + gaussian_noise:std=0.1",
        "--out",
        str(tmp_path),
    ]
    assert main(words) == 0
    out, err = capsys.readouterr()
    flat = " ".join(out.split())
    for part in (
        "Trade-off: rouge1 against mcc",
        "tested on 84 (held-out third)",
        "None of these settings meets the target",
    ):
        assert part in flat
    assert "Training 2 of 2" in err
    ElementTree.parse(tmp_path / "tradeoff.svg")
    assert main([*words, "--max-leak", "1"]) == 0
    out, err = capsys.readouterr()
    assert (
        "2 of 2 cells are finished already" in err and "2 of 2 settings are trained already" in err
    )
    assert "Weakest setting that meets the target" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--defense", "gausian_noise"],
            "Unknown defense 'gausian_noise' (did you mean 'gaussian_noise'?)",
        ),
        (["--defense", "central_dp"], "central_dp leaves what clients send as it is"),
        (
            ["--defense", "sign + dp_sgd"],
            "dp_sgd needs the gradient of each example and must be the first",
        ),
        (["--target", "tiny_causal"], "is not a text classifier"),
        (["--utility", "mmc"], "Unknown utility 'mmc' (did you mean 'mcc'?)"),
        (["--metric", "rogue1"], "rogue1"),
        (["--max-leak", "-1"], "--max-leak is a gain over blind"),
        (["--epochs", "0"], "epochs and batch_size count from 1"),
        (["--eval-data", "nowhere.csv"], "There is no file nowhere.csv"),
        (["--train-data", "few.csv"], "too few to hold a third of them out"),
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
    Path("few.csv").write_text("text,label\ncall me,1\nhe left,0\n")
    assert main([*QUICK, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert [path.name for path in tmp_path.iterdir()] == ["few.csv"]
