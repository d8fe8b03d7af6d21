"""Laws of batches and updates."""

import pytest
import torch

from gradleak.core.batch import Batch
from gradleak.core.observation import Fact, Knowledge
from gradleak.core.update import Update

MASK, LABELS = torch.ones(2, 3, 4, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.int64)
IDS, EMBEDDINGS = torch.zeros(2, 3, 4, dtype=torch.int64), torch.zeros(2, 3, 4, 8)


def test_a_batch_holds_exactly_one_of_ids_and_embeddings() -> None:
    Batch(mask=MASK, labels=LABELS, ids=IDS)
    Batch(mask=MASK, labels=LABELS, embeddings=EMBEDDINGS)
    for both_or_none in ({}, {"ids": IDS, "embeddings": EMBEDDINGS}):
        with pytest.raises(ValueError, match="either ids or embeddings"):
            Batch(mask=MASK, labels=LABELS, **both_or_none)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": IDS[:1]},
        {"ids": IDS[..., :2]},
        {"ids": IDS.float()},
        {"labels": LABELS[:, :2]},
        {"mask": MASK.long()},
    ],
)
def test_shapes_are_checked_in_tests(wrong: dict[str, torch.Tensor]) -> None:
    with pytest.raises(TypeError, match="Type-check error"):
        Batch(**{"mask": MASK, "labels": LABELS, "ids": IDS, **wrong})


def test_an_index_cuts_the_first_axis_of_everything() -> None:
    batch = Batch(mask=MASK, labels=torch.zeros(2, 3, 5), embeddings=EMBEDDINGS)
    assert batch.lead == (2, 3)
    assert batch[0].lead == (3,)
    assert batch[1:].lead == (1, 3)
    assert batch[0].labels.shape == (3, 5)
    assert batch[0].embeddings.shape == (3, 4, 8)
    assert batch[0].ids is None


def test_mapping_an_update_never_shows_two_clients_at_once() -> None:
    update = Update(
        {"matrix": torch.arange(24.0).view(3, 2, 4), "bias": torch.arange(3.0)[:, None]}
    )
    seen: list[torch.Size] = []

    def double(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return 2 * tensor

    doubled = update.map(double)
    assert set(seen) == {(2, 4), (1,)}
    assert len(seen) == 2  # all clients of a tensor in one go, each as if it were alone

    def clipped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor / tensor.norm() if tensor.norm() > 1 else tensor

    alone = torch.stack([clipped(row) for row in update.tensors["matrix"]])
    # Looks at values: one after the other
    assert torch.equal(update.map(clipped).tensors["matrix"], alone)
    assert update.clients == doubled.clients == 3
    assert all(
        torch.equal(doubled.tensors[name], 2 * tensor) for name, tensor in update.tensors.items()
    )


def test_a_detached_clone_shares_neither_storage_nor_history() -> None:
    update = Update(
        {"a": torch.ones(1, 4, requires_grad=True) * 2, "b": torch.ones(2, 4)[:1]}, per_example=True
    )
    clone = update.detached_clone()
    for name, tensor in update.tensors.items():
        copy = clone.tensors[name]
        assert torch.equal(copy, tensor)
        assert copy.grad_fn is None
        assert not copy.requires_grad
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        # Nor does it carry other clients along
        assert copy.untyped_storage().nbytes() == copy.numel() * copy.element_size()
    assert clone.per_example


def test_selecting_keeps_the_named_tensors_in_the_order_named() -> None:
    update = Update({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}, per_example=True)
    assert list(update.select(["c", "a"]).tensors) == ["c", "a"]
    assert update.select(["c"]).per_example


def test_norms_are_of_each_tensor_of_each_client() -> None:
    assert Update({"a": torch.tensor([[3.0, 4.0], [0.0, 1.0]])}).norms()["a"].tolist() == [5.0, 1.0]


def test_limited_knowledge_holds_the_named_facts_only() -> None:
    whole = Knowledge(torch.zeros(1, dtype=torch.int64), (5,), 1, ())
    assert whole.facts == set(Fact)
    for fact in Fact:
        assert whole.limit_to({fact}).facts == {fact}
    assert whole.limit_to([]).facts == set()
    assert Knowledge().limit_to(Fact).facts == set()
