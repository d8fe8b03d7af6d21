"""Fine-tuning a target: it learns, saves what an audit can open, goes on where it stopped, and
leaves nothing behind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradleak.cli import main
from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.datasets import Canaries, Cola, RottenTomatoes
from gradleak.targets import resolve_target
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.tiny import WORDS, tiny_tokenizer
from gradleak.training.fine_tuning import (
    FineTuning,
    News,
    _dropout_from,
    _logits,
    _trainable,
    evaluate,
    fine_tune,
)
from gradleak.training.material import (
    Material,
    Scores,
    count_pairs,
    dev_split,
    hold_out,
    lessons,
    score_counts,
)

CPU = torch.device("cpu")
QUICK = FineTuning(epochs=2, batch_size=16, learning_rate=5e-3)
DESCRIBED = {"target": "tiny", "data": "toy"}
Captured = pytest.CaptureFixture[str]


def toy(count: int = 160) -> list[Example]:
    """Sentences of different lengths whose last word is their class."""
    words = [
        " ".join(WORDS[(start * 7 + step) % 40] for step in range(2 + start % 4))
        for start in range(count)
    ]
    return [
        Example(f"{text} {'good' if place % 2 else 'bad'}", place % 2)
        for place, text in enumerate(words)
    ]


def opened(described: str = "tiny") -> TextClassifier:
    """A target of this test's own: training changes it."""
    target = resolve_target(described).open(CPU)
    assert isinstance(target, TextClassifier)
    return target


def material(target: TextClassifier, count: int = 160) -> Material:
    examples = toy(count)
    held = len(examples) // 4
    return Material(
        lessons(target, examples[held:], "training"),
        lessons(target, examples[:held], "evaluation"),
        DESCRIBED,
    )


def ignore(news: News) -> None:
    """Nobody watches."""


def weights(target: Target) -> Tensor:
    return torch.cat([value.detach().flatten() for value in target.parameters.values()])


def trained(settings: FineTuning, out: Path, count: int = 64, target: str = "tiny") -> Tensor:
    model = opened(target)
    fine_tune(settings, model, material(model, count), out, ignore)
    return weights(model)


def test_it_learns_and_the_saved_folder_opens_as_the_same_model(tmp_path: Path) -> None:
    target = opened()
    work = material(target)
    scores = fine_tune(
        FineTuning(epochs=6, batch_size=16, learning_rate=5e-3),
        target,
        work,
        tmp_path / "out",
        ignore,
    )
    assert scores.accuracy > 0.9
    assert scores == evaluate(target, work.evaluation)
    saved = opened(str(tmp_path / "out"))
    batch = target.private_batch(toy(8)).batch
    assert torch.equal(saved.private_batch(toy(8)).batch.ids, batch.ids)  # type: ignore[arg-type]
    torch.testing.assert_close(saved.probabilities(batch), target.probabilities(batch))
    # The opened target sees its new weights
    assert torch.equal(target.vocabulary.embeddings, saved.vocabulary.embeddings)
    kept = json.loads((tmp_path / "out" / "training.json").read_text())
    assert kept["scores"]["accuracy"] == scores.accuracy
    assert (kept["data"], kept["epochs"], kept["examples"], kept["eval_examples"]) == (
        "toy",
        6,
        120,
        40,
    )


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    target = opened("tiny:frozen=word_embedding")
    state, words = torch.get_rng_state(), target.vocabulary.embeddings.clone()

    def stop(news: News) -> None:
        assert target.module.training
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fine_tune(QUICK, target, material(target, 64), tmp_path / "a", stop)
    fine_tune(QUICK, target, material(target, 64), tmp_path / "b", ignore)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(
        module.training or module._forward_hooks or module._backward_hooks
        for module in target.module.modules()
    )
    assert all(
        value.grad is None and not value.requires_grad for value in target.module.parameters()
    )
    assert torch.equal(target.vocabulary.embeddings, words)  # frozen


