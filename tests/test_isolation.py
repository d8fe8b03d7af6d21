"""The answer cannot reach the attack: everything reachable from what an attack is given is walked,
and nothing private is found.

Every planted leak must be found too, or the walk proves nothing.
"""

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradleak.audit import AuditSpec, group, run_audit
from gradleak.audit.client import observe, private_batches
from gradleak.audit.runner import Finished, run_audits
from gradleak.core.attack import (
    Attack,
    Bench,
    ClientSetting,
    FittedAttack,
    Progress,
    Reconstruction,
    TrainableAttack,
)
from gradleak.core.batch import Batch, Example, PrivateBatch, pixels_of
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation, Round
from gradleak.core.picture import Picture
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.datasets import Canaries
from gradleak.priors.english import FrequentWords

SEED = 7216354981  # a number that nothing else has
ROW = 5827364910  # of the first example in the data set, where a test says so


@dataclass(frozen=True)
class Secrets:
    """What must not be found."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    keys: tuple[bytes, ...]  # of the client's random streams
    pictures: tuple[Picture, ...] = ()
    rows: tuple[int, ...] = ()  # of the data set, where they are numbers that nothing else has

    def drew_with(self, generator: torch.Generator) -> bool:
        """Whether it is one of the client's generators, fresh."""
        return any(
            torch.equal(Streams(key).generator().get_state(), generator.get_state())
            for key in self.keys
        )


def secrets_of(private: Sequence[PrivateBatch]) -> Secrets:
    root = Streams.root("client", SEED)
    batches = [root.child("batch", index) for index in range(len(private))]
    keys = [
        root,
        *batches,
        *(stream.child("defense", place) for stream in batches for place in range(3)),
    ]
    for dropout in (stream.child("dropout") for stream in batches):
        keys += [dropout, *(dropout.child(name) for name in ("masks", "others"))]
    return Secrets(
        texts=tuple(
            example.content
            for batch in private
            for example in batch.examples
            if isinstance(example.content, str) and example.content
        ),
        ids=tuple(
            tuple(row.tolist())
            for batch in private
            if batch.batch.ids is not None
            for row in batch.batch.ids
        ),
        keys=tuple(stream.key for stream in keys),
        pictures=tuple(
            example.content
            for batch in private
            for example in batch.examples
            if isinstance(example.content, Picture)
        ),
        rows=tuple(
            row
            for batch in private
            for example in batch.examples
            if (row := example.row or 0) >= ROW
        ),
    )


def leaks(given: Any, secrets: Secrets) -> list[str]:
    """Every private thing that can be reached from an object, with the path to it."""
    return [
        f"{path}: {problem}"
        for path, thing in reachable(given)
        for problem in problems(thing, secrets)
    ]


def problems(thing: Any, secrets: Secrets) -> Iterator[str]:
    if isinstance(thing, (PrivateBatch, Example)):
        yield "a private batch"
    if isinstance(thing, str) and any(text in thing for text in secrets.texts):
        yield "private text"
    if type(thing) is int and thing == SEED:
        yield "the seed"
    if type(thing) is int and thing in secrets.rows:
        yield "the row of a private example"
    if isinstance(thing, Picture) and thing in secrets.pictures:
        yield "a private picture"
    if isinstance(thing, bytes) and any(thing == picture.pixels for picture in secrets.pictures):
        yield "private pixels"
    if isinstance(thing, bytes) and thing in secrets.keys:
        yield "a key of the client's random streams"
    if isinstance(thing, torch.Generator) and (
        thing.initial_seed() == SEED or secrets.drew_with(thing)
    ):
        yield "the client's generator"
    if isinstance(thing, np.random.SeedSequence) and thing.entropy == SEED:
        yield "the seed, as entropy of a spawned generator"
    if isinstance(thing, (list, tuple)) and tuple(thing) in secrets.ids:
        yield "private token ids"
    if isinstance(thing, Tensor):
        yield from tensor_problems(thing, secrets)
    if isinstance(thing, nn.Module) and any(
        getattr(thing, name)
        for name in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_backward_hooks",
            "_backward_pre_hooks",
        )
    ):
        yield "a leftover hook"


