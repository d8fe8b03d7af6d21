"""The shipped sentences: made up, marked, balanced."""

import pytest

from gradleak.core.errors import GradleakError
from gradleak.datasets import Canaries


def test_there_are_enough_and_at_least_half_carry_a_secret() -> None:
    examples = Canaries().load()
    assert len(examples) >= 220
    assert len(Canaries(secrets_only=True).load()) >= len(examples) / 2


def test_secrets_only_keeps_the_order_and_drops_the_rest() -> None:
    assert Canaries(secrets_only=True).load() == [
        example for example in Canaries().load() if example.secrets
    ]


def test_every_sentence_is_plain_unique_and_of_3_to_30_words() -> None:
    texts = [example.text for example in Canaries().load()]
    assert len(set(texts)) == len(texts)
    assert all(text.isascii() and text == text.strip() for text in texts)
    assert all(3 <= len(text.split()) <= 30 for text in texts)


def test_marked_spans_are_whole_words_of_the_text() -> None:
    for example in Canaries().load():
        for start, end in example.secrets:
            secret, around = (
                example.text[start:end],
                example.text[start - 1 : start] + example.text[end : end + 1],
            )
            assert secret == secret.strip() and not any(letter.isalnum() for letter in around), (
                example.text
            )


def test_labels_are_balanced_among_all_and_among_those_with_secrets() -> None:
    for secrets_only in (False, True):
        labels = [example.label for example in Canaries(secrets_only).load()]
        assert (
            set(labels) == {0, 1}
            and 0.4 <= sum(label == 1 for label in labels) / len(labels) <= 0.6
        )


def test_the_first_eight_are_short_and_carry_secrets() -> None:
    assert all(
        5 <= len(example.text.split()) <= 9 and example.secrets for example in Canaries().load(8)
    )


def test_phone_numbers_and_mail_addresses_belong_to_nobody() -> None:
    for example in Canaries().load():
        for word in example.text.split():
            assert "@" not in word or word.split("@")[1].startswith("example."), example.text
            assert not word.startswith("555-") or word.startswith("555-01"), example.text


def test_canaries_may_be_shown() -> None:
    assert Canaries.made_up


def test_asking_for_too_many_says_how_many_there_are() -> None:
    with pytest.raises(
        GradleakError,
        match=rf"9999 examples were asked of canaries, which has {len(Canaries().load())}",
    ):
        Canaries().load(9999)
    with pytest.raises(GradleakError, match="at least 1"):
        Canaries().load(0)
