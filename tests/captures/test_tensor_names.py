"""Names that were sent find the model's: through every wrapper, under ties, and without names."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradleak.captures import CaptureError, match_names
from gradleak.captures.tensor_names import strip_wrappers

MODEL = {
    "bert.embeddings.word_embeddings.weight": (9, 4),
    "bert.encoder.layer.0.attention.self.query.weight": (4, 4),
    "bert.encoder.layer.1.attention.self.query.weight": (4, 4),
    "classifier.weight": (2, 4),
    "classifier.bias": (2,),
}
LEADING = ("module.", "_module.", "_orig_mod.", "base_model.model.")
INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module",
          "modules_to_save.default", "default", "base_layer")  # fmt: skip


def test_a_models_own_names_are_its_own_and_missing_ones_are_a_view() -> None:
    seen = {name: MODEL[name] for name in list(MODEL)[1:3]}
    assert match_names(seen, MODEL) == {name: name for name in seen}


@pytest.mark.parametrize("wrappers", itertools.permutations(LEADING), ids="".join)
def test_wrappers_come_off_in_any_order(wrappers: tuple[str, ...]) -> None:
    sent = {"".join(wrappers) + name: shape for name, shape in MODEL.items()}
    assert list(match_names(sent, MODEL).values()) == list(MODEL)
    assert list(match_names(MODEL, sent).values()) == list(sent)  # the model may be the wrapped one


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_wrappers_within_a_name_come_off_too(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(MODEL)))
    wrapped = ".".join(
        part
        for word in name.split(".")
        for part in (*data.draw(st.lists(st.sampled_from(INSIDE), max_size=2)), word)
    )
    prefix = "".join(data.draw(st.lists(st.sampled_from(LEADING), max_size=3)))
    assert match_names({prefix + wrapped: MODEL[name]}, MODEL) == {prefix + wrapped: name}


def test_names_of_real_wrappers_come_off() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    wrapped = torch.compile(nn.DataParallel(torch.compile(model)))
    assert isinstance(wrapped, nn.Module)
    sent = shapes(wrapped)
    assert sent.keys() != shapes(model).keys()
    assert list(match_names(sent, shapes(model)).values()) == list(shapes(model))


def test_an_adapters_name_stays_apart_from_what_it_adapts() -> None:
    model = {
        "base_model.model.bert.query.base_layer.weight": (4, 4),
        "base_model.model.bert.query.lora_A.default.weight": (2, 4),
        "base_model.model.bert.query.lora_B.default.weight": (4, 2),
        "base_model.model.classifier.original_module.weight": (2, 4),
        "base_model.model.classifier.modules_to_save.default.weight": (2, 4),
    }
    sent = {strip_wrappers(name): shape for name, shape in model.items()}
    assert list(match_names(sent, model).values()) == list(model)


def test_a_part_of_a_model_that_is_called_as_a_wrapper_ends_is_kept() -> None:
    assert strip_wrappers("default") == "default"
    assert strip_wrappers("a.model.base_model.model.b") == "a.model.base_model.model.b"


@pytest.mark.parametrize("head", ["lm_head.weight", "module.lm_head.weight"])
def test_a_tied_head_is_the_word_embedding_and_the_other_way_round(head: str) -> None:
    words = "transformer.wte.weight"
    assert match_names({head: (9, 4)}, {words: (9, 4), "transformer.ln_f.bias": (4,)}) == {
        head: words
    }
    assert match_names({words: (9, 4), head: (9, 4)}, {words: (9, 4)}) == {
        words: words,
        head: words,
    }
    assert match_names({words: (9, 4)}, {head: (9, 4)}) == {words: head}


def test_a_head_of_its_own_is_not_the_word_embedding() -> None:
    model = {"model.embed_tokens.weight": (9, 4), "lm_head.weight": (9, 4)}
    assert match_names(model, model) == {name: name for name in model}


@pytest.mark.parametrize("name", ["GPT2LMHead", "BertForMaskedLM", "T5ForConditionalGeneration"])
def test_the_state_of_a_tied_model_matches_its_parameters(name: str) -> None:
    model = small_model(name)
    state = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    own = shapes(model)
    matched = match_names(state, own)
    assert len(state) > len(own)
    assert set(matched.values()) == set(own)
    named = dict(model.named_parameters(remove_duplicate=False))
    assert all(named[sent] is named[found] for sent, found in matched.items())


def test_further_names_of_a_models_own_are_taken() -> None:
    with pytest.raises(CaptureError, match="“out.weight” is no tensor of the model"):
        match_names({"out.weight": (9, 4)}, {"words.weight": (9, 4)})
    aliases = {"out.weight": "words.weight"}
    assert match_names({"module.out.weight": (9, 4)}, {"words.weight": (9, 4)}, aliases) == {
        "module.out.weight": "words.weight"
    }


def test_arrays_without_names_are_in_the_models_order_however_they_are_sorted() -> None:
    model = {f"layer.{number}.bias": (number + 1,) for number in range(12)}
    sent = {str(number): (number + 1,) for number in sorted(range(12), key=str)}
    assert [sent["10"], match_names(sent, model)["10"]] == [(11,), "layer.10.bias"]
    assert match_names(sent, model)["2"] == "layer.2.bias"


def test_a_list_that_ends_with_a_tied_head_is_a_state_dict() -> None:
    model = {"transformer.wte.weight": (9, 4), "transformer.ln_f.bias": (4,)}
    sent = {"0": (9, 4), "1": (4,), "2": (9, 4)}
    assert match_names(sent, model)["2"] == "transformer.wte.weight"


def test_names_that_are_numbers_are_names_where_the_model_has_them() -> None:
    model = {"0": (2,), "1": (2,), "2": (2,)}
    assert match_names({"2": (2,)}, model) == {"2": "2"}


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"pooler.weight": (4, 4)}, "“pooler.weight” is no tensor of the model"),
        ({"module.clasifier.bias": (2,)}, r"did you mean 'classifier.bias'\?"),
        ({"classifier.bias": (3,)}, "“classifier.bias” has the shape 3 and the model's"),
        ({"classifier.bias": ()}, "has the shape of one number"),
        ({"module.classifier.bias": (2,), "classifier.bias": (2,)}, "keep one of them"),
        ({"0": (9, 4), "1": (4, 4)}, "2 tensors without names and the model 5"),
        ({"0": (9, 4), "2": (4, 4)}, "numbered with gaps"),
        ({"0": (9, 4), "00": (4, 4)}, "numbered with gaps or twice"),
        ({str(at): (9, 4) for at in range(5)}, "the update's “1” has the shape 9 × 4"),
        ({str(at): (9, 4) for at in range(9)}, "9 tensors without names and the model 5"),
        ({"²": (9, 4)}, "“²” is no tensor"),
    ],
)
def test_what_does_not_fit_is_a_sentence_that_names_both_sides(
    sent: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(CaptureError, match=said):
        match_names(sent, MODEL)


def test_a_name_that_may_be_two_of_the_models_is_refused() -> None:
    model = {"a.default.weight": (2,), "a.module.weight": (2,)}
    assert match_names({"a.default.weight": (2,)}, model) == {
        "a.default.weight": "a.default.weight"
    }
    with pytest.raises(CaptureError, match="may be the model's “a.default.weight” or"):
        match_names({"a.weight": (2,)}, model)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(CaptureError, match="no parameters to match"):
        match_names({"w": (2,)}, {})


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def small_model(name: str) -> Any:
    import transformers

    if name == "GPT2LMHead":
        config = transformers.GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)
        return transformers.GPT2LMHeadModel(config)
    if name == "BertForMaskedLM":
        return transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=9,
                hidden_size=4,
                num_hidden_layers=1,
                num_attention_heads=1,
                intermediate_size=4,
            )
        )
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=9, d_model=4, d_kv=4, d_ff=4, num_layers=1, num_heads=1)
    )