def tensor_problems(tensor: Tensor, secrets: Secrets) -> Iterator[str]:
    if tensor.grad_fn is not None:
        yield "a history (grad_fn) that holds what it was computed from"
    if tensor.is_leaf and tensor.grad is not None:
        yield "a .grad"
    if tensor._backward_hooks:
        yield "a leftover hook"
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        yield "storage shared with something larger"
    if any(_shows(tensor, picture) for picture in secrets.pictures):
        yield "private pixels"
    if (
        not tensor.is_floating_point()
        and tensor.ndim
        and any(_holds(tensor, ids) for ids in secrets.ids)
    ):
        yield "private token ids"


def _shows(tensor: Tensor, picture: Picture) -> bool:
    values = pixels_of(picture)
    if tensor.ndim < 3 or tensor.shape[-3:] != values.shape:
        return False
    return any(
        torch.allclose(one.cpu().float(), values, atol=1e-3)
        for one in tensor.detach().reshape(-1, *values.shape)
    )


def _holds(tensor: Tensor, ids: tuple[int, ...]) -> bool:
    rows = (
        tensor.reshape(-1, tensor.shape[-1])
        if tensor.shape[-1] == len(ids)
        else tensor.new_zeros(0, len(ids))
    )
    return any(tuple(row.tolist()) == ids for row in rows)


def reachable(start: Any) -> Iterator[tuple[str, Any]]:
    """Attributes, containers, closures, defaults, bound selves, partials, numpy generators,
    hooks: each object once."""
    seen: set[int] = set()
    kept = []  # keeps temporary objects alive, so that an id is not used twice
    stack: list[tuple[str, Any]] = [("given", start)]
    while stack:
        path, thing = stack.pop()
        if id(thing) in seen or isinstance(thing, (type, types.ModuleType)):
            continue
        seen.add(id(thing))
        kept.append(thing)
        yield path, thing
        stack += [(f"{path}{step}", part) for step, part in parts(thing)]


def parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        for key, value in thing.items():
            yield f"[{key!r}]", value
            yield f".key({key!r})", key
    elif isinstance(thing, (list, tuple, set, frozenset)):
        for place, value in enumerate(thing):
            yield f"[{place}]", value
    elif isinstance(thing, types.FunctionType):
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            yield f".closure({name})", cell.cell_contents
        yield ".defaults", (thing.__defaults__, thing.__kwdefaults__)
    elif isinstance(thing, types.MethodType):
        yield from ((".self", thing.__self__), (".function", thing.__func__))
    elif isinstance(thing, functools.partial):
        yield ".partial", (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, np.random.Generator):
        yield ".bit_generator.seed_seq", thing.bit_generator.seed_seq
    if isinstance(thing, Tensor):
        yield from ((".base", thing._base), (".hooks", thing._backward_hooks))
    for name, value in getattr(thing, "__dict__", {}).items():
        yield f".{name}", value
    for name in (
        slot
        for cls in type(thing).__mro__
        for slot in getattr(cls, "__slots__", ())
        if isinstance(slot, str)
    ):
        if hasattr(thing, name):
            yield f".{name}", getattr(thing, name)


found: list[list[str]] = []  # what the spy saw; it has no other way to report


@dataclass(frozen=True)
class Spy(Attack):
    """Walks everything it is given."""

    name, medium, wants_classes = "spy", "any", False

    @property
    def requires(self) -> frozenset[Fact]:
        return frozenset(Fact)

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        found.append(leaks((self, observations, bench), KNOWN[0]))
        return [
            Reconstruction(sentences=((1, 2),) * observation.batch_size)
            for observation in observations
        ]

    def objective(self, observations: Sequence[Observation], batches: Sequence[Batch]) -> Tensor:
        """Not walked in the end, when it is shown the truth: the audit attacks no more, and
        every reconstruction is made."""
        if not done:
            found.append(leaks((self, observations, batches), KNOWN[0]))
        return torch.zeros(len(observations))


KNOWN: list[Secrets] = []
done: list[bool] = []  # once every attack has run


def settings(**changes: Any) -> AuditSpec:
    plain = {
        "target": "tiny",
        "limit": 2,
        "batch_size": 2,
        "seed": SEED,
        "defenses": ["gaussian_noise:std=0.01"],
        "attacks": ["blind"],
    }
    return AuditSpec.from_plain(plain | changes)


