"""What every registered component promises. A new one is checked here without being told of.

The promises are in gradleak.audit.contracts, by which users check components of their own.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gradleak.audit.contracts import (
    OF_EVERY,
    BrokenContract,
    Contract,
    Ground,
    list_contracts,
    prepare_ground,
)
from gradleak.core.attack import Attack
from gradleak.core.batch import Batch, PrivateBatch
from gradleak.core.defense import Defense
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation, View
from gradleak.core.protocol import Protocol
from gradleak.core.registry import KINDS, Component, list_registered
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.matching import L2L1, Cosine, Distance, SquaredL2, for_observations
from gradleak.priors.english import English

EVERY = [cls for kind in KINDS for cls in list_registered(kind).values()]
TEXTS = [("the cat is red .", "my phone number is five ."), ("we owes the bank .", "she left")]
EQUAL = [("the cat is red .", "my dog was bad !"), ("he paid our doctor ?", "i saw the car soon")]
# These minimise no number that could be taken at the truth: they guess without the update, compute
# the answer, or have learnt it
WITHOUT_OBJECTIVE = ("blind", "lti", "lti_p", "lti_plus", "span")


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


@pytest.fixture(scope="module")
def ground() -> Ground:
    return prepare_ground()


def list_promises() -> Iterator[Any]:
    """Every contract with every component that it is of; those that want a value of the user's
    are tried on what all components promise."""
    for cls in EVERY:
        component = cls(**required(cls))
        for contract in OF_EVERY if required(cls) else list_contracts(component):
            name = f"{cls.kind}-{cls.name}-{contract.__name__}"
            yield pytest.param(contract, component, id=name)


def test_there_is_something_of_every_kind() -> None:
    assert all(list_registered(kind) for kind in KINDS)


@pytest.mark.parametrize(("contract", "component"), list_promises())
def test_every_component_keeps_its_contracts(
    contract: Contract, component: Component, ground: Ground
) -> None:
    try:
        contract(component, ground)
    except BrokenContract:
        raise
    except GradleakError as error:
        pytest.skip(str(error))  # a model that is not installed, or of another vocabulary


def test_the_shipped_prior_says_what_to_use_with_another_vocabulary(tiny: Target) -> None:
    with pytest.raises(GradleakError, match="use --prior"):
        English().open(tiny)


@each("attack")
def test_those_without_an_objective_are_known(attack: Attack, ground: Ground) -> None:
    at_truth = attack.objective(ground.observations, [one.batch for one in ground.private])
    assert (at_truth is None) is (attack.name in WITHOUT_OBJECTIVE)


# Defenses


def three_clients(target: Target, make_private: Callable[..., PrivateBatch]) -> Update:
    batches = [
        make_private(target, texts).batch
        for texts in (*EQUAL, ("she sold my car soon", "the cat is red ."))
    ]
    stacked = Batch(
        ids=torch.stack([batch.ids for batch in batches]),
        mask=torch.stack([batch.mask for batch in batches]),
        labels=torch.stack([batch.labels for batch in batches]),
    )
    return list_registered("protocol")["fedsgd"]().update(target, stacked).detached_clone()


def protected(defense: Defense, update: Update) -> Update:
    clients = range(update.clients)
    return defense.protect(update, [Streams.root("client", 0).child(client) for client in clients])


def test_noise_of_no_strength_changes_nothing(
    tiny: Target, make_private: Callable[..., PrivateBatch]
) -> None:
    update = three_clients(tiny, make_private)
    silent = protected(GaussianNoise(0.0), update)
    assert all(torch.equal(tensor, silent.tensors[name]) for name, tensor in update.tensors.items())


def test_noise_has_the_spread_it_says_and_is_another_for_each_client_and_tensor(
    tiny: Target,
) -> None:
    nothing = Update({"a": torch.zeros(2, 100, 100), "b": torch.zeros(2, 100, 100)})
    drawn = protected(GaussianNoise(0.5), nothing).tensors
    rows = torch.stack([drawn[name][client].flatten() for name in "ab" for client in range(2)])
    torch.testing.assert_close(rows.std(dim=1), torch.full((4,), 0.5), rtol=0.05, atol=0)
    assert float((torch.corrcoef(rows) - torch.eye(4)).abs().max()) < 0.05


# Protocols and views, as the engine knows them


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
