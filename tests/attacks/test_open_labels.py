"""Labels that nobody is told or tries: texts are found without them, and they are solved for."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.attacks import evidence
from gradleak.attacks.certificate import certify
from gradleak.attacks.certificate.answers import solve_labels
from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.attacks.portfolio import Portfolio
from gradleak.attacks.span import Span
from gradleak.audit import AuditSpec, run_audit
from gradleak.audit.own_guesses import reconstruct
from gradleak.core.attack import Attack, Bench
from gradleak.core.batch import Example, Label
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.defenses.clipping_and_noise import Clipping
from gradleak.priors.english import FrequentWords
from gradleak.targets.tiny import Tiny, TinyCausal
from gradleak.views import PartsView

Observe = Callable[..., Observation]
CPU = torch.device("cpu")
A, B, C = "the cat is red .", "my phone number is five .", "she sold my car soon"
KINDS: dict[str, tuple[int, Sequence[Label]]] = {
    "multi_label_classification": (3, ((0, 1, 1), 2)),
    "regression": (1, (0.25, -2.0)),
    "token_classification": (3, ((0, 1, 2, 0, 0), (1, 1, 1, 2, 0, 0))),
}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(kind: Any) -> Target:
    return Tiny(problem_type=kind, classes=KINDS[kind][0], hidden=64, heads=4).open(CPU)


def encode(target: Target, *texts: str) -> list[tuple[int, ...]]:
    return [tuple(row) for row in target.encode(texts)]


def attack(one: Attack, seen: Observation) -> Any:
    facts = one.requires | one.uses | {Fact.DEFENSE}
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(seen.target))
    (found,) = one.reconstruct([seen.limit_to(facts - {Fact.LABELS})], bench)
    return found


def test_span_finds_and_proves_a_batch_without_labels(
    target: Target, kind: str, observe: Observe
) -> None:
    seen = observe(target, (A, B), KINDS[kind][1])
    assert seen.knows.labels is None
    found = attack(Span(), seen)
    assert found.certified and sorted(found.sentences) == sorted(encode(target, A, B))
    assert found.labels is None


def test_labels_follow_from_the_texts_and_the_head(
    target: Target, kind: str, observe: Observe, make_private: Callable[..., Any]
) -> None:
    labels = KINDS[kind][1]
    seen = observe(target, (A, B), labels)
    solved = solve_labels(seen, tuple(encode(target, A, B)))
    assert solved is not None
    truth = make_private(target, (A, B), labels).batch.labels
    torch.testing.assert_close(solved.double(), truth.double(), rtol=0, atol=1e-3)
    (guess,) = {one.explains for one in reconstruct(seen, attacks="span")}
    assert guess == pytest.approx(1.0, abs=1e-6)


def test_one_wrong_word_is_not_proven_and_nothing_is_without_the_head_or_the_size(
    target: Target, kind: str, observe: Observe
) -> None:
    seen = observe(target, (A, B), KINDS[kind][1])
    truth = encode(target, A, B)
    assert certify(seen, truth).proven
    for place in range(1, len(truth[1]) - 1):
        word = truth[0][1] if truth[1][place] != truth[0][1] else truth[0][2]
        wrong = (*truth[1][:place], word, *truth[1][place + 1 :])
        assert not certify(seen, [truth[0], wrong]).proven
    assert not certify(seen, truth[:1]).proven
    assert "batch size too" in certify(seen.limit_to([Fact.DEFENSE]), truth).note
    layers = PartsView(modules=("query", "key", "value"))
    hidden = observe(target, (A, B), KINDS[kind][1], view=layers)
    assert "head's gradient" in certify(hidden, truth).note
    clipped = observe(target, (A, B), KINDS[kind][1], defenses=(Clipping(0.1),))
    assert "unknown size" in certify(clipped, truth).note


def test_a_sentence_that_is_there_twice_is_not_proven(
    target: Target, kind: str, observe: Observe
) -> None:
    first, second = KINDS[kind][1]
    other: Label = (1, 0, 0, 0, 0) if kind == "token_classification" else second
    seen = observe(target, (A, A, B), (first, other, second))
    assert not certify(seen, encode(target, A, B)).proven
    assert not certify(seen, encode(target, A, B, C)).proven


def test_a_sentence_that_the_model_already_answers_is_not_proven(observe: Observe) -> None:
    target = Tiny(problem_type="regression", classes=1, hidden=64, heads=4).open(CPU)
    private = target.private_batch([Example(B, 0.0)]).batch
    answer = float(target.probabilities(private))
    seen = observe(target, (A, B), (0.25, answer))
    for guess in (encode(target, A, B), encode(target, A, C)):
        assert not certify(seen, guess).proven


def test_energy_needs_no_labels_either(observe: Observe) -> None:
    spec = Tiny(problem_type="token_classification", classes=3, hidden=64, heads=4, layers=3)
    target = spec.open(CPU)
    seen = observe(target, (A,), ((0, 1, 2, 0, 0),), view=PartsView(layers="2", modules=("query",)))
    assert attack(EnergyAttack(restarts=1), seen).sentences == tuple(encode(target, A))


def test_the_portfolio_leaves_out_what_wants_classes(
    target: Target, kind: str, observe: Observe
) -> None:
    found = attack(Portfolio(), observe(target, (A, B), KINDS[kind][1]))
    assert found.certified and [stage.attack for stage in found.stages] == ["span"]


def test_an_audit_plays_it_and_refuses_attacks_that_want_classes_by_name(kind: str) -> None:
    classes = KINDS[kind][0]
    plain = {
        "target": f"tiny:problem_type={kind},classes={classes},hidden=64,heads=4",
        "data": "canaries",
        "limit": 1,
        "prior": "frequent_words",
    }
    with pytest.raises(GradleakError, match=r"tag tells or tries one class .* use span, energy"):
        AuditSpec.from_plain(plain | {"attacks": ["tag"]})
    spec = AuditSpec.from_plain(plain | {"attacks": ["span"]})
    assert Fact.LABELS not in spec.granted
    if kind == "multi_label_classification":  # one class is a list of one
        record = run_audit(spec).record
        assert record.worst_case["exact_match"].mean == 1.0


def test_labels_are_not_read_off_the_head(target: Target, kind: str, observe: Observe) -> None:
    assert evidence.labels(observe(target, (A, B), KINDS[kind][1])) is None


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_texts_of_different_lengths_are_proven_where_the_mean_is_over_tokens(
    shape: Any, observe: Observe
) -> None:
    spec = TinyCausal(shape=shape, hidden=64, heads=4, loss_over="tokens")
    target = spec.open(CPU)
    seen = observe(target, (A, B, "she left"))
    truth = encode(target, A, B, "she left")
    assert certify(seen, truth).proven
    other = TinyCausal(shape=shape, hidden=64, heads=4).open(CPU)
    assert not certify(observe(other, (A, B, "she left")), truth[:2]).proven
    mistaken = Observation(0, observe(other, (A, B, "she left")).rounds, seen.knows, seen.protocol)
    moved = type(seen)(
        0, (type(seen.rounds[0])(target, mistaken.update),), seen.knows, seen.protocol
    )
    assert not certify(moved, truth).proven


@pytest.mark.parametrize("number", range(4))
def test_the_hunt_finds_no_false_certificate_of_open_labels(number: int) -> None:
    """25 updates each of classes of tokens, several labels, numbers, and a mean over tokens."""
    path = Path(__file__).parents[2] / "benchmarks" / "certificates.py"
    spec = importlib.util.spec_from_file_location("open_hunt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["open_hunt"] = module
    spec.loader.exec_module(module)
    tally = module.hunt(f"open-{number}", planted=1, attacked=0)
    assert tally.wrong == []
    assert tally.plain_certified >= 0.7 * tally.plain_true
