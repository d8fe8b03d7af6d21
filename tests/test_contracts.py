"""What every registered component promises. A new one is checked here without being told of."""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from gradleak.audit import AuditSpec
from gradleak.core.attack import Attack, Bench, ClientSetting, Reconstruction, TrainableAttack
from gradleak.core.batch import Batch, Example, PrivateBatch
from gradleak.core.defense import Defense
from gradleak.core.errors import GradleakError
from gradleak.core.metric import Metric, Pair, Text
from gradleak.core.observation import Fact, Observation, View
from gradleak.core.prior import PriorSpec
from gradleak.core.protocol import Protocol
from gradleak.core.registry import KINDS, Component, find, list_registered
from gradleak.core.specs import from_dict, from_string, to_dict, to_string
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.defenses.gaussian_noise import GaussianNoise
from gradleak.matching import L2L1, Cosine, Distance, SquaredL2, for_observations
from gradleak.priors.english import English, FrequentWords
from gradleak.targets.tiny import Tiny
from gradleak.views import Everything

EVERY = [cls for kind in KINDS for cls in list_registered(kind).values()]
TEXTS = [("the cat is red .", "my phone number is five ."), ("we owes the bank .", "she left")]
EQUAL = [("the cat is red .", "my dog was bad !"), ("he paid our doctor ?", "i saw the car soon")]


def named(cls: type[Component]) -> str:
    return f"{cls.kind}-{cls.name}"


def each(kind: str) -> Any:
    """Parametrises a test over a kind's components at their defaults; test_picture_contracts.py
    has those for pictures."""
    components = [
        cls()
        for cls in list_registered(kind).values()
        if not required(cls) and cls.medium != "image"
    ]
    return pytest.mark.parametrize(kind, components, ids=lambda component: component.name)


