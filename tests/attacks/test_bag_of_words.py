"""Known words, unknown order."""

from collections.abc import Callable, Sequence

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.bag_of_words import BagOfWords, find_spare, read_bag
from gradleak.attacks.recipes.baselines import Tag
from gradleak.attacks.search.hypotheses import Hypothesis, pair_labels
from gradleak.attacks.search.likelihood import order_by_prior
from gradleak.core.attack import Attack, Bench
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.prior import Prior
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.priors.english import FrequentWords
from gradleak.targets.tiny import TinyCausal
from gradleak.views import Lamp

Observe = Callable[..., Observation]
QUICK = BagOfWords(steps=12, orders=60, repeats=20)
TEXTS = ("my phone number is five zero one .", "she never paid the bank again")


def attacked(
    attack: Attack, observations: Sequence[Observation]
) -> list[tuple[tuple[int, ...], ...]]:
    bench = Bench(Streams.root("attacker", 3), FrequentWords().open(observations[0].target))
    return [
        found.sentences
        for found in attack.reconstruct(
            [one.limit_to(attack.requires) for one in observations], bench
        )
    ]


def right_places(
    target: Target, texts: Sequence[str], guesses: Sequence[tuple[tuple[int, ...], ...]]
) -> int:
    pairs = zip(target.encode(texts), guesses, strict=True)
    return sum(
        one == other for secret, (guess,) in pairs for one, other in zip(secret, guess, strict=True)
    )


def test_it_finds_more_in_a_few_rounds_than_tag_in_many_steps(
    tiny: Target, observe: Observe
) -> None:
    seen = [observe(tiny, [text], [1], index=index) for index, text in enumerate(TEXTS)]
    ours, theirs = (
        right_places(tiny, TEXTS, attacked(attack, seen)) for attack in (QUICK, Tag(steps=40))
    )
    assert ours > theirs
    assert ours == sum(map(len, tiny.encode(TEXTS)))  # all of it, in fact


def test_every_word_of_the_bag_is_used_and_no_other(tiny: Target, observe: Observe) -> None:
    seen = observe(tiny, ["the cat and the dog and the car", "my cat is red"])
    (found,) = attacked(BagOfWords(steps=2, orders=20, repeats=10), [seen])
    words = {token for sentence in found for token in sentence} - set(tiny.vocabulary.specials)
    assert words == set(read_bag(seen))


def test_an_unknown_word_is_in_the_bag(tiny: Target, observe: Observe) -> None:
    unknown = tiny.encode(["☂"])[0][1]
    assert unknown in read_bag(observe(tiny, ["the cat ☂ red ."]))


def test_words_that_cannot_be_seen_are_refused_with_the_way_out(
    tiny: Target, observe: Observe
) -> None:
    with pytest.raises(
        GradleakError,
        match="which is not visible: let them train and choose a view that shows them",
    ):
        attacked(QUICK, [observe(tiny, TEXTS[:1], view=Lamp())])


def test_a_language_model_with_tied_words_is_attacked_by_what_stands_out(observe: Observe) -> None:
    target = TinyCausal().open(torch.device("cpu"))
    (found,) = attacked(
        BagOfWords(steps=12, orders=60, repeats=60), [observe(target, ["the cat is red ."])]
    )
    assert found == (tuple(target.encode(["the cat is red ."])[0]),)


class Alphabet(Prior):
    """Finds a text the likelier the fewer of its words stand before one of a smaller number."""

    def nll(
        self,
        ids: Int[Tensor, "sentences tokens"],
        lengths: Int[Tensor, "sentences"],  # noqa: F821
    ) -> Float[Tensor, "sentences"]:  # noqa: F821
        return (ids[:, 1:] < ids[:, :-1]).float().sum(1) / lengths

    def likely(self, length: int, streams: Streams) -> list[int]:
        raise NotImplementedError

    def draw(self, lengths: Sequence[int], streams: Sequence[Streams]) -> list[list[int]]:
        raise NotImplementedError

    def likely_length(self) -> int:
        raise NotImplementedError


def test_the_first_order_is_the_priors_and_holds_every_word(tiny: Target) -> None:
    words = [30, 12, 25, 40, 17]
    ((first, *inside, last),) = order_by_prior(Alphabet(), tiny, words, [8], beams=8)
    assert (first, last) == (*tiny.vocabulary.prefix, *tiny.vocabulary.suffix)
    assert inside == sorted(inside)
    assert set(inside) == set(words)
    two = order_by_prior(Alphabet(), tiny, words, [4, 5], beams=4)
    assert list(map(len, two)) == [4, 5]
    assert {word for sentence in two for word in sentence[1:-1]} == set(words)


def test_a_bag_that_does_not_fit_is_used_as_far_as_it_does(tiny: Target) -> None:
    ((_, *inside, _),) = order_by_prior(Alphabet(), tiny, [12, 17, 25, 30], [4], beams=4)
    assert len(set(inside)) == 2
    assert find_spare([12, 17], [12, 17, 25]) == [0, 1]


def test_only_words_that_are_there_twice_are_spare() -> None:
    assert find_spare([5, 6, 5, 7], [5, 6, 7]) == [0, 2]
    assert find_spare([5, 6], [5, 6]) == []


def test_labels_without_an_order_are_given_to_sentences_of_different_lengths_in_every_way() -> None:
    assert {one.labels for one in pair_labels(Hypothesis((0, 1), (5, 7)))} == {(0, 1), (1, 0)}
    assert len(pair_labels(Hypothesis((0, 1), (5, 5)))) == 1
    assert len(pair_labels(Hypothesis((0, 0, 1), (5, 5, 7)))) == 2
    assert len(pair_labels(Hypothesis((1, 1), (5, 7)))) == 1
    assert pair_labels(Hypothesis(None, (5, 7))) == [Hypothesis(None, (5, 7))]
    with pytest.raises(GradleakError, match="70 ways to give labels .* use labels=known"):
        pair_labels(Hypothesis((0, 1) * 4, tuple(range(5, 13))))
