"""The audit fits attacks that learn before they see anything, keeps what they learnt, and shares
it between cells."""

from pathlib import Path
from typing import Any

import pytest

from gradleak.attacks.learning_to_invert.text_attacks import LtiP
from gradleak.audit import AuditSpec, run_audit
from gradleak.audit.client import private_examples
from gradleak.audit.ready import public_examples
from gradleak.core.errors import GradleakError

LEARNS = "lti_p:steps=3,training_batch=4,learning_rate=0.001,first_width=8,token_width=8"


def settings(**changes: Any) -> AuditSpec:
    return AuditSpec.from_plain(
        {"target": "tiny", "limit": 2, "attacks": [LEARNS], "metrics": ["token_accuracy"]} | changes
    )


def test_a_fit_is_made_once_and_serves_every_cell_of_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[str] = []
    fit = LtiP.fit
    monkeypatch.setattr(
        LtiP, "fit", lambda self, *given: (fitted.append(self.name), fit(self, *given))[1]
    )
    first = run_audit(settings(), out=tmp_path)
    (file,) = (tmp_path / "fits").iterdir()  # no checkpoint is left
    run_audit(settings(metrics=["rouge1"]), out=tmp_path)
    assert fitted == ["lti_p"]
    again = run_audit(settings(attacks=[f"{LEARNS},weights={file}"]), out=tmp_path)
    assert fitted == ["lti_p"]
    guesses = [
        [example.guess for example in done.record.attacks["lti_p"].examples]
        for done in (first, again)
    ]
    assert guesses[0] == guesses[1]
    with pytest.raises(GradleakError, match="fitted to another defense"):
        run_audit(settings(attacks=[f"{LEARNS},weights={file}"], defenses=["sign"]))
    run_audit(settings(defenses=["sign"]), out=tmp_path)
    assert fitted == ["lti_p"] * 2


def test_the_record_says_how_many_labels_were_guessed(tmp_path: Path) -> None:
    record = run_audit(settings()).record
    accuracy = record.attacks["lti_p"].label_accuracy
    assert accuracy is not None and 0 <= accuracy <= 1
    assert run_audit(settings(attacks=["blind"])).record.attacks["blind"].label_accuracy is None


def test_no_secret_is_among_what_is_learnt_from(tmp_path: Path) -> None:
    spec = settings(limit=3)
    secrets = {example.text for example in private_examples(spec)}
    public = public_examples(spec)
    assert len(public) == 250
    assert not secrets & {example.text for example in public}
    path = tmp_path / "same.txt"
    path.write_text("\n".join([*(text.upper() for text in secrets), "something else"]))
    assert [one.text for one in public_examples(settings(limit=3, public=str(path)))] == [
        "something else"
    ]
    path.write_text("\n".join(secrets))
    with pytest.raises(GradleakError, match="Nothing of .* is left to learn from"):
        public_examples(settings(limit=3, public=str(path)))


def test_audits_that_learn_nothing_keep_the_id_they_had() -> None:
    assert "public" not in settings(attacks=["blind"]).to_dict()
    assert settings().id != settings(public="canaries:secrets_only=true").id
