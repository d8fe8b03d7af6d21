"""What Opacus applies is what is captured: clipped, noised and divided, and nothing before."""

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.audit.own_update import observe_capture
from gradleak.captures import index_folder, read_capture
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.integrations.opacus import capture_private_steps
from gradleak.integrations.steps import capture_steps

opacus = pytest.importorskip("opacus")
TEXTS = ["the cat is red .", "call me on monday !", "the dog was bad ."]
LABELS = [0, 1, 0]
FACTS = ("batch_size", "lengths", "labels")
RATE = 0.5


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its random generator, and of hooks
        yield


class Private:
    """A model and its optimiser, as Opacus makes them."""

    def __init__(self, tiny: Target, noise_multiplier: float, **options: Any) -> None:
        self.tiny = tiny
        self.inner = copy.deepcopy(tiny.module).requires_grad_(True)
        self.inner.train()
        for module in self.inner.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        data = torch.utils.data.TensorDataset(torch.arange(4))
        torch.manual_seed(0)
        self.model, self.optimizer, _ = opacus.PrivacyEngine().make_private(
            module=self.inner,
            optimizer=torch.optim.SGD(self.inner.parameters(), lr=RATE),
            data_loader=torch.utils.data.DataLoader(data, batch_size=2),
            noise_multiplier=noise_multiplier,
            max_grad_norm=0.1,
            **options,
        )

    def backward(self) -> None:
        """Differentiates all texts, of which two were expected."""
        read = self.tiny.tokenizer(TEXTS, padding=True, return_tensors="pt")
        ids = read["input_ids"]
        places = torch.arange(ids.shape[1]).repeat(len(ids), 1)
        self.model(
            input_ids=ids,
            attention_mask=read["attention_mask"],
            position_ids=places,
            token_type_ids=torch.zeros_like(ids),
            labels=torch.tensor(LABELS),
        ).loss.backward()


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_the_captured_update_is_what_was_applied_and_not_the_gradient_before_noise(
    mode: str, tiny: Target, tmp_path: Path
) -> None:
    private = Private(tiny, noise_multiplier=1.0, grad_sample_mode=mode)
    before = weights(private.inner)
    with capture_private_steps(private.model, private.optimizer, tmp_path, know=FACTS):
        private.backward()
        plain = {name: one.grad.clone() for name, one in private.inner.named_parameters()}
        private.optimizer.step()
    after = weights(private.inner)
    ((path, header),) = index_folder(tmp_path)
    sent = read_capture(path).tensors
    assert sent.keys() == before.keys()
    for name, tensor in sent.items():
        torch.testing.assert_close(before[name] - after[name], RATE * tensor, atol=1e-6, rtol=1e-4)
        assert float((tensor - plain[name]).norm()) > 0.1 * float(plain[name].norm())
    # Three were there of two that were expected
    assert header.protocol.scale == pytest.approx(3 / 2)
    assert header.defenses == ("dp_sgd:clip=0.1,noise_multiplier=1.0",)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_noise_it_is_the_observation_of_our_own_dp_sgd(
    reduction: str, tiny: Target, tmp_path: Path
) -> None:
    private = Private(tiny, noise_multiplier=0.0, loss_reduction=reduction)
    given = copy.deepcopy(tiny.module)
    with capture_private_steps(private.model, private.optimizer, tmp_path, know=FACTS):
        if reduction == "mean":
            private.backward()
        else:
            backward_sum(private)
        private.optimizer.step()
    ((path, _),) = index_folder(tmp_path)
    seen = observe_capture(path, given, tiny.tokenizer)
    ids = [tiny.tokenizer(text)["input_ids"] for text in TEXTS]
    batch = seen.target.batch_of(ids, LABELS)[None]
    made = seen.simulate(batch, [Streams.root("test", 0)])
    for name, tensor in seen.update.tensors.items():
        torch.testing.assert_close(tensor, made.tensors[name].detach(), atol=1e-6, rtol=1e-3)
    assert seen.channel.clip == 0.1


def backward_sum(private: Private) -> None:
    read = private.tiny.tokenizer(TEXTS, padding=True, return_tensors="pt")
    places = torch.arange(read["input_ids"].shape[1]).repeat(len(TEXTS), 1)
    logits = private.model(
        input_ids=read["input_ids"],
        attention_mask=read["attention_mask"],
        position_ids=places,
        token_type_ids=torch.zeros_like(places),
        labels=torch.tensor(LABELS),
    ).logits
    torch.nn.functional.cross_entropy(logits, torch.tensor(LABELS), reduction="sum").backward()


@pytest.mark.parametrize("know", [(), FACTS])
def test_the_noise_that_an_attacker_reckons_with_is_the_noise_that_was_added(
    know: tuple[str, ...], tiny: Target, tmp_path: Path
) -> None:
    private = Private(tiny, noise_multiplier=50.0)
    with capture_private_steps(private.model, private.optimizer, tmp_path, know=know):
        private.backward()
        private.optimizer.step()
    ((path, _),) = index_folder(tmp_path)
    seen = observe_capture(path, tiny.module, tiny.tokenizer)
    entries = torch.cat([one.flatten() for one in seen.update.tensors.values()])
    assert float(entries.std()) == pytest.approx(seen.noise_std, rel=0.05)


def test_accumulated_batches_and_what_epsilon_wants_are_stated(
    tiny: Target, tmp_path: Path
) -> None:
    private = Private(tiny, noise_multiplier=1.0)
    told = {"sampling_rate": 0.5, "steps": 10, "delta": 1e-6}
    with capture_private_steps(
        private.model, private.optimizer, tmp_path, know=["batch_size"], **told
    ):
        private.optimizer.signal_skip_step(True)  # a physical batch of a larger logical one
        private.backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
        assert not index_folder(tmp_path)
        private.optimizer.signal_skip_step(False)
        private.backward()
        private.optimizer.step()
    ((_, header),) = index_folder(tmp_path)
    assert header.granted.batch_size == 6
    assert header.protocol.scale == pytest.approx(6 / 2)
    assert header.defenses == (
        "dp_sgd:clip=0.1,noise_multiplier=1.0,sampling_rate=0.5,steps=10,delta=1e-06",
    )


def test_other_optimisers_and_other_clipping_are_refused(tiny: Target, tmp_path: Path) -> None:
    private = Private(tiny, noise_multiplier=1.0)
    with (
        pytest.raises(GradleakError, match="capture_private_steps"),
        capture_steps(private.model, private.optimizer, tmp_path),
    ):
        pass
    with (
        pytest.raises(GradleakError, match="wants the optimiser that make_private"),
        capture_private_steps(
            private.model, torch.optim.SGD(private.inner.parameters(), 0.1), tmp_path
        ),
    ):
        pass
    private.optimizer.max_grad_norm = [0.1, 0.2]
    with (
        pytest.raises(GradleakError, match="clips layer by layer"),
        capture_private_steps(private.model, private.optimizer, tmp_path),
    ):
        pass