def required(cls: type[Component]) -> dict[str, Any]:
    """A value for every field without a default."""
    without = [
        field
        for field in dataclasses.fields(cls)
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    return {
        field.name: ("somewhere",) if "tuple" in str(field.type) else "somewhere"
        for field in without
    }


def test_there_is_something_of_every_kind() -> None:
    assert all(list_registered(kind) for kind in KINDS)


@pytest.mark.parametrize("cls", EVERY, ids=named)
def test_a_component_is_a_frozen_dataclass_with_a_sentence_and_typed_fields(
    cls: type[Component],
) -> None:
    assert cls.__dataclass_params__.frozen
    assert "__dataclass_params__" in vars(cls)
    assert cls.__doc__
    assert cls.__doc__.strip().split("\n\n")[0].endswith(".")
    assert not cls.__doc__.startswith(cls.__name__ + "(")
    hints = typing.get_type_hints(cls)
    assert all(hints[field.name] is not Any for field in dataclasses.fields(cls))
    assert find(cls.kind, cls.name) is cls


@pytest.mark.parametrize("cls", EVERY, ids=named)
def test_a_component_is_its_configuration(cls: type[Component]) -> None:
    component = cls(**required(cls))
    assert component == cls(**required(cls))
    assert hash(component) == hash(cls(**required(cls)))
    assert (
        from_dict(cls.kind, to_dict(component))
        == component
        == from_string(cls.kind, to_string(component))
    )


# Defenses


def three_clients(
    target: Target, make_private: Callable[..., PrivateBatch], per_example: bool
) -> Update:
    batches = [
        make_private(target, texts).batch
        for texts in (*EQUAL, ("she sold my car soon", "the cat is red ."))
    ]
    stacked = Batch(
        ids=torch.stack([batch.ids for batch in batches]),
        mask=torch.stack([batch.mask for batch in batches]),
        labels=torch.stack([batch.labels for batch in batches]),
    )
    return (
        list_registered("protocol")["fedsgd"]()
        .update(target, stacked, per_example=per_example)
        .detached_clone()
    )


def protected(defense: Defense, update: Update, clients: Sequence[int]) -> Update:
    chosen = Update(
        {name: tensor[list(clients)] for name, tensor in update.tensors.items()}, update.per_example
    )
    return defense.protect(chosen, [Streams.root("client", 0).child(client) for client in clients])


@each("defense")
def test_a_defense_keeps_names_and_shapes_and_leaves_its_input_alone(
    tiny: Target, make_private: Callable[..., PrivateBatch], defense: Defense
) -> None:
    update = three_clients(tiny, make_private, defense.wants_per_example)
    before = update.detached_clone()
    sent = protected(defense, update, range(3))
    assert {name: tensor.shape for name, tensor in sent.tensors.items()} == {
        name: (3, *parameter.shape) for name, parameter in tiny.parameters.items()
    }
    assert all(
        tensor.isfinite().all() and tensor.dtype == tiny.dtype for tensor in sent.tensors.values()
    )
    assert all(torch.equal(update.tensors[name], tensor) for name, tensor in before.tensors.items())
    channel = defense.channel()
    errors = channel.errors(next(iter(sent.tensors.values())), 1)
    assert bool((errors >= 0).all()) and (
        not channel.every_entry or bool(errors.any()) is not channel.exact
    )


@each("defense")
def test_what_a_client_sends_does_not_depend_on_the_others(
    tiny: Target, make_private: Callable[..., PrivateBatch], defense: Defense
) -> None:
    update = three_clients(tiny, make_private, defense.wants_per_example)
    together, again = (protected(defense, update, range(3)) for _ in range(2))
    for client in range(3):
        alone = protected(defense, update, [client])
        for name, tensor in alone.tensors.items():
            assert torch.equal(tensor[0], together.tensors[name][client])
    assert all(
        torch.equal(tensor, again.tensors[name]) for name, tensor in together.tensors.items()
    )


def test_noise_of_no_strength_changes_nothing(
    tiny: Target, make_private: Callable[..., PrivateBatch]
) -> None:
    update = three_clients(tiny, make_private, per_example=False)
    silent = protected(GaussianNoise(0.0), update, range(3))
    assert all(torch.equal(tensor, silent.tensors[name]) for name, tensor in update.tensors.items())


def test_noise_has_the_spread_it_says_and_is_another_for_each_client_and_tensor(
    tiny: Target,
) -> None:
    nothing = Update({"a": torch.zeros(2, 100, 100), "b": torch.zeros(2, 100, 100)})
    drawn = protected(GaussianNoise(0.5), nothing, range(2)).tensors
    rows = torch.stack([drawn[name][client].flatten() for name in "ab" for client in range(2)])
    torch.testing.assert_close(rows.std(dim=1), torch.full((4,), 0.5), rtol=0.05, atol=0)
    assert float((torch.corrcoef(rows) - torch.eye(4)).abs().max()) < 0.05


# Protocols and views


@each("protocol")
@each("view")
@pytest.mark.parametrize("distance", [Cosine(), SquaredL2(), L2L1()], ids=repr)
@pytest.mark.parametrize(
    ("architecture", "texts"), [("Bert", TEXTS), ("GPT2", EQUAL)], ids=["Bert", "GPT2"]
)
def test_the_fast_matcher_and_the_simulated_client_agree(
    random_target: Callable[..., Target],
    observe: Callable[..., Observation],
    make_private: Callable[..., PrivateBatch],
    add_axes: Callable[[Batch, int], Batch],
    architecture: str,
    texts: list[tuple[str, ...]],
    distance: Distance,
    view: View,
    protocol: Protocol,
) -> None:
    target = random_target(architecture, torch.float64)
    observation = observe(target, texts[0], protocol=protocol, view=view)
    other = make_private(target, texts[1][::-1] if architecture == "Bert" else texts[1]).batch
    fast, slow = (
        for_observations([observation], distance, plain=plain).distances(add_axes(other, 2))
        for plain in (False, True)
    )
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=0)
    assert float(fast) > 0


@each("protocol")
@each("view")
@pytest.mark.parametrize("distance", [Cosine(), SquaredL2(), L2L1()], ids=repr)
def test_they_agree_on_a_language_model(
    causal: Target,
    observe: Callable[..., Observation],
    make_private: Callable[..., PrivateBatch],
    add_axes: Callable[[Batch, int], Batch],
    distance: Distance,
    view: View,
    protocol: Protocol,
) -> None:
    observation, other = (
        observe(causal, TEXTS[0], protocol=protocol, view=view),
        make_private(causal, TEXTS[1][::-1]).batch,
    )
    fast, slow = (
        for_observations([observation], distance, plain=plain).distances(add_axes(other, 2))
        for plain in (False, True)
    )
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=0)
    assert float(fast) > 0