@pytest.fixture(autouse=True)
def notice_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes when the audit begins to show the truth to attacks."""
    done.clear()
    plain = group.objectives
    monkeypatch.setattr(group, "objectives", lambda *given: done.append(True) or plain(*given))


# A language model's labels are the text
@pytest.mark.parametrize("target", ["tiny", "tiny_causal", "tiny_causal:shape=llama"])
@pytest.mark.parametrize("view", ["everything", "lamp", "parts:layers=1,modules=[query]"])
@pytest.mark.parametrize("defenses", [[], ["gaussian_noise:std=0.01"]])
def test_nothing_private_is_reachable_from_what_an_audit_gives_an_attack(
    target: str, view: str, defenses: list[str]
) -> None:
    spec = settings(target=target, view=view, defenses=defenses)
    KNOWN[:] = [secrets_of(private_batches(spec, spec.target.open(torch.device("cpu"))))]
    found.clear()
    run_audit(replace(spec, attacks=(Spy(),)))
    assert found == [[], []]


@pytest.mark.parametrize(
    ("problem", "classes"),
    [("token_classification", 3), ("multi_label_classification", 3), ("regression", 1)],
)
def test_nor_are_labels_of_several_kinds(problem: str, classes: int) -> None:
    spec = settings(
        target=f"tiny:problem_type={problem},classes={classes}", attacks=["span"], defenses=[]
    )
    target = spec.target.open(torch.device("cpu"))
    private = private_batches(spec, target)
    KNOWN[:] = [secrets_of(private)]
    found.clear()
    run_audit(replace(spec, attacks=(Spy(),)))
    assert found == [[], []]
    assert all(observe(spec, target, one, 0).knows.labels is None for one in private)


def test_nor_is_the_row_of_the_data_set_nor_its_place_in_the_selection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Canaries.load
    monkeypatch.setattr(
        Canaries,
        "load",
        lambda self, count=None: [
            replace(example, row=ROW + place) for place, example in enumerate(plain(self, count))
        ],
    )
    spec = settings(data="canaries:rows=240-243")
    private = private_batches(spec, spec.target.open(torch.device("cpu")))
    KNOWN[:] = [secrets_of(private)]
    assert KNOWN[0].rows == tuple(range(ROW, ROW + 4))
    assert leaks(SimpleNamespace(progress=ROW + 3), KNOWN[0])  # the walk knows one when it sees one
    found.clear()
    run_audit(replace(spec, attacks=(Spy(),)))
    assert found == [[], []]
    target = spec.target.open(torch.device("cpu"))
    # And not 120 and 121
    assert [observe(spec, target, one, index).index for index, one in enumerate(private)] == [0, 1]


@dataclass(frozen=True)
class Learner(TrainableAttack):
    """Walks everything it is given to learn from; public examples are no secrets, unless their
    texts are."""

    name = "learner"
    weights: str | None = None

    def fit(self, setting: ClientSetting, public: Sequence[Example], bench: Bench) -> FittedAttack:
        found.append(leaks((self, setting, bench, [example.text for example in public]), KNOWN[0]))
        raise GradleakError("It has seen enough.")

    def load(self, path: Path, setting: ClientSetting) -> FittedAttack:
        raise NotImplementedError


@pytest.mark.parametrize("target", ["tiny", "tiny_causal"])
def test_nor_from_what_an_attack_learns_from(target: str, tmp_path: Path) -> None:
    spec = settings(target=target)
    KNOWN[:] = [secrets_of(private_batches(spec, spec.target.open(torch.device("cpu"))))]
    found.clear()
    with pytest.raises(GradleakError, match="seen enough"):
        run_audit(replace(spec, attacks=(Learner(),)), out=tmp_path)
    assert found == [[]]


@pytest.mark.parametrize("defenses", [[], ["gaussian_noise:std=0.01"]])
def test_nor_is_a_private_picture(defenses: list[str]) -> None:
    spec = settings(target="tiny_image", data="shapes:side=8", defenses=defenses)
    private = private_batches(spec, spec.target.open(torch.device("cpu")))
    KNOWN[:] = [secrets_of(private)]
    assert leaks(private[0].batch.pixels.clone(), KNOWN[0])  # the walk knows one when it sees one
    found.clear()
    run_audit(replace(spec, attacks=(Spy(),)))
    assert found == [[], []]


@pytest.mark.parametrize("target", ["tiny", "tiny_causal"])
def test_nor_are_the_masks_of_a_client_that_trains_with_dropout(target: str) -> None:
    spec = settings(target=target, protocol="fedsgd:dropout=true")
    KNOWN[:] = [secrets_of(private_batches(spec, spec.target.open(torch.device("cpu"))))]
    found.clear()
    run_audit(replace(spec, attacks=(Spy(),)))
    assert found == [[], []]


@pytest.mark.parametrize(
    "changes",
    [
        {"defenses": ["dp_sgd:noise_multiplier=0.01", "masking:fraction_zeroed=0.5"], "draws": 2},
        {
            "protocol": "fedavg:local_batch_size=1,learning_rate=0.01,optimiser=adamw",
            "defenses": ["client_dp:noise_multiplier=0.01"],
        },
    ],
    ids=["dp_sgd", "fedavg"],
)
def test_nor_from_what_private_examples_or_local_training_leave(changes: dict[str, Any]) -> None:
    spec = settings(**changes)
    KNOWN[:] = [secrets_of(private_batches(spec, spec.target.open(torch.device("cpu"))))]
    found.clear()
    run_audit(replace(spec, attacks=(Spy(),)))
    assert found == [[], []]


# What the thief was shown; a module outlives every copy of an attack
remembered: list[tuple[int, ...]] = []
stolen: list[tuple[tuple[int, ...], ...]] = []


@dataclass(frozen=True)
class Thief(Attack):
    """Remembers every batch at which its objective was asked for, and answers with it."""

    name = "thief"
    number: int = 0  # several of one audit
    told: bool = True

    @property
    def requires(self) -> frozenset[Fact]:
        return frozenset(Fact) if self.told else frozenset()

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        stolen.append(tuple(remembered))
        guess = remembered[-1] if remembered else (1, 2)
        return [
            Reconstruction(sentences=(guess,) * (observation.knows.batch_size or 1))
            for observation in observations
        ]

    def objective(self, observations: Sequence[Observation], batches: Sequence[Batch]) -> Tensor:
        remembered.extend(
            tuple(row.tolist()) for batch in batches if batch.ids is not None for row in batch.ids
        )
        return torch.zeros(len(observations))


@pytest.mark.parametrize("room", [1, 2**30], ids=["a group for each batch", "one group"])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("target", ["tiny", "tiny_causal"])
def test_an_attack_that_remembers_its_objectives_has_no_answer_when_it_runs(
    target: str, told: bool, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "UPDATES_IN_MEMORY", room)
    specs = [
        settings(target=target, limit=3, defenses=chosen)
        for chosen in ([], ["gaussian_noise:std=0.01"])
    ]
    private = private_batches(specs[0], specs[0].target.open(torch.device("cpu")))
    secrets = set(secrets_of(private).ids)
    remembered.clear()
    stolen.clear()
    results = run_audits(
        [replace(spec, attacks=(Thief(0, told), Thief(1, told))) for spec in specs]
    )
    assert len(stolen) == (6 if room == 1 else 2)
    # It was tried, and on made-up batches only
    assert all(rows and not secrets & set(rows) for rows in stolen)
    # In the end it was shown them all: the test would see it, were that any earlier
    assert secrets <= set(remembered)
    for finished in results:
        assert isinstance(finished, Finished)
        for attack in finished.record.attacks.values():
            assert attack.scores["exact_match"].mean == 0 and all(
                one.objective_at_truth == 0 for one in attack.batches
            )


def test_what_a_thief_would_have_had_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thief does steal where it is shown the truth first, as an audit once did: or the test
    above would prove nothing."""
    spec = settings(limit=1, batch_size=1)
    target = spec.target.open(torch.device("cpu"))
    (private,) = private_batches(spec, target)
    remembered.clear()
    Thief().objective([observe(spec, target, private, 0)], [private.batch])
    monkeypatch.setattr(group, "make_up", lambda seen, bench: private.batch)
    record = run_audit(replace(spec, attacks=(Thief(),))).record
    assert record.attacks["thief"].scores["exact_match"].mean == 1


