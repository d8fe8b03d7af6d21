"""A client that trains with dropout on: its own masks, drawn anew for every client, and nothing
left behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradleak.attacks.span import Span
from gradleak.audit import AuditSpec, run_audit
from gradleak.audit.client import observe, private_batches
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch, PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.priors.english import FrequentWords
from gradleak.protocols.fedsgd import FedSGD, dropout_from
from gradleak.targets.tiny import Tiny, TinyCausal

CPU = torch.device("cpu")
TEXTS = ("the cat is red .", "my phone number is five .")


def gradient(target: Target, batch: Batch, seed: int | None = 0, dropout: bool = True) -> Update:
    one = Batch(ids=batch.ids[None], mask=batch.mask[None], labels=batch.labels[None])  # type: ignore[index]
    return FedSGD(dropout).update(
        target, one, rngs=[] if seed is None else [Streams.root("client", seed)]
    )


def same(one: Update, other: Update) -> bool:
    return all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


@pytest.mark.parametrize("spec", [Tiny(), TinyCausal()], ids=lambda spec: spec.name)
def test_the_stream_and_nothing_else_decides_the_masks(
    spec: Any, make_private: Callable[..., PrivateBatch]
) -> None:
    target = spec.open(CPU)
    batch = make_private(target, TEXTS).batch
    once = gradient(target, batch)
    torch.manual_seed(12345)  # of nobody's interest
    assert same(once, gradient(target, batch))
    assert not same(once, gradient(target, batch, seed=1))
    assert not same(once, gradient(target, batch, seed=None))


@pytest.mark.parametrize("architecture", ["Bert", "DistilBert", "MPNet", "Electra", "GPT2"])
def test_model_and_global_generator_are_left_as_they_were(
    architecture: str,
    random_target: Callable[..., Target],
    make_private: Callable[..., PrivateBatch],
) -> None:
    target = random_target(architecture)
    batch, state = make_private(target, TEXTS[:1]).batch, torch.get_rng_state()
    before = gradient(target, batch, seed=None)
    assert not same(before, gradient(target, batch))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training or module._forward_hooks for module in target.module.modules())
    assert same(before, gradient(target, batch, seed=None))


def test_without_streams_it_is_the_gradient_without_dropout(
    tiny: Target, make_private: Callable[..., PrivateBatch]
) -> None:
    batch = make_private(tiny, TEXTS).batch
    assert same(gradient(tiny, batch, seed=None), gradient(tiny, batch, dropout=False))


def test_a_mask_keeps_its_share_and_the_mean() -> None:
    module, ones = nn.Dropout(0.25).eval(), torch.ones(100_000)
    with dropout_from(Streams.root("client", 0), module):
        dropped = module(ones)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.01)
    assert torch.equal(module(ones), ones)


def test_clients_draw_apart_and_alone_as_together(
    tiny: Target, make_private: Callable[..., PrivateBatch]
) -> None:
    batch = make_private(tiny, TEXTS).batch
    both = Batch(
        **{part: torch.stack([getattr(batch, part)] * 2) for part in ("ids", "mask", "labels")}
    )
    together = FedSGD(dropout=True).update(
        tiny, both, rngs=[Streams.root("client", seed) for seed in range(2)]
    )
    for client in range(2):
        alone = gradient(tiny, batch, client)
        assert all(
            torch.equal(tensor[0], together.tensors[name][client])
            for name, tensor in alone.tensors.items()
        )


def test_examples_have_masks_of_their_own(
    tiny: Target, make_private: Callable[..., PrivateBatch]
) -> None:
    batch = make_private(tiny, (TEXTS[0], TEXTS[0]), [0, 0]).batch
    one = Batch(ids=batch.ids[None], mask=batch.mask[None], labels=batch.labels[None])  # type: ignore[index]
    sent = FedSGD(dropout=True).update(
        tiny, one, per_example=True, rngs=[Streams.root("client", 0)]
    )
    assert any(not torch.equal(tensor[0, 0], tensor[0, 1]) for tensor in sent.tensors.values())


def test_a_model_without_dropout_is_refused(make_private: Callable[..., PrivateBatch]) -> None:
    target = TinyCausal(shape="llama").open(CPU)
    with pytest.raises(GradleakError, match="This model has no dropout"):
        gradient(target, make_private(target, TEXTS[:1]).batch)
    assert not target.module.training


@pytest.mark.parametrize("name", ["tiny", "tiny:hidden=64", "tiny_causal", "tiny_causal:hidden=64"])
def test_span_proves_nothing_that_is_wrong(name: str) -> None:
    spec = AuditSpec.from_plain(
        {"target": name, "limit": 4, "protocol": "fedsgd:dropout=true", "attacks": ["blind"]}
    )
    target = spec.target.open(CPU)
    private = private_batches(spec, target)
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(target))
    found = Span(steps=10).reconstruct(
        [observe(spec, target, one, index) for index, one in enumerate(private)], bench
    )
    for guess, secret in zip(found, private, strict=True):
        right = guess.sentences == tuple(tuple(ids) for ids in secret.batch.ids.tolist())  # type: ignore[union-attr]
        assert right or not guess.certified


def test_the_record_says_that_dropout_was_on() -> None:
    plain = {"target": "tiny", "limit": 1, "attacks": ["tag:steps=2"]}
    flags = [
        {
            flag.name
            for flag in (
                run_audit(AuditSpec.from_plain({**plain, "protocol": protocol}))
                .record.attacks["tag"]
                .flags
            )
        }
        for protocol in ("fedsgd", "fedsgd:dropout=true")
    ]
    assert "unmodelled_dropout" in flags[1] - flags[0]