@each("protocol")
def test_a_protocol_treats_clients_apart_and_examples_alike(
    tiny64: Target,
    make_private: Callable[..., PrivateBatch],
    add_axes: Callable[[Batch, int], Batch],
    protocol: Protocol,
) -> None:
    batch = make_private(tiny64, TEXTS[0]).batch
    turned = Batch(ids=batch.ids.flip(0), mask=batch.mask.flip(0), labels=batch.labels.flip(0))
    both = Batch(
        **{
            part: torch.stack([getattr(batch, part), getattr(turned, part)])
            for part in ("ids", "mask", "labels")
        }
    )
    together, alone = protocol.update(tiny64, both), protocol.update(tiny64, add_axes(batch, 1))
    assert together.clients == 2
    assert set(together.tensors) == set(tiny64.parameters)
    for name, tensor in alone.tensors.items():
        torch.testing.assert_close(together.tensors[name][0], tensor[0], rtol=1e-9, atol=1e-12)
    if protocol.one_gradient:  # the mean knows no order
        for tensor in together.tensors.values():
            torch.testing.assert_close(tensor[0], tensor[1], rtol=1e-9, atol=1e-12)


@each("view")
def test_a_view_shows_parameters_that_are_sent(tiny: Target, view: View) -> None:
    visible = view.visible(tiny)
    assert visible
    assert len(set(visible)) == len(visible)
    assert set(visible) <= set(tiny.parameters)


# Attacks and priors


# These minimise no number that could be taken at the truth: they guess without the update, compute
# the answer, or have learnt it
WITHOUT_OBJECTIVE = ("blind", "lti", "lti_p", "lti_plus", "span")
SHORT = {
    "steps": 3,
    "starts": 2,
    "restarts": 1,
    "sweeps": 1,
    "proposals": 8,
    "polish_rounds": 1,
    # tests/attacks/test_lamp.py makes the same promise for it, on shorter sentences
    "word_sweeps": 0,
    "word_restarts": 0,
    "orders": 8,
    "repeats": 4,
    "beams": 2,
    "climbs": 3,
    "patience": 4,
    "probe_steps": 1,
    "training_batch": 2,
    "first_width": 8,
    "token_width": 8,
}


def quick(attack: Attack) -> Attack:
    """The same attack with very few steps and candidates."""
    fields = {field.name for field in dataclasses.fields(attack)}
    return dataclasses.replace(
        attack, **{name: value for name, value in SHORT.items() if name in fields}
    )


def attacked(attack: Attack, observations: Sequence[Observation]) -> list[Reconstruction]:
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(observations[0].target))
    ready = quick(attack)
    if isinstance(ready, TrainableAttack):
        target = observations[0].target
        setting = ClientSetting(
            Tiny(), target, observations[0].protocol, (), Everything(), observations[0].batch_size
        )
        ready = ready.fit(setting, [Example(text, 0) for texts in EQUAL for text in texts], bench)
    return ready.reconstruct(
        [one.limit_to(attack.requires | {Fact.DEFENSE}) for one in observations], bench
    )


@pytest.fixture(scope="module")
def observations(tiny64: Target, observe: Callable[..., Observation]) -> list[Observation]:
    return [observe(tiny64, texts, index=index) for index, texts in enumerate(TEXTS)]


@each("attack")
def test_an_attack_gives_a_reconstruction_for_each_observation(
    attack: Attack, observations: list[Observation]
) -> None:
    found = attacked(attack, observations)
    assert len(found) == len(observations)
    for guess, observation in zip(found, observations, strict=True):
        if Fact.LENGTHS in attack.requires:
            assert tuple(map(len, guess.sentences)) == observation.knows.lengths
        words = len(observation.target.vocabulary.allowed)
        assert all(0 <= token < words for sentence in guess.sentences for token in sentence)
        assert guess.loss is None or guess.loss == guess.loss


@each("attack")
def test_a_result_depends_on_its_own_observation_only(
    attack: Attack, observations: list[Observation]
) -> None:
    together = attacked(attack, observations)
    assert [guess.sentences for guess in attacked(attack, observations[::-1])[::-1]] == [
        guess.sentences for guess in together
    ]
    for observation, guess in zip(observations, together, strict=True):
        (alone,) = attacked(attack, [observation])
        assert alone.sentences == guess.sentences
        assert alone.labels == guess.labels
        assert alone.loss == (None if guess.loss is None else pytest.approx(guess.loss, rel=1e-9))