def test_the_seed_and_nothing_else_decides(tmp_path: Path) -> None:
    once = trained(QUICK, tmp_path / "once")
    torch.manual_seed(12345)  # of nobody's interest
    assert torch.equal(once, trained(QUICK, tmp_path / "again"))
    other = FineTuning(epochs=2, batch_size=16, learning_rate=5e-3, seed=1)
    assert not torch.allclose(once, trained(other, tmp_path / "other"), atol=1e-3)


def test_dropout_is_on() -> None:
    target = opened()
    batch = material(target, 16).training
    with _trainable(target):
        drawn = []
        for name in ("a", "a", "b"):
            with _dropout_from(Streams.root("test", 0).child(name), CPU):
                drawn.append(_logits(target, batch).detach())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.allclose(drawn[0], drawn[2], atol=1e-3)


def test_without_dropout_a_step_is_the_optimisers_on_the_clients_gradient(tmp_path: Path) -> None:
    target = opened()
    for module in target.module.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    copies = {name: value.clone().requires_grad_(True) for name, value in target.parameters.items()}
    target.losses(target.private_batch(toy(32)).batch, copies).mean().backward()  # type: ignore[no-untyped-call]
    work = lessons(target, toy(32), "training")
    fine_tune(
        FineTuning(epochs=1, learning_rate=1e-3),
        target,
        Material(work, work, DESCRIBED),
        tmp_path / "out",
        ignore,
    )
    for name, copy in copies.items():
        assert copy.grad is not None
        # Adam's first step: the gradient over its own size
        expected = copy.detach() - 1e-3 * copy.grad / (copy.grad.abs() + 1e-6)
        if "key.bias" not in name:  # its gradient is zero but for rounding
            torch.testing.assert_close(target.parameters[name], expected, rtol=1e-3, atol=1e-4)


def test_padding_is_masked() -> None:
    target = opened("tiny:attend_padding=true")
    by_length = sorted(material(target, 16).training, key=lambda lesson: len(lesson.ids))
    short, long = by_length[0], by_length[-1]
    assert len(short.ids) < len(long.ids)
    torch.testing.assert_close(_logits(target, [short, long])[:1], _logits(target, [short]))


def test_gradient_noise_changes_what_is_learnt(tmp_path: Path) -> None:
    quiet = trained(QUICK, tmp_path / "quiet")
    faint = FineTuning(epochs=2, batch_size=16, learning_rate=5e-3, gradient_noise=1e-12)
    loud = FineTuning(epochs=2, batch_size=16, learning_rate=5e-3, gradient_noise=10.0)
    assert (trained(faint, tmp_path / "faint") - quiet).abs().median() < 1e-3
    noisy = trained(loud, tmp_path / "loud")
    assert (noisy - quiet).abs().median() > 1e-3
    assert torch.equal(noisy, trained(loud, tmp_path / "again"))


def test_one_step_adds_noise_of_the_stated_spread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Tensor] = []

    def record(self: torch.optim.AdamW) -> None:
        seen.append(
            torch.cat(
                [value.grad.flatten() for group in self.param_groups for value in group["params"]]
            )
        )

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    for noise in (0.0, 0.5):
        target = opened()
        fine_tune(
            FineTuning(1, 64, 1e-3, noise),
            target,
            material(target, 64),
            tmp_path / str(noise),
            ignore,
        )
    difference = seen[1] - seen[0]
    assert float(difference.std()) == pytest.approx(0.5, rel=0.03)
    assert abs(float(difference.mean())) < 0.01


