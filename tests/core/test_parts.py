"""Laws of parts: cuts partition an axis, and layers and modules are chosen by exact words."""

import pytest
import torch

from gradleak.core.errors import GradleakError
from gradleak.core.parts import Cut, Part, by_name, check_modules, read_layers, select_parts
from gradleak.core.update import Update

PARTS = (
    Part("words", "words", "word_embedding", (9, 4)),
    Part("norm", "norm", "layernorm", (4,)),
    *(
        Part(f"{n}.{module}", f"{n}.{module}", module, (4, 4), n)
        for n in (1, 2, 3)
        for module in ("query", "layernorm")
    ),
    Part("head", "head", "head", (2, 4)),
)


def chosen(layers: str = "", *modules: str) -> list[str]:
    return [part.name for part in select_parts(PARTS, layers, modules)]


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_the_shares_of_an_axis_hold_each_entry_once(axis: int, blocks: int) -> None:
    whole = torch.arange(5 * 24 * 24).view(5, 24, 24)
    shares = [Cut(axis, place, blocks=blocks).of(whole) for place in range(3)]
    assert all(share.shape == ((5, 24, 8) if axis == -1 else (5, 8, 24)) for share in shares)
    assert torch.equal(
        torch.cat([share.flatten() for share in shares]).sort().values, whole.flatten()
    )


def test_in_one_block_shares_are_thirds_and_in_many_they_take_turns() -> None:
    columns = torch.arange(12)
    assert Cut(-1, 1).of(columns).tolist() == [4, 5, 6, 7]
    assert Cut(-1, 1, blocks=2).of(columns).tolist() == [2, 3, 8, 9]
    assert Cut(-2, 1).of(columns, axis=-1).tolist() == [4, 5, 6, 7]


def test_an_update_is_cut_into_parts_and_their_clones_hold_nothing_else() -> None:
    parts = [Part(f"qkv[{place}]", "qkv", "query", (4, 4), 1, Cut(-1, place)) for place in range(3)]
    update = Update({"qkv": torch.randn(1, 4, 12), "bias": torch.ones(1, 12)})
    seen = update.cut([*parts[:2], Part("bias", "bias", "bias", (12,), 1)]).detached_clone()
    assert list(seen.tensors) == ["qkv[0]", "qkv[1]", "bias"]
    assert torch.equal(seen.tensors["qkv[1]"], update.tensors["qkv"][..., 4:8])
    for tensor in seen.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_gradients_of_single_examples_are_cut_alike() -> None:
    update = Update({"qkv": torch.randn(1, 3, 4, 12)}, per_example=True)
    seen = update.cut([Part("qkv[key]", "qkv", "key", (4, 4), 1, Cut(-1, 1))])
    assert seen.per_example
    assert torch.equal(seen.tensors["qkv[key]"], update.tensors["qkv"][..., 4:8])


def test_a_fused_parameter_has_a_name_of_its_own_beside_its_slices() -> None:
    part = Part("qkv[query]", "qkv", "query", (4, 4), 2, Cut(-1, 0))
    found = by_name([part], {"qkv": torch.ones(4, 12)})
    assert found["qkv[query]"] is part
    assert (found["qkv"].shape, found["qkv"].layer, found["qkv"].cut) == ((4, 12), 2, None)


@pytest.mark.parametrize(
    ("layers", "modules", "expected"),
    [
        ("", (), [part.name for part in PARTS]),
        ("all", (), ["1.query", "1.layernorm", "2.query", "2.layernorm", "3.query", "3.layernorm"]),
        ("2", (), ["2.query", "2.layernorm"]),
        ("1,3", ("query",), ["1.query", "3.query"]),
        ("2-3", ("query", "head"), ["2.query", "3.query", "head"]),
        ("", ("layernorm",), ["norm", "1.layernorm", "2.layernorm", "3.layernorm"]),
        ("all", ("layernorm",), ["1.layernorm", "2.layernorm", "3.layernorm"]),
        ("1", ("word_embedding",), ["words"]),
    ],
)
def test_layers_and_modules_choose_together(
    layers: str, modules: tuple[str, ...], expected: list[str]
) -> None:
    assert chosen(layers, *modules) == expected


def test_layers_are_written_as_numbers_and_ranges() -> None:
    assert [list(named) for named in read_layers("1, 4-6")] == [[1], [4, 5, 6]]
    assert read_layers("all") == ()


@pytest.mark.parametrize("layers", ["0", "3-1", "x", "1,", "-2", "1-", "1.5", "first", "0-3", ""])
def test_other_ways_to_write_layers_are_refused(layers: str) -> None:
    with pytest.raises(
        GradleakError, match="Layers are written as all, 5, 3-6 or 1,4-6, counted from 1, not"
    ):
        read_layers(layers)


def test_a_layer_beyond_the_model_is_refused_with_the_number_there_is() -> None:
    with pytest.raises(
        GradleakError, match=r"There is no layer 9: this model has 3 layers, counted from 1\."
    ):
        chosen("2-9")
    with pytest.raises(GradleakError, match="no layers that can be told apart"):
        select_parts(PARTS[:1], "1")


def test_an_unknown_module_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        GradleakError,
        match=r"Unknown module 'querry' \(did you mean 'query'\?\)\. Modules: query, key, value, ",
    ):
        check_modules(["query", "querry"])
