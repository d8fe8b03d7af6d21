"""Training under a defense: the optimiser gets what would have left a client, and ε is that of
this very run."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradleak.cli import main
from gradleak.core.batch import Example
from gradleak.core.defense import Defense
from gradleak.core.errors import GradleakError
from gradleak.defenses.clipping_and_noise import Clipping, GaussianNoise
from gradleak.defenses.differential_privacy import CentralDp, DpSgd
from gradleak.defenses.few_bits import Sign
from gradleak.defenses.sparsification import Pruning
from gradleak.targets import resolve_target
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.tiny import WORDS
from gradleak.training.client_steps import choose_by_chance
from gradleak.training.fine_tuning import FineTuning, fine_tune, guarantees
from gradleak.training.material import Material, Scores, lessons


def toy(count: int = 64) -> list[Example]:
    """Sentences of different lengths whose last word is their class."""
    words = [
        " ".join(WORDS[(start * 7 + step) % 40] for step in range(2 + start % 4))
        for start in range(count)
    ]
    return [
        Example(f"{text} {'good' if place % 2 else 'bad'}", place % 2)
        for place, text in enumerate(words)
    ]


def run(
    out: Path, defenses: tuple[Defense, ...], epochs: int = 1, batch_size: int = 16, count: int = 64
) -> Scores:
    target = resolve_target("tiny").open(torch.device("cpu"))
    assert isinstance(target, TextClassifier)
    for module in target.module.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    work = lessons(target, toy(count), "training")
    settings = FineTuning(epochs, batch_size, 5e-3, defenses=defenses)
    return fine_tune(
        settings, target, Material(work, work, {"target": "tiny"}), out, lambda news: None
    )


def gradients(
    monkeypatch: pytest.MonkeyPatch, out: Path, *defenses: Defense, batch_size: int = 64
) -> list[Tensor]:
    """What the optimiser was given in its first step."""
    seen: list[list[Tensor]] = []
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self: seen.append([value.grad.clone() for value in self.param_groups[0]["params"]]),
    )
    run(out, defenses, batch_size=batch_size)
    return seen[0]


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def test_the_optimiser_gets_the_defended_gradient(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = gradients(monkeypatch, tmp_path / "none")
    signs = gradients(monkeypatch, tmp_path / "sign", Sign())
    assert all(torch.equal(sign, value.sign()) for sign, value in zip(signs, plain, strict=True))
    pruned = gradients(monkeypatch, tmp_path / "pruned", Pruning(0.1))
    assert all(int((tensor != 0).sum()) <= max(1, round(0.1 * tensor.numel())) for tensor in pruned)
    chain = gradients(monkeypatch, tmp_path / "chain", Clipping(0.1), GaussianNoise(0.01))
    clipped = joined(plain) * min(1.0, 0.1 / float(joined(plain).norm()))
    assert float((joined(chain) - clipped).std()) == pytest.approx(0.01, rel=0.05)


def test_dp_sgd_without_clip_and_noise_is_the_plain_gradient_of_the_examples_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Of all 64, each of which is drawn for certain
    plain = gradients(monkeypatch, tmp_path / "none", batch_size=64)
    private = gradients(
        monkeypatch, tmp_path / "dp", DpSgd(clip=float("inf"), noise_multiplier=0.0), batch_size=64
    )
    torch.testing.assert_close(joined(private), joined(plain), rtol=1e-3, atol=1e-5)


def test_every_example_is_clipped_and_the_noise_is_that_of_the_expected_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def given(noise: float) -> Tensor:
        return joined(
            gradients(
                monkeypatch,
                tmp_path / str(noise),
                DpSgd(clip=0.01, noise_multiplier=noise),
                batch_size=16,
            )
        )

    silent, noisy = given(0.0), given(2.0)
    # Of 64 examples 16 are expected; 40 will not be drawn
    assert float(silent.norm()) <= 0.01 * 40 / 16
    assert float((noisy - silent).std()) == pytest.approx(2.0 * 0.01 / 16, rel=0.05)


def test_examples_are_drawn_by_chance_at_the_rate_that_is_accounted_for() -> None:
    streams = FineTuning().streams
    sizes = [len(choose_by_chance(1000, 32, streams.child(step))) for step in range(200)]
    assert sum(sizes) / 200 == pytest.approx(32, rel=0.05)
    assert len(set(sizes)) > 5


def test_epsilon_is_that_of_this_run_and_what_opacus_says() -> None:
    create_accountant = pytest.importorskip("opacus.accountants").create_accountant
    settings = FineTuning(
        epochs=3,
        batch_size=16,
        defenses=(DpSgd(noise_multiplier=0.9, delta=1e-4, sampling_rate=1.0, steps=1),),
    )
    for one, name in zip(guarantees(settings, 500), ("prv", "rdp"), strict=True):
        theirs = create_accountant(name)
        for _ in range(3 * 32):
            theirs.step(noise_multiplier=0.9, sample_rate=16 / 500)
        assert one.epsilon == pytest.approx(theirs.get_epsilon(delta=1e-4), abs=1e-3)


def test_heavy_noise_costs_accuracy(tmp_path: Path) -> None:
    free, noisy = (
        run(tmp_path / "free", (), epochs=6),
        run(tmp_path / "noisy", (GaussianNoise(10.0),), epochs=6),
    )
    assert free.accuracy > 0.9 > noisy.accuracy


def test_what_cannot_be_trained_under_is_refused() -> None:
    with pytest.raises(GradleakError, match="central_dp leaves what clients send as it is"):
        FineTuning(defenses=(CentralDp(),))
    with pytest.raises(
        GradleakError, match="dp_sgd needs the gradient of each example and must be the first"
    ):
        FineTuning(defenses=(Sign(), DpSgd()))


def test_the_command_says_why_it_prints_no_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "\n".join(f"{example.text},{example.label}" for example in toy(20))
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
    assert (
        main(["finetune", *words, "--epochs", "1", "--defense", "dp_sgd:noise_multiplier=0"]) == 0
    )
    _, prv, _ = capsys.readouterr().out.splitlines()
    assert (
        prv == "ε infinite per example at δ 1e-05 over the whole run, by PRV (Opacus): there is no"
        " noise, so nothing is proven"
    )


def test_the_command_prints_utility_and_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("opacus")
    rows = "\n".join(f"{example.text},{example.label}" for example in toy(80))
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
    assert (
        main(["finetune", *words, "--epochs", "1", "--defense", "dp_sgd:noise_multiplier=1"]) == 0
    )
    scores, prv, rdp = capsys.readouterr().out.splitlines()
    assert (
        "MCC" in scores
        and prv.startswith("ε ")
        and prv.endswith("per example at δ 1e-05 over the whole run, by PRV (Opacus)")
    )
    assert rdp.endswith("by RDP (Opacus)")
    kept = json.loads((tmp_path / "out" / "training.json").read_text())
    assert kept["defenses"] == ["dp_sgd"] and [one["accountant"] for one in kept["guarantees"]] == [
        "PRV (Opacus)",
        "RDP (Opacus)",
    ]