def test_the_learning_rate_falls_linearly_to_zero(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates: list[float] = []
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: rates.append(self.param_groups[0]["lr"])
    )
    # 48 examples: 2 steps an epoch
    trained(FineTuning(epochs=2, batch_size=24, learning_rate=1.0), tmp_path / "out")
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_interrupted_and_resumed_equals_undisturbed(tmp_path: Path) -> None:
    settings = FineTuning(epochs=3, batch_size=16, learning_rate=5e-3, gradient_noise=0.01)
    once = trained(settings, tmp_path / "once")
    epochs: list[int] = []

    def stop_in_the_second_epoch(news: News) -> None:
        if news.epoch == 2:
            raise KeyboardInterrupt

    target = opened()
    with pytest.raises(KeyboardInterrupt):
        fine_tune(
            settings, target, material(target, 64), tmp_path / "twice", stop_in_the_second_epoch
        )
    target = opened()
    fine_tune(
        settings,
        target,
        material(target, 64),
        tmp_path / "twice",
        lambda news: epochs.append(news.epoch),
    )
    assert sorted(set(epochs)) == [2, 3]
    torch.testing.assert_close(weights(target), once, rtol=1e-5, atol=1e-6)
    # finished: loaded, not trained again
    assert torch.equal(trained(settings, tmp_path / "twice"), weights(target))
    assert not list((tmp_path / "twice").glob("*.tmp"))


def test_a_checkpoint_of_other_settings_or_data_is_refused(tmp_path: Path) -> None:
    trained(FineTuning(epochs=1), tmp_path / "out")
    with pytest.raises(
        GradleakError, match=r"other settings \(epochs was 1 and is 3\): choose another --out"
    ):
        trained(FineTuning(epochs=3), tmp_path / "out")
    target = opened()
    work = material(target, 64)
    turned = Material(work.training[::-1], work.evaluation, DESCRIBED)
    with pytest.raises(GradleakError, match="the examples have changed"):
        fine_tune(FineTuning(epochs=1), target, turned, tmp_path / "out", ignore)


