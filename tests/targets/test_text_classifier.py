"""Labels by the names that a model gives its classes, and what is said of others."""

from types import SimpleNamespace

import pytest

from gradleak.core.batch import ClassNumber, Example
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.targets.class_names import ClassNames
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.tiny import Tiny, tiny_tokenizer


def names(*given: str) -> ClassNames:
    numbers = {name: number for number, name in enumerate(given)}
    config = SimpleNamespace(
        num_labels=len(given),
        id2label={number: name for name, number in numbers.items()},
        label2id=numbers,
    )
    return ClassNames.of_config("./clf", config)


def test_a_label_is_a_name_of_the_model_or_a_number() -> None:
    mood = names("Angry", "calm", "glad")
    assert [mood.class_of(label) for label in ("glad", "Angry", 1)] == [2, 0, 1]


def test_case_is_as_given_and_an_unknown_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(
        GradleakError,
        match=r"label 'angry' is not known to ./clf .did you mean 'Angry'.*knows 'Angry', 'calm'",
    ):
        names("Angry", "calm").class_of("angry")
    with pytest.raises(
        GradleakError,
        match="label 2 is outside the 2 classes of ./clf: use labels 0 to 1 or its names 'Angry'",
    ):
        names("Angry", "calm").class_of(2)


def test_where_nobody_named_the_classes_the_ways_out_are_said() -> None:
    unnamed = names("LABEL_0", "LABEL_1")
    assert unnamed.class_of("LABEL_1") == 1
    with pytest.raises(
        GradleakError,
        match=r"label 'good' is a name.*numbered classes only.*labels=\[first,second\].*label2id",
    ):
        unnamed.class_of("good")


def test_where_names_are_numbers_a_number_is_a_name() -> None:
    stars = names("1", "2", "3")
    assert [stars.class_of(label) for label in (1, "3")] == [0, 2]
    with pytest.raises(GradleakError, match="label '0' is not known"):
        stars.class_of(0)


def test_a_class_that_the_data_has_numbered_is_no_name() -> None:
    stars = names("1", "2", "3")
    assert [stars.class_of(ClassNumber(place)) for place in range(3)] == [0, 1, 2]


def test_a_classifier_reads_labels_through_label2id(tiny: Target) -> None:
    model = Tiny().open(tiny.device).module
    model.config.label2id, model.config.id2label = {"no": 1, "yes": 0}, {1: "no", 0: "yes"}
    target = TextClassifier("clf", model, tiny_tokenizer())
    private = target.private_batch(
        [Example("the cat", "no"), Example("the dog", "yes"), Example("a car", 1)]
    )
    assert private.batch.labels.tolist() == [1, 0, 1]
    with pytest.raises(GradleakError, match="notes.csv, line 4: label 'No' is not known"):
        target.private_batch([Example("the cat", "No", where="notes.csv, line 4")])