@pytest.fixture(scope="module")
def scene() -> tuple[AuditSpec, Target, PrivateBatch, Observation, Bench, Secrets]:
    spec = settings()
    target = spec.target.open(torch.device("cpu"))
    private = private_batches(spec, target)
    bench = Bench(Streams.root("attacker", SEED), FrequentWords().open(target))
    return (
        spec,
        target,
        private[0],
        observe(spec, target, private[0], 0),
        bench,
        secrets_of(private),
    )


def with_tensor(observation: Observation, change: Callable[[Tensor], Tensor]) -> Observation:
    name, tensor = next(iter(observation.update.tensors.items()))
    update = Update({**observation.update.tensors, name: change(tensor)})
    return replace(observation, rounds=(Round(observation.target, update),))


def test_an_honest_observation_is_clean(scene: Any) -> None:
    _, _, _, observation, bench, secrets = scene
    assert leaks((observation, bench), secrets) == []


PLANTED: dict[str, tuple[str, Callable[[AuditSpec, PrivateBatch, Observation, Bench], Any]]] = {
    "the private batch": (
        "a private batch",
        lambda spec, private, o, b: SimpleNamespace(progress=private),
    ),
    "private token ids": (
        "private token ids",
        lambda spec, private, o, b: SimpleNamespace(progress=private.batch.ids.clone()),
    ),
    "the text of a secret": (
        "private text",
        lambda spec, private, o, b: Progress(guesses=(f"> {private.examples[0].text}",)),
    ),
    "the seed": ("the seed", lambda spec, private, o, b: SimpleNamespace(deadline=spec.seed)),
    "the seed in numpy's entropy": (
        "as entropy",
        lambda spec, private, o, b: SimpleNamespace(
            progress=np.random.Generator(np.random.PCG64(np.random.SeedSequence(SEED).spawn(1)[0]))
        ),
    ),
    "the client's stream": (
        "client's random streams",
        lambda spec, private, o, b: replace(b, streams=Streams.root("client", SEED)),
    ),
    "the client's generator": (
        "client's generator",
        lambda spec, private, o, b: SimpleNamespace(
            progress=Streams.root("client", SEED).child("batch", 0).generator()
        ),
    ),
    "the generator of the client's masks": (
        "client's generator",
        lambda spec, private, o, b: SimpleNamespace(
            progress=Streams.root("client", SEED)
            .child("batch", 0)
            .child("dropout")
            .child("masks")
            .generator()
        ),
    ),
    "the update's history": (
        "grad_fn",
        lambda spec, private, o, b: with_tensor(
            o, lambda tensor: tensor.clone().requires_grad_() * 2
        ),
    ),
    "storage of a hidden part": (
        "storage shared",
        lambda spec, private, o, b: with_tensor(o, lambda tensor: torch.cat([tensor, tensor])[:1]),
    ),
    "a callback that closes over the runner": (
        "a private batch",
        lambda spec, private, o, b: SimpleNamespace(
            progress=lambda done: print(private.examples, done)
        ),
    ),
    "a partial that holds the runner": (
        "a private batch",
        lambda spec, private, o, b: functools.partial(print, private),
    ),
    "a bound method of the runner": (
        "a private batch",
        lambda spec, private, o, b: types.MethodType(print, private),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_leak_is_found(name: str, scene: Any) -> None:
    spec, _, private, observation, bench, secrets = scene
    expected, plant = PLANTED[name]
    assert any(
        expected in leak
        for leak in leaks((observation, plant(spec, private, observation, bench)), secrets)
    ), name


def test_a_gradient_left_on_a_parameter_is_found(scene: Any) -> None:
    _, target, _, observation, bench, secrets = scene
    parameter = next(iter(target.parameters.values()))
    parameter.grad = torch.zeros_like(parameter)
    try:
        assert any(".grad" in leak for leak in leaks((observation, bench), secrets))
    finally:
        parameter.grad = None


def test_a_hook_left_on_the_model_is_found(scene: Any) -> None:
    _, target, private, observation, bench, secrets = scene
    handle = target.module.register_forward_hook(lambda *call: print(private))
    try:
        assert any("leftover hook" in leak for leak in leaks((observation, bench), secrets))
    finally:
        handle.remove()


def test_the_clients_noise_cannot_be_replayed_by_the_attacker(scene: Any) -> None:
    spec, _, private, observation, _, _ = scene
    batch = private.batch
    alone = Batch(ids=batch.ids[None], mask=batch.mask[None], labels=batch.labels[None])
    simulated = observation.simulate(alone, [Streams.root("attacker", spec.seed).child("batch", 0)])
    name = next(iter(observation.update.tensors))
    difference = (simulated.tensors[name] - observation.update.tensors[name]).std()
    assert float(difference) == pytest.approx(0.01 * 2**0.5, rel=0.1)  # two independent noises
