"""What every component promises, whoever wrote it.

The tests hold ours to it, and `gradleak check-component` those of others. A contract is a function
whose docstring is the promise: it returns where that holds and raises a `BrokenContract` that says
how it does not.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradleak.audit.client import observe, private_batches
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack, Bench, ClientSetting, Reconstruction, TrainableAttack
from gradleak.core.batch import Batch, Example, PrivateBatch
from gradleak.core.defense import Defense
from gradleak.core.errors import GradleakError
from gradleak.core.metric import Metric, Pair, Text
from gradleak.core.observation import Fact, Observation, View
from gradleak.core.prior import PriorSpec
from gradleak.core.protocol import Protocol
from gradleak.core.registry import Component, find
from gradleak.core.specs import from_dict, from_string, list_fields, to_dict, to_string
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.priors.english import FrequentWords
from gradleak.targets.tiny import Tiny
from gradleak.views import Everything

TEXTS = (("the cat is red .", "my phone number is five ."), ("we owes the bank .", "she left"))
PUBLIC = ("the cat is red .", "my dog was bad !", "he paid our doctor ?", "i saw the car soon")
CLIENTS = (PUBLIC[:2], PUBLIC[2:], ("she sold my car soon", "the cat is red ."))
SECRET = "my phone number is five five zero one ."
GUESSES = (SECRET, "my phone number is red .", "the cat is not here", "a")
MARKED = ("five five zero one",)
LENGTHS = (2, 3, 12, 60)  # of the sentences that priors are asked for
# Fields of attacks by which a search is short, where an attack has them: contracts hold for any
SHORT = {
    **{"steps": 3, "starts": 2, "restarts": 1, "sweeps": 1, "proposals": 8, "polish_rounds": 1},
    **{"word_sweeps": 0, "word_restarts": 0, "orders": 8, "repeats": 4, "beams": 2},
    **{"climbs": 3, "patience": 4},
    **{"probe_steps": 1, "training_batch": 2, "first_width": 8, "token_width": 8},
}


class BrokenContract(GradleakError):
    """A component does not do what all of its kind promise."""


@dataclass(frozen=True, eq=False)
class Ground:
    """What components are tried on: a small random model in double precision, two clients'
    secrets and what the server sees of them."""

    target: Target
    private: tuple[PrivateBatch, ...]
    observations: tuple[Observation, ...]


Contract = Callable[[Any, Ground], None]


def prepare_ground() -> Ground:
    """Opens the model and plays the clients."""
    spec = AuditSpec.from_plain(
        {"target": "tiny", "attacks": ["blind"], "limit": 2, "batch_size": 2, "dtype": "float64"}
    )
    target = Tiny().open(torch.device("cpu"), torch.float64)
    examples = [Example(text, place) for texts in TEXTS for place, text in enumerate(texts)]
    private = tuple(private_batches(spec, target, examples))
    seen = tuple(observe(spec, target, one, index) for index, one in enumerate(private))
    return Ground(target, private, seen)


def list_contracts(component: Component) -> tuple[Contract, ...]:
    """Returns what a component promises; of those for pictures what all components do."""
    return OF_EVERY + (() if component.medium == "image" else OF_KIND.get(component.kind, ()))


# Of every component


def describe_itself(component: Component, ground: Ground) -> None:
    """It is a frozen dataclass with a docstring that is a sentence, and typed fields."""
    cls = type(component)
    params = vars(cls).get("__dataclass_params__")
    _hold(params is not None and params.frozen, "it is no frozen dataclass of its own")
    said = (cls.__doc__ or "").strip()
    _hold(
        bool(said) and not said.startswith(f"{cls.__name__}("),
        "it has no docstring, which gradleak list would show",
    )
    _hold(said.split("\n\n")[0].endswith("."), "its docstring does not begin with a sentence")
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        _hold(hints[field.name] is not Any, f"its field {field.name} has no type")
    _hold(find(cls.kind, cls.name) is cls, f"{cls.name} is the name of another {cls.kind}")


def be_its_configuration(component: Component, ground: Ground) -> None:
    """It can be written in a line and in a study, read again, and is then equal."""
    kind, line, described = component.kind, to_string(component), to_dict(component)
    _hold(from_string(kind, line) == component, f"{line} is read as another one")
    _hold(from_dict(kind, described) == component, f"{described} is read as another one")
    _hold(
        hash(from_string(kind, line)) == hash(component), "two that are equal have different hashes"
    )


# Defenses


def keep_the_form_of_an_update(defense: Defense, ground: Ground) -> None:
    """It keeps names and shapes, leaves its input alone, and its channel is of what it does."""
    update = _compute_update(defense, ground)
    before = update.detached_clone()
    sent = defense.protect(update, _streams(range(len(CLIENTS))))  # itself, and no copy of it
    for name, value in ground.target.parameters.items():
        _hold(name in sent.tensors, f"{name} is missing in what it sends")
        tensor = sent.tensors[name]
        _hold(
            tensor.shape == (len(CLIENTS), *value.shape) and tensor.dtype == value.dtype,
            f"{name} is sent with another shape or dtype",
        )
        _hold(bool(tensor.isfinite().all()), f"{name} is sent with NaN or infinity")
    _hold(len(sent.tensors) == len(ground.target.parameters), "it sends tensors that nobody has")
    for name, tensor in before.tensors.items():
        _hold(torch.equal(update.tensors[name], tensor), f"it changed {name} in place")
    channel = defense.channel()
    errors = channel.errors(next(iter(sent.tensors.values())), 1)
    _hold(bool((errors >= 0).all()), "its channel speaks of errors below zero")
    _hold(
        not channel.every_entry or bool(errors.any()) is not channel.exact,
        "its channel says both that entries are exact and that they are off",
    )


def treat_clients_apart(defense: Defense, ground: Ground) -> None:
    """What a client sends depends neither on the others nor on when it is asked."""
    update = _compute_update(defense, ground)
    clients = range(len(CLIENTS))
    together, again = (_protect(defense, update, clients) for _ in range(2))
    for name, tensor in together.tensors.items():
        _hold(
            torch.equal(tensor, again.tensors[name]),
            f"the same random streams give another {name} the second time",
        )
    for client in clients:
        for name, tensor in _protect(defense, update, [client]).tensors.items():
            _hold(
                torch.equal(tensor[0], together.tensors[name][client]),
                f"alone, client {client} sends another {name} than in company",
            )


def _compute_update(defense: Defense, ground: Ground) -> Update:
    batches = [
        ground.target.private_batch(
            [Example(text, place) for place, text in enumerate(texts)]
        ).batch
        for texts in CLIENTS
    ]
    protocol = AuditSpec.from_plain({"target": "tiny", "attacks": ["blind"]}).protocol
    return protocol.update(
        ground.target, _stack(batches), per_example=defense.wants_per_example
    ).detached_clone()


def _protect(defense: Defense, update: Update, clients: Sequence[int]) -> Update:
    chosen = Update(
        {name: tensor[list(clients)] for name, tensor in update.tensors.items()}, update.per_example
    )
    return defense.protect(chosen, _streams(clients))


def _streams(clients: Sequence[int]) -> list[Streams]:
    return [Streams.root("client", 0).child(client) for client in clients]


# Protocols and views


def know_no_order(protocol: Protocol, ground: Ground) -> None:
    """It computes each client's update by itself, of all parameters; one gradient is the mean
    over the batch, whatever the order."""
    batch = ground.private[0].batch
    assert batch.ids is not None
    turned = Batch(ids=batch.ids.flip(0), mask=batch.mask.flip(0), labels=batch.labels.flip(0))
    together = protocol.update(ground.target, _stack([batch, turned]))
    alone = protocol.update(ground.target, _stack([batch]))
    _hold(set(together.tensors) == set(ground.target.parameters), "it sends other tensors")
    for name, tensor in together.tensors.items():
        _hold(len(tensor) == 2, f"{name} has not one entry for each client")
        _hold(_close(alone.tensors[name][0], tensor[0]), f"in company it sends another {name}")
        _hold(
            not protocol.one_gradient or _close(tensor[1], tensor[0]),
            f"{name} depends on the order of the batch, and one_gradient says otherwise",
        )


def show_what_is_sent(view: View, ground: Ground) -> None:
    """It shows something, nothing twice, and nothing that is not sent."""
    visible = view.visible(ground.target)
    _hold(bool(visible), "it shows nothing")
    _hold(len(set(visible)) == len(visible), "it shows a tensor twice")
    strange = set(visible) - set(ground.target.parameters)
    _hold(not strange, f"it shows {', '.join(sorted(strange))}, which no client sends")


# Attacks


def guess_each_observation(attack: Attack, ground: Ground) -> None:
    """It gives one guess for each observation, of words that the model has."""
    found = _attack(attack, ground.observations)
    _hold(len(found) == len(ground.observations), f"it gives {len(found)} guesses for 2")
    for guess, seen in zip(found, ground.observations, strict=True):
        if Fact.LENGTHS in attack.requires:
            _hold(
                tuple(map(len, guess.sentences)) == seen.knows.lengths,
                "its sentences are not as long as it was told",
            )
        words = len(seen.target.vocabulary.allowed)
        _hold(
            all(0 <= token < words for sentence in guess.sentences for token in sentence),
            "it guesses ids that no word has",
        )
        _hold(guess.loss is None or not math.isnan(guess.loss), "the loss of its guess is NaN")


def guess_alone_as_in_company(attack: Attack, ground: Ground) -> None:
    """Its guess depends on the observation that it is of, and not on the others or their order."""
    together = _attack(attack, ground.observations)
    turned = _attack(attack, ground.observations[::-1])[::-1]
    for other, guess in zip(turned, together, strict=True):
        _hold(other.sentences == guess.sentences, "in another order it guesses otherwise")
    for seen, guess in zip(ground.observations, together, strict=True):
        (alone,) = _attack(attack, [seen])
        _hold(alone.sentences == guess.sentences, "alone it guesses otherwise than in company")
        _hold(alone.labels == guess.labels, "alone it guesses other labels than in company")
        near = alone.loss == guess.loss or (
            None not in (alone.loss, guess.loss)
            and math.isclose(alone.loss or 0.0, guess.loss or 0.0, rel_tol=1e-9)
        )
        _hold(near, "alone its guess has another loss than in company")


def prefer_the_truth(attack: Attack, ground: Ground) -> None:
    """Its objective, if it has one, is one finite number an observation and less at the truth
    than elsewhere."""
    truths = [private.batch for private in ground.private]
    wrong = [
        Batch(ids=batch.ids.roll(1, dims=1), mask=batch.mask, labels=batch.labels)
        for batch in truths
        if batch.ids is not None
    ]
    here = attack.objective(ground.observations, truths)
    if here is None:
        return
    there = attack.objective(ground.observations, wrong)
    if there is None or not here.shape == there.shape == (2,):
        raise BrokenContract("it is not one number each")
    _hold(bool(here.isfinite().all() and there.isfinite().all()), "it is not finite")
    _hold(bool((here < there).all()), "it is less for turned words than for the right ones")


def say_what_it_requires(attack: Attack, ground: Ground) -> None:
    """An audit that does not grant what it requires refuses it by name."""
    plain = {"target": "tiny", "attacks": [to_string(attack)]}
    AuditSpec.from_plain({**plain, "know": sorted(attack.requires)})
    for fact in attack.requires:
        granted = [str(other) for other in Fact if other != fact]
        try:
            AuditSpec.from_plain({**plain, "know": granted})
        except GradleakError as error:
            said = f"{attack.name} requires {fact}; this audit grants "
            named = said in str(error) and f"Add --know {fact}" in str(error)
            _hold(named, f"without {fact} the error is: {error}")
        else:
            raise BrokenContract(f"an audit that does not grant {fact} takes it")


def _attack(attack: Attack, observations: Sequence[Observation]) -> list[Reconstruction]:
    """The guesses of a short search, from no more than the attack requires."""
    target = observations[0].target
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(target))
    fields = {field.name for field in list_fields(type(attack))}
    short = {name: value for name, value in SHORT.items() if name in fields}
    ready = dataclasses.replace(attack, **short)  # type: ignore[type-var]
    if isinstance(ready, TrainableAttack):
        setting = ClientSetting(
            Tiny(), target, observations[0].protocol, (), Everything(), observations[0].batch_size
        )
        ready = ready.fit(setting, [Example(text, 0) for text in PUBLIC], bench)
    return ready.reconstruct(
        [one.limit_to(attack.requires | {Fact.DEFENSE}) for one in observations], bench
    )


# Priors and metrics


def say_likely_sentences(prior: PriorSpec, ground: Ground) -> None:
    """It says sentences of the length that is asked, of words that may stand there, alike for the
    same stream, and a finite number of how likely they are."""
    opened, vocabulary = prior.open(ground.target), ground.target.vocabulary
    for length in LENGTHS:
        sentence, again = (opened.likely(length, Streams.root("contracts", 0)) for _ in range(2))
        _hold(sentence == again, "the same random stream gives two sentences")
        frame, fixed = vocabulary.frame(length)
        streams = [Streams.root("contracts", seed) for seed in range(3)]
        lengths = [length, length + 1, length]
        drawn = opened.draw(lengths, streams)
        _hold([len(one) for one in drawn] == lengths, "it draws other lengths than were asked")
        for place, one in enumerate(drawn):
            _hold(
                one == opened.draw([lengths[place]], [streams[place]])[0],
                "what it draws depends on what else is drawn",
            )
        for one in (sentence, drawn[0], drawn[2]):
            for token, wanted, special in zip(one, frame, fixed, strict=True):
                _hold(
                    token == wanted if special else bool(vocabulary.allowed[token]),
                    f"the word {token} of a sentence of {length} may not stand there",
                )
        _hold(
            drawn[0] != drawn[2] or sum(fixed) == length or length == 3,
            "two random streams draw one sentence",
        )
        score = opened.nll(torch.tensor([sentence, sentence]), torch.tensor([length, length]))
        _hold(bool(torch.isfinite(score).all()), "how likely a sentence is, is not finite")
        _hold(float(score[0]) == float(score[1]), "one sentence has two scores")
        _hold(opened.likely_length() > sum(fixed), "its likely length has room for no word")


def score_the_right_guess_best(metric: Metric, ground: Ground) -> None:
    """The right guess scores best and none better, and it says its unit, direction and chance."""
    _hold(metric.direction in ("higher", "lower"), "its direction is neither higher nor lower")
    _hold(bool(metric.unit) and bool(metric.chance), "it does not say its unit, or its chance")
    secret = _read(ground.target, SECRET)
    pairs = [Pair(secret, _read(ground.target, guess), marked=MARKED) for guess in GUESSES]
    given = metric.values(pairs)
    _hold(len(given) == len(pairs), f"of {len(pairs)} pairs it gives {len(given)} values")
    values = [value for value in given if value is not None]
    _hold(len(values) == len(given), "it gives no value, and there is one to be given")
    sign = 1 if metric.direction == "higher" else -1
    worse = [sign * (values[0] - other) for other in values[1:]]
    _hold(min(worse) >= 0, "a wrong guess scores better than the right one")
    _hold(max(worse) > 0, "every wrong guess scores as the right one does")
    if metric.unit == "fraction":
        best = 1.0 if metric.direction == "higher" else 0.0
        _hold(math.isclose(values[0], best, abs_tol=1e-6), f"the right guess scores {values[0]}")
        _hold(all(0 <= value <= 1 for value in values), "a fraction is not between 0 and 1")


def score_nothing_as_nothing(metric: Metric, ground: Ground) -> None:
    """Of no pairs it gives no values."""
    _hold(metric.values([]) == [], "of no pairs it gives values")


def _read(target: Target, text: str) -> Text:
    (ids,) = target.encode([text])
    return Text(
        text=target.decode(ids), legacy=target.decode(ids, keep_special=True), ids=tuple(ids[1:-1])
    )


# What they share


def _hold(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BrokenContract(otherwise)


def _stack(batches: Sequence[Batch]) -> Batch:
    """Batches of clients that are padded alike."""
    return Batch(
        ids=torch.stack([batch.ids for batch in batches if batch.ids is not None]),
        mask=torch.stack([batch.mask for batch in batches]),
        labels=torch.stack([batch.labels for batch in batches]),
    )


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12)


OF_EVERY: tuple[Contract, ...] = (describe_itself, be_its_configuration)
OF_KIND: dict[str, tuple[Contract, ...]] = {
    "defense": (keep_the_form_of_an_update, treat_clients_apart),
    "protocol": (know_no_order,),
    "view": (show_what_is_sent,),
    "attack": (
        guess_each_observation,
        guess_alone_as_in_company,
        prefer_the_truth,
        say_what_it_requires,
    ),
    "prior": (say_likely_sentences,),
    "metric": (score_the_right_guess_best, score_nothing_as_nothing),
}