def test_a_model_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    trained(FineTuning(epochs=1), tmp_path / "out")
    (tmp_path / "out" / "checkpoint.pt").unlink()
    with pytest.raises(GradleakError, match="already holds a model"):
        trained(FineTuning(epochs=1), tmp_path / "out")
    with pytest.raises(GradleakError, match=r"is a file: choose a folder for --out"):
        trained(FineTuning(epochs=1), tmp_path / "out" / "config.json")


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="not finite: lower --learning-rate"):
        trained(FineTuning(epochs=1, batch_size=8, learning_rate=1e36), tmp_path / "out")
    assert not (tmp_path / "out" / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    "changes", [{"epochs": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"gradient_noise": -1.0}]
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(GradleakError, match=r"count from 1|above 0|0 or more"):
        FineTuning(**changes)


@pytest.mark.parametrize(
    ("example", "sentence"),
    [
        (Example("good", None), "Text 2 of the batch has no label"),
        (Example("good", 2), "Text 2 of the batch: label 2 is outside the 2 classes"),
        (Example(" ", 0), "Text 2 of the batch is empty"),
    ],
)
def test_unfit_examples_are_refused_by_the_targets_own_sentences(
    example: Example, sentence: str
) -> None:
    with pytest.raises(
        GradleakError, match=f"Batch of examples 1 to 2 of the training data: {sentence}"
    ):
        lessons(opened(), [Example("bad", 0), example], "training")
    with pytest.raises(GradleakError, match="no examples in the training data"):
        lessons(opened(), [], "training")


def test_a_long_example_is_truncated_and_counted() -> None:
    short, long = lessons(opened(), [Example("bad", 0), Example("good " * 200, 1)], "training")
    assert (len(long.ids), short.dropped) == (128, 0)
    assert long.dropped == len(opened().encode(["good " * 200])[0]) - 128


def test_a_model_that_shares_no_batch_between_lengths_is_trained_all_the_same(
    random_model: Callable[..., Any], tmp_path: Path
) -> None:
    target = TextClassifier("GPT2", random_model("GPT2"), tiny_tokenizer())
    assert not target.padding_is_free
    before = weights(target)
    scores = fine_tune(
        FineTuning(epochs=1, learning_rate=1e-2),
        target,
        material(target, 64),
        tmp_path / "out",
        ignore,
    )
    assert scores.examples == 16
    assert (weights(target) - before).abs().max() > 1e-3


def test_a_tenth_is_held_out_and_not_trained_on() -> None:
    examples = toy(40)
    kept, held = hold_out(examples, FineTuning().streams)
    assert (len(kept), len(held)) == (36, 4)
    assert sorted(map(hash, kept + held)) == sorted(map(hash, examples))
    assert hold_out(examples, FineTuning(seed=1).streams)[1] != held
    with pytest.raises(GradleakError, match="too few to hold a tenth of them out"):
        hold_out(examples[:9], FineTuning().streams)


def test_data_with_a_dev_split_is_judged_on_it() -> None:
    assert dev_split(Cola(selection="lamp_test")) == Cola(split="dev", selection="all")
    assert [dev_split(data) for data in (Cola(split="dev"), RottenTomatoes(), Canaries())] == [
        None,
        None,
        None,
    ]


def score(labels: torch.Tensor, predictions: torch.Tensor, classes: int) -> Scores:
    return score_counts(count_pairs(labels, predictions, classes))


@pytest.mark.filterwarnings("ignore:A single label was found")
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_scores_equal_scikit_learns(classes: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(classes)
    for size in (1, 4, 50):
        labels = torch.randint(classes, (size,), generator=generator)
        predictions = torch.where(
            torch.rand(size, generator=generator) < 0.5, labels, labels.roll(1)
        )
        found = score(labels, predictions, classes)
        average = "binary" if classes == 2 else "macro"
        f1 = metrics.f1_score(labels.numpy(), predictions.numpy(), average=average, zero_division=0)
        assert found.mcc == pytest.approx(
            metrics.matthews_corrcoef(labels.numpy(), predictions.numpy())
        )
        assert found.f1 == pytest.approx(f1)
        assert found.accuracy == pytest.approx(
            metrics.accuracy_score(labels.numpy(), predictions.numpy())
        )
        assert found.examples == size


def test_scores_in_closed_form() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    assert score(labels, labels, 2).mcc == score(labels, labels, 2).f1 == 1.0
    assert score(labels, 1 - labels, 2).mcc == -1.0
    assert (
        score(labels, torch.zeros_like(labels), 2).mcc,
        score(labels, torch.zeros_like(labels), 2).f1,
    ) == (0.0, 0.0)


def test_the_command_trains_what_an_audit_then_attacks(tmp_path: Path, capsys: Captured) -> None:
    rows = "\n".join(f"{example.text},{example.label}" for example in toy())
    (tmp_path / "toy.csv").write_text(f"text,label\n{rows}\n")
    words = [
        "--target",
        "tiny",
        "--data",
        str(tmp_path / "toy.csv"),
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    command = ["finetune", *words, "--epochs", "6", "--learning-rate", "5e-3", "--batch-size", "16"]
    assert main([*command, "--limit", "10"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path / 'out'}: MCC ")
    assert out.endswith("n 16\n")
    assert out.count("\n") == 1
    assert err.startswith("144 examples for training, 16 for evaluation\nepoch 1  step 1/54  loss ")
    assert "epoch 6  step 54/54" in err
    kept = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (kept["target"], kept["weights"], kept["eval_data"]) == (
        "tiny",
        "made:seed=0",
        "held-out tenth",
    )
    assert kept["scores"]["accuracy"] > 0.9
    attack = [
        "audit",
        "--target",
        str(tmp_path / "out"),
        "--attack",
        "tag:steps=2",
        "--limit",
        "1",
        "--device",
        "cpu",
    ]
    assert main([*attack, "--out", str(tmp_path / "runs")]) == 0
    assert main([*command, "--eval-data", str(tmp_path / "toy.csv")]) == 2
    assert "checkpoint of other settings" in capsys.readouterr().err