@each("attack")
def test_an_objective_is_one_finite_number_an_observation_and_least_at_the_truth(
    attack: Attack, observations: list[Observation], make_private: Callable[..., PrivateBatch]
) -> None:
    target = observations[0].target
    truths = [make_private(target, texts).batch for texts in TEXTS]
    at_truth = attack.objective(observations, truths)
    assert (at_truth is None) is (attack.name in WITHOUT_OBJECTIVE)
    if at_truth is None:
        return
    wrong = [
        Batch(ids=batch.ids.roll(1, dims=1), mask=batch.mask, labels=batch.labels)
        for batch in truths
    ]
    elsewhere = attack.objective(observations, wrong)
    assert at_truth.shape == elsewhere.shape == (2,)
    assert bool(at_truth.isfinite().all() and elsewhere.isfinite().all())
    assert bool((at_truth < elsewhere).all())


@each("attack")
def test_knowledge_an_attack_requires_and_is_not_granted_is_refused_by_name(attack: Attack) -> None:
    for fact in attack.requires:
        granted = [str(other) for other in Fact if other != fact]
        with pytest.raises(
            GradleakError,
            match=rf"{attack.name} requires {fact}; this audit grants .*Add --know {fact}",
        ):
            AuditSpec.from_plain(
                {"target": "tiny", "attacks": [to_string(attack)], "know": granted}
            )
    AuditSpec.from_plain(
        {"target": "tiny", "attacks": [to_string(attack)], "know": sorted(attack.requires)}
    )


@each("prior")
@pytest.mark.parametrize("length", [2, 3, 12, 60])
def test_a_prior_says_a_sentence_of_the_length_asked(
    tiny: Target, prior: PriorSpec, length: int
) -> None:
    if isinstance(prior, English):  # it speaks one vocabulary, and says what to use instead
        with pytest.raises(GradleakError, match="use --prior"):
            prior.open(tiny)
        return
    opened = prior.open(tiny)
    sentence = opened.likely(length, Streams.root("contracts", 0))
    assert sentence == opened.likely(length, Streams.root("contracts", 0))
    score = opened.nll(torch.tensor([sentence, sentence]), torch.tensor([length, length]))
    assert bool(torch.isfinite(score).all()) and float(score[0]) == float(score[1])
    frame, fixed = tiny.vocabulary.frame(length)
    assert [token for token, special in zip(sentence, fixed, strict=True) if special] == [
        token for token, special in zip(frame, fixed, strict=True) if special
    ]
    inside = [token for token, special in zip(sentence, fixed, strict=True) if not special]
    assert all(bool(tiny.vocabulary.allowed[token]) for token in inside)
    assert opened.likely_length() > sum(fixed)
    streams = [Streams.root("contracts", seed) for seed in range(3)]
    drawn = opened.draw([length, length + 1, length], streams)
    assert [len(one) for one in drawn] == [length, length + 1, length]
    assert drawn == [opened.draw([len(one)], [streams[seed]])[0] for seed, one in enumerate(drawn)]
    for one in (drawn[0], drawn[2]):
        assert all(one[place] == frame[place] for place in range(length) if fixed[place])
        assert all(
            bool(tiny.vocabulary.allowed[token])
            for token, special in zip(one, fixed, strict=True)
            if not special
        )
    assert drawn[0] != drawn[2] or sum(fixed) == length or length == 3


# Metrics


def sentence(target: Target, text: str) -> Text:
    (ids,) = target.encode([text])
    return Text(
        text=target.decode(ids), legacy=target.decode(ids, keep_special=True), ids=tuple(ids[1:-1])
    )


@each("metric")
def test_the_right_guess_scores_best_and_none_better(tiny: Target, metric: Metric) -> None:
    secret = sentence(tiny, "my phone number is five five zero one .")
    guesses = [
        "my phone number is five five zero one .",
        "my phone number is red .",
        "the cat is not here",
        "a",
    ]
    pairs = [
        Pair(secret, sentence(tiny, guess), marked=("five five zero one",)) for guess in guesses
    ]
    try:
        values = metric.values(pairs)
    except GradleakError as error:
        pytest.skip(str(error))  # a model that is not installed
    right, *others = values
    worse = [
        (right - other) if metric.direction == "higher" else (other - right) for other in others
    ]
    assert len(values) == len(pairs)
    assert min(worse) >= 0
    assert max(worse) > 0
    assert metric.direction in ("higher", "lower")
    assert metric.unit
    assert metric.chance
    if metric.unit == "fraction":
        assert right == pytest.approx(1.0 if metric.direction == "higher" else 0.0)
        assert all(0 <= value <= 1 for value in values)


@each("metric")
def test_a_metric_of_no_pairs_is_no_values(metric: Metric) -> None:
    assert metric.values([]) == []
