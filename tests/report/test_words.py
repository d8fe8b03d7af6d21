"""Words of a guess are coloured by what they give away."""

from gradleak.report.shown_guesses import WordMark, colour_words, make_printable, mark_words


def marks(secret: str, guess: str) -> list[WordMark]:
    return [mark for _, mark in mark_words(secret, guess)]


def test_a_right_word_next_to_its_neighbour_is_a_pair_and_elsewhere_a_word() -> None:
    assert marks("my pin is four", "is four dog my") == [
        WordMark.PAIR,
        WordMark.PAIR,
        WordMark.WRONG,
        WordMark.WORD,
    ]


def test_case_and_punctuation_do_not_matter() -> None:
    assert marks("My PIN: 4471.", "my pin 4471") == [WordMark.PAIR] * 3


def test_a_word_of_the_secret_is_spent_once() -> None:
    assert marks("call me now", "me me me") == [WordMark.WORD, WordMark.WRONG, WordMark.WRONG]
    assert marks("a b a", "a b a b a") == [
        WordMark.PAIR,
        WordMark.PAIR,
        WordMark.PAIR,
        WordMark.WRONG,
        WordMark.WRONG,
    ]


def test_an_exact_guess_of_one_word_is_green_though_it_has_no_pair() -> None:
    assert marks("asthma", "asthma") == [WordMark.PAIR]


def test_an_empty_guess_has_no_words() -> None:
    assert marks("a b", "") == []


def test_colours_lie_on_the_words_of_the_guess_as_written() -> None:
    text = colour_words("my pin is four", "Is four, dog my!")
    assert text.plain == "Is four, dog my!"
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert {word: style.split()[-1] for word, style in styles.items()} == {
        "Is": "green",
        "four": "green",
        "dog": "dim",
        "my": "yellow",
    }


def test_a_text_cannot_drive_the_terminal() -> None:
    assert "\x1b" not in make_printable("a\x1b[31mb\r\nc")
