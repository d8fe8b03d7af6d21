"""One audit: the record says what happened and nothing private, twice the same, and survives an
interruption."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.audit import AuditSpec, run_audit
from gradleak.core.attack import Attack, Bench, Reconstruction
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.records.schema import Record
from gradleak.records.store import read_record


def settings(**changes: Any) -> AuditSpec:
    return AuditSpec.from_plain(
        {"target": "tiny", "limit": 2, "attacks": ["tag:steps=5", "dlg:steps=5"]} | changes
    )


def comparable(record: Record) -> dict[str, Any]:
    """A record without what may differ between two runs: times, costs and the random key's
    hashes."""
    plain = json.loads(json.dumps(record.to_json()))
    for key in ("created", "data", "secrets"):
        del plain[key]
    for attack in plain["attacks"].values():
        del attack["cost"]
        for batch in attack["batches"]:
            del batch["seconds"]
    return plain


def test_the_same_spec_gives_the_same_record_but_for_cost() -> None:
    assert comparable(run_audit(settings()).record) == comparable(run_audit(settings()).record)


def test_the_record_on_disk_is_the_record_returned_and_holds_no_private_text(
    tmp_path: Path,
) -> None:
    done = run_audit(settings(), out=tmp_path)
    assert done.path is not None
    assert read_record(done.path) == done.record
    (details,) = (tmp_path / "details").iterdir()
    written = done.path.read_text() + details.read_text()
    for private in done.private:
        for example in private.examples:
            assert example.text not in written
    assert not (tmp_path / "parts").exists()


def test_private_text_is_kept_only_on_request(tmp_path: Path) -> None:
    done = run_audit(settings(), out=tmp_path, keep_secrets=True)
    assert [secret.text for secret in done.record.secrets] == [
        example.text for private in done.private for example in private.examples
    ]


def test_how_much_memory_it_may_use_changes_nothing_in_the_record_and_what_it_used_is_there() -> (
    None
):
    free, narrow = run_audit(settings()).record, run_audit(settings(), memory=10**11).record
    assert comparable(free) == comparable(narrow)
    for attack in free.attacks.values():
        # Python alone takes more
        assert attack.cost.peak_memory_bytes is None or attack.cost.peak_memory_bytes > 10**7


def test_an_attack_that_has_no_room_is_refused_with_what_it_needs() -> None:
    with pytest.raises(
        GradleakError, match="Gradient matching needs about .* MB for one step on this batch"
    ):
        run_audit(settings(), memory=1000)


def test_every_score_has_its_interval_and_blind_beside_it() -> None:
    record = run_audit(settings()).record
    for scores in [*(attack.scores for attack in record.attacks.values()), record.worst_case]:
        for name, score in scores.items():
            if name == "secret_recall" and score.n == 0:
                continue
            assert score.low is not None, name
            assert score.low <= score.mean <= score.high, name
            assert score.blind is not None, name
            assert (score.unit, score.direction) == ("fraction", "higher")


def test_the_worst_case_is_the_best_attack_example_by_example() -> None:
    record = run_audit(settings(limit=4)).record
    columns = [
        [example.values["bag_f1"] for example in attack.examples]
        for attack in record.attacks.values()
    ]
    expected = sum(max(row) for row in zip(*columns, strict=True)) / 4
    assert record.worst_case["bag_f1"].mean == pytest.approx(expected)


def test_an_interrupted_audit_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradleak.attacks.recipes.dlg import Dlg
    from gradleak.attacks.recipes.tag import Tag

    undisturbed = comparable(run_audit(settings()).record)
    plain_dlg, plain_tag = Dlg.reconstruct, Tag.reconstruct
    monkeypatch.setattr(Dlg, "reconstruct", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_audit(settings(), out=tmp_path)
    assert not list(tmp_path.glob("*.json"))
    calls = []
    monkeypatch.setattr(Dlg, "reconstruct", plain_dlg)
    monkeypatch.setattr(Tag, "reconstruct", lambda *given: calls.append(given) or plain_tag(*given))
    resumed = run_audit(settings(), out=tmp_path).record
    assert not calls  # tag had finished: it is not run again
    assert comparable(resumed) == undisturbed


def interrupted(*given: object) -> list[Reconstruction]:
    raise KeyboardInterrupt


@dataclass(frozen=True)
class Oracle(Attack):
    """Answers what it is told to: not an attack, a way to test the flags."""

    name = "oracle"
    answers: tuple[tuple[int, ...], ...] = ()
    at_guess: float | None = None

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        return [
            Reconstruction(sentences=(self.answers[observation.index],))
            for observation in observations
        ]

    def objective(
        self, observations: Sequence[Observation], batches: Sequence[Any]
    ) -> torch.Tensor | None:
        if self.at_guess is None:
            return None
        right = [
            tuple(batch.ids[0].tolist()) == self.answers[o.index]
            for o, batch in zip(observations, batches, strict=True)
        ]
        return torch.tensor([self.at_guess if is_guess else 1.0 for is_guess in right])


def oracle(tiny: Target, answers: int, at_guess: float | None = None) -> tuple[Record, list[str]]:
    """An audit of 4 secrets of which the oracle answers the first `answers` right, and the flags
    it raised."""
    spec = settings(limit=4)
    rows = tiny.encode([example.text for example in spec.data.load(4)])
    wrong = tuple(tiny.encode(["zero"])[0])
    told = Oracle(
        tuple(tuple(row) if place < answers else wrong for place, row in enumerate(rows)), at_guess
    )
    record = run_audit(replace(spec, attacks=(told,))).record
    return record, [flag.name for flag in record.attacks["oracle"].flags]


def test_an_attack_that_knows_the_answer_scores_one_everywhere(tiny: Target) -> None:
    record, flags = oracle(tiny, answers=4)
    for name in ("rouge1", "rougeL", "exact_match", "token_accuracy", "bag_f1", "secret_recall"):
        assert record.worst_case[name].mean == 1.0, name
    assert "near_chance" not in flags
    assert "no_objective" in flags
    assert "few_examples" in flags


def test_one_text_rebuilt_whole_is_no_chance_however_few_they_are(tiny: Target) -> None:
    record, flags = oracle(tiny, answers=1)
    assert record.worst_case["exact_match"].mean == 0.25
    assert "near_chance" not in flags


def test_an_attack_that_knows_nothing_is_near_chance(tiny: Target) -> None:
    record, flags = oracle(tiny, answers=0)
    assert record.worst_case["exact_match"].mean == 0.0
    assert "near_chance" in flags


def test_a_search_that_ends_above_the_truth_is_flagged_and_one_that_ends_there_is_not(
    tiny: Target,
) -> None:
    assert "search_failed" in oracle(tiny, answers=0, at_guess=2.0)[1]
    assert "search_failed" not in oracle(tiny, answers=4, at_guess=1.0)[1]
    assert "no_objective" not in oracle(tiny, answers=4, at_guess=1.0)[1]


def test_generous_knowledge_is_flagged_and_derived_knowledge_is_not() -> None:
    record = run_audit(
        settings(attacks=["tag:steps=2", "dlg:steps=2,labels=derived,lengths=derived"])
    ).record
    names = {key: {flag.name for flag in attack.flags} for key, attack in record.attacks.items()}
    assert "generous_knowledge" in names["tag"]
    assert "generous_knowledge" not in names["dlg"]


def test_blind_knows_no_more_than_the_attack_beside_it() -> None:
    record = run_audit(settings(attacks=["dlg:steps=2", "dlg:steps=2,lengths=derived"])).record
    known, derived = record.attacks.values()
    assert [example.blind_values for example in known.examples] != [
        example.blind_values for example in derived.examples
    ]


def test_a_dead_gradient_is_flagged_and_a_live_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradleak.audit import group

    assert "dead_gradient" not in {flag.name for flag in run_audit(settings()).record.flags}
    monkeypatch.setattr(group, "update_norm", lambda observation: 1e-9)
    assert "dead_gradient" in {flag.name for flag in run_audit(settings()).record.flags}


def test_a_gradient_that_is_not_finite_is_refused_by_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gradleak.targets.text_classifier import TextClassifier

    plain = TextClassifier.losses
    monkeypatch.setattr(TextClassifier, "losses", lambda *given: plain(*given) * float("nan"))
    with pytest.raises(
        GradleakError,
        match=r"update of batch 0 is not finite in .*: the model or the protocol diverged",
    ):
        run_audit(settings())


def test_an_update_of_zeros_is_refused_by_batch_and_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradleak.targets.text_classifier import TextClassifier

    plain = TextClassifier.losses
    monkeypatch.setattr(TextClassifier, "losses", lambda *given: plain(*given) * 0)
    with pytest.raises(
        GradleakError,
        match=r"The update of batch 0 is zero in all that is seen \(classifier\.weight, classifier",
    ):
        run_audit(settings(view="parts:modules=[head]"))


@pytest.mark.parametrize(
    ("view", "parameters"),
    [("parts:layers=2,modules=[query,key]", 2 * 32 * 32), ("parts:modules=[head]", 2 * 32 + 2)],
)
def test_the_record_counts_the_parameters_of_the_parts_that_are_seen(
    view: str, parameters: int
) -> None:
    record = run_audit(settings(view=view, attacks=["tag:steps=2"])).record
    assert record.target.visible_parameters == parameters < record.target.parameters


def test_noise_lowers_what_is_found(tiny: Target) -> None:
    quiet, loud = (
        run_audit(settings(limit=4, attacks=["dlg:steps=100"], defenses=d)).record
        for d in ([], ["gaussian_noise:std=10"])
    )
    assert quiet.worst_case["bag_f1"].mean > loud.worst_case["bag_f1"].mean


def test_leaving_knowledge_out_is_refused_by_name_with_the_way_out() -> None:
    with pytest.raises(
        GradleakError,
        match=(
            r"tag requires labels; this audit grants batch_size, lengths\. Add --know labels, or"
            r" use tag:labels=enumerate"
        ),
    ):
        settings(know=["lengths", "batch_size"], attacks=["tag"])


def test_a_label_outside_the_models_range_is_refused_before_anything_runs(tmp_path: Path) -> None:
    data = tmp_path / "notes.csv"
    data.write_text("text,label\nthe cat is red,7\n")
    with pytest.raises(GradleakError, match="line 2: label 7 is outside the 2 classes of tiny"):
        run_audit(settings(data=str(data), limit=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 0}, "limit and batch_size count from 1"),
        ({"attacks": []}, "needs at least one attack"),
        ({"attacks": ["tag", "tag"]}, "listed twice"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"know": ["lables"]}, "did you mean 'labels'"),
        ({"limt": 3}, "no field 'limt' .did you mean 'limit'"),
        ({"attacks": ["tga"]}, "Unknown attack 'tga' .did you mean 'tag'"),
        ({"seed": "one"}, "seed must be a whole number"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GradleakError, match=message):
        settings(**changes)


def test_the_strongest_attack_is_the_default() -> None:
    (attack,) = AuditSpec.from_plain({"target": "tiny"}).attacks
    assert attack.name == "portfolio"
