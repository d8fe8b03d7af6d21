"""What leaks from updates of one's own: guesses, and how much of an update they explain.

`reconstruct` attacks what `own_update` observed; `own_score` compares the guesses with the truth.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradleak.attacks import evidence
from gradleak.attacks.certificate.answers import solve_labels
from gradleak.audit.own_update import grant, list_lines, observe_capture
from gradleak.audit.record import WITHOUT_WORDS
from gradleak.audit.spec import read
from gradleak.captures import Capture
from gradleak.core.attack import (
    Attack,
    Bench,
    Reconstruction,
    TrainableAttack,
    refuse_open_labels,
)
from gradleak.core.errors import GradleakError
from gradleak.core.memory import limit_by_default, measured_peak, parse_memory
from gradleak.core.observation import Fact, Observation, Round
from gradleak.core.prior import PriorSpec
from gradleak.core.specs import list_fields, to_string
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching.linear_algebra import solve_least_squares
from gradleak.targets.in_memory import hash_weights
from gradleak.targets.opened import OpenedTransformer
from gradleak.targets.token_classifier import TokenClassifier

NOTHING = 1e-13  # of an update's square: a tensor with less has rounding only
MOST_LABELLINGS = 64  # tried to see how much of an update a guess explains
# Of the sentences of a guess: tried or solved for; none where they are the text itself
Labelling = tuple[int, ...] | Tensor | None
# Words for sources of labels and lengths that nobody granted: an attack reads them off the update.
DERIVED = "derived"


@dataclass(frozen=True)
class RebuiltText:
    """One text that was rebuilt; its words are left out of what is printed of it."""

    text: str = field(repr=False)
    certified: bool  # the update itself shows that it is right
    explains: float | None  # the share of the update's square that its batch explains
    adds: float | None  # how much less the others of its batch explain without it
    attack: str
    update: int  # which of the updates, counted from 0
    place: int  # in its batch


@dataclass(frozen=True, eq=False)
class Attacked:
    """What one attack made of all updates."""

    attack: Attack
    found: tuple[Reconstruction, ...]
    explained: tuple["Explained", ...]


@dataclass(frozen=True)
class Explained:
    """How much of an update's square a multiple of the gradient of a guess accounts for, whole
    and by tensor.

    There is nothing where the labels stay unknown, or the guess has no text.
    """

    share: float | None = None
    by_tensor: Mapping[str, float] = field(default_factory=dict)
    adds: tuple[float, ...] = ()  # of each sentence, how much less the others explain


@dataclass(frozen=True, eq=False)
class Reconstructions(Sequence[RebuiltText]):
    """The guesses of the best attack for each update: proven ones first, then by what they explain.

    Texts are private if the guesses are good: printing, `_repr_html_` and `to_pandas()` leave them
    out unless `show` is asked for. `guess.text` is the text.
    """

    observations: tuple[Observation, ...]
    attacked: Mapping[str, Attacked]
    seed: int = 0
    prior: str = "auto"
    model: str = ""
    weights: str = ""
    peak_memory: int | None = None

    @property
    def guesses(self) -> tuple[RebuiltText, ...]:
        """The texts of all updates, of the best attack each."""
        every = range(len(self.observations))
        return tuple(guess for row in every for guess in self.list_guesses(row, self._best(row)))

    def list_guesses(self, update: int, attack: str) -> list[RebuiltText]:
        """Returns what one attack rebuilt of one update."""
        one, target = self.attacked[attack], self.observations[update].target
        found, explained = one.found[update], one.explained[update]
        sentences = [(place, ids) for place, ids in enumerate(found.sentences) if ids]
        adds = explained.adds or (None,) * len(sentences)
        # A row may be several texts that were packed, with a token that ends each.
        split = target.split_row if isinstance(target, OpenedTransformer) else lambda ids: [ids]
        return [
            RebuiltText(
                target.decode(text), found.certified, explained.share, more, attack, update, place
            )
            for (place, ids), more in zip(sentences, adds, strict=True)
            for text in split(ids)
        ]

    def _best(self, update: int) -> str:
        def rank(name: str) -> tuple[bool, float]:
            one = self.attacked[name]
            return one.found[update].certified, one.explained[update].share or 0.0

        return max(self.attacked, key=rank)  # of equals the first

    def __len__(self) -> int:
        return len(self.guesses)

    def __getitem__(self, place: Any) -> Any:
        return self.guesses[place]

    def explains_by_tensor(self, update: int = 0) -> Mapping[str, float]:
        """Returns what the best guess of an update explains of each tensor that was seen."""
        return self.attacked[self._best(update)].explained[update].by_tensor

    def list_findings(self, update: int = 0) -> list[str]:
        """Returns what an update says outright, before any attack: words are counted, not named."""
        return [
            f"{one.name.replace('_', ' ')}: {len(one.values)} read"
            if one.name not in WITHOUT_WORDS
            else f"{one.name.replace('_', ' ')}: {', '.join(map(str, one.values))}"
            for one in evidence.findings(self.observations[update])
        ]

    def __repr__(self) -> str:
        return "\n".join(self._lines(show=False))

    def show(self) -> str:
        """Returns the guesses in lines, with their texts."""
        return "\n".join(self._lines(show=True))

    def _lines(self, show: bool) -> Iterator[str]:
        certified = sum(guess.certified for guess in self)
        yield f"{len(self)} texts rebuilt from {len(self.observations)} updates, {certified} proven"
        for guess in self:
            explained = "" if guess.explains is None else f", explains {guess.explains:.1%}"
            explained += "" if guess.adds is None else f", adds {guess.adds:.1%}"
            proven = ", proven" if guess.certified else ""
            text = guess.text if show else "(text withheld: .show())"
            yield f"  {guess.update}.{guess.place} {guess.attack}{proven}{explained}: {text}"

    def _repr_html_(self) -> str:
        head = "".join(
            f"<th>{name}</th>" for name in ("update", "attack", "proven", "explains", "adds")
        )
        rows = "".join(
            f"<tr><td>{guess.update}.{guess.place}</td><td>{escape(guess.attack)}</td>"
            f"<td>{'yes' if guess.certified else 'no'}</td>"
            f"<td>{_write_share(guess.explains)}</td><td>{_write_share(guess.adds)}</td></tr>"
            for guess in self
        )
        return f"<table><tr>{head}</tr>{rows}</table><p>Texts are withheld; .show() has them.</p>"

    def to_pandas(self, show: bool = False) -> Any:
        """Returns a data frame, with the texts only where they are asked for."""
        try:
            import pandas
        except ImportError as error:
            raise GradleakError("to_pandas() needs pandas: pip install pandas.") from error
        columns = ("update", "place", "attack", "certified", "explains", "adds", *["text"] * show)
        return pandas.DataFrame(
            [[getattr(one, name) for name in columns] for one in self], columns=list(columns)
        )


def reconstruct(
    observed: Observation | Capture | str | Path | Sequence[Any],
    *,
    model: Any = None,
    tokenizer: Any = None,
    attacks: str | Sequence[str] | None = None,
    know: Mapping[str, Any] | Sequence[str] | None = None,
    prior: str = "auto",
    seed: int = 0,
    time_limit: float | None = None,
    memory: str | int | None = None,
    device: str = "cpu",
) -> Reconstructions:
    """Attacks one update or several: observations, captures or their files.

    Files want the `model` and `tokenizer` that the update is of. Without `attacks` it is the
    portfolio, told what was granted and reading labels and lengths off the update where they were
    not; where the size of the batch was not granted it is `span`, which does without. `know` says
    anew what the attacker is told: which of the facts that were granted, or with their values
    facts that were not: `{"batch_size": 1}`. `time_limit` is in seconds for each attack.
    """
    every: list[Any] = list(observed) if isinstance(observed, (list, tuple)) else [observed]
    if not every:
        raise GradleakError("There is no update to attack.")
    opened = (
        one if isinstance(one, Observation) else observe_capture(one, model, tokenizer, device)
        for one in every
    )
    observations = [replace(one, index=index) for index, one in enumerate(opened)]
    if know is not None:
        observations = [grant(one, know) for one in observations]
    target = observations[0].target
    if any(one.target is not target for one in observations):
        observations = [_share_target(one, target) for one in observations]
    spec: PriorSpec = read("prior", prior, PriorSpec)
    bench = Bench(
        Streams.root("attacker", seed),
        spec.open(target),
        memory=(parse_memory(memory) if isinstance(memory, str) else memory)
        or limit_by_default(target.device),
    )
    attacked, most = dict[str, Attacked](), None
    for attack in _choose_attacks(attacks, observations):
        told = [one.limit_to(choose_facts(attack, one)) for one in observations]
        with measured_peak(target.device) as peak:
            deadline = None if time_limit is None else time.monotonic() + time_limit
            found = attack.reconstruct(told, replace(bench, deadline=deadline))
        most = max(most or 0, peak.bytes or 0) or None
        explained = tuple(explain(one, guess) for one, guess in zip(told, found, strict=True))
        attacked[to_string(attack)] = Attacked(attack, tuple(found), explained)
    return Reconstructions(
        tuple(observations),
        attacked,
        seed,
        prior,
        type(target.module).__name__,
        hash_weights(target.module),
        most,
    )


def _share_target(observation: Observation, target: Target) -> Observation:
    """Returns the observation with one opened copy for all, where the weights are the same."""
    if hash_weights(observation.target.module) != hash_weights(target.module):
        raise GradleakError(
            "These updates were computed at different weights: attack them one by one."
        )
    if getattr(observation.target, "loss_over", None) != getattr(target, "loss_over", None):
        raise GradleakError(
            "The loss of some of these updates is a mean over tokens, and of others over texts:"
            " attack them one by one."
        )
    return replace(observation, rounds=(Round(target, observation.update),))


def _choose_attacks(
    attacks: str | Sequence[str] | None, observations: Sequence[Observation]
) -> list[Attack]:
    granted = frozenset(Fact).intersection(*(one.knows.facts for one in observations))
    target = observations[0].target
    if target.labels_are_tokens:
        granted |= {Fact.LABELS}
    if attacks is None:
        attacks = "portfolio" if Fact.BATCH_SIZE in granted else "span"
    chosen = []
    for line in list_lines(attacks):
        attack: Attack = read("attack", line, Attack)
        if isinstance(attack, TrainableAttack):
            raise GradleakError(
                f"{attack.name} learns first, from public data: use gradleak audit for it."
            )
        fields = {one.name for one in list_fields(type(attack))}
        if target.labels_are_open:
            refuse_open_labels(attack)
        unknown = {Fact.LABELS, Fact.LENGTHS} & (attack.requires - granted)
        derived = {str(fact): DERIVED for fact in unknown if str(fact) in fields}
        attack = replace(attack, **derived)  # type: ignore[type-var]
        if still := sorted(attack.requires - granted):
            raise GradleakError(
                f"{attack.name} requires {still[0]}, which was not granted: pass it to observe(),"
                " or capture with know=, or use attacks='span', which needs nothing."
            )
        chosen.append(attack)
    return chosen


def choose_facts(attack: Attack, observation: Observation) -> frozenset[Fact]:
    """Returns what it is told of what is known: what it requires, or can make use of."""
    return (attack.requires | attack.uses | {Fact.DEFENSE}) & observation.knows.facts


def explain(observation: Observation, guess: Reconstruction) -> Explained:
    """Returns how much of an update the gradient of a guess accounts for.

    Labels that neither the attack nor the attacker knows are those that explain most, where they
    are few enough to be tried.
    """
    sentences = [ids for ids in guess.sentences if ids]
    if not sentences:
        return Explained()
    labellings = _list_labellings(observation, guess, len(sentences))
    tried = [(_explain(observation, sentences, labels), labels) for labels in labellings]
    best, labels = max(tried, key=lambda one: one[0].share or 0.0, default=(Explained(), None))
    if best.share is None or not observation.protocol.one_gradient:
        return best
    return replace(best, adds=_weigh_each(observation, sentences, labels))


def _list_labellings(
    observation: Observation, guess: Reconstruction, count: int
) -> list[Labelling]:
    """Returns the labels that the sentences of a guess may have, beside each of them.

    There are none where there would be too many ways to try.
    """
    target = observation.target
    if target.labels_are_tokens:
        return [None]
    if target.labels_are_open:
        solved = solve_labels(observation, tuple(one for one in guess.sentences if one))
        return [] if solved is None else [solved]
    if guess.labels is not None and len(guess.labels) == count:
        return [guess.labels]
    bag = evidence.find_labels(observation)
    if bag is not None and len(bag) == count:
        alike = math.prod(math.factorial(times) for times in Counter(bag).values())
        if math.factorial(count) // alike > MOST_LABELLINGS:
            return []
        return list(dict.fromkeys(itertools.permutations(bag)))
    if target.classes**count > MOST_LABELLINGS:
        return []
    return list(itertools.product(range(target.classes), repeat=count))


@torch.no_grad()
def _explain(
    observation: Observation, sentences: Sequence[Sequence[int]], labels: Labelling
) -> Explained:
    batch = observation.target.batch_of(sentences, labels)[None]
    # What is drawn at random would be drawn otherwise: it is left out.
    run = (
        observation.simulate_undefended if observation.channel.randomised else observation.simulate
    )
    with torch.enable_grad():
        made = run(batch, [Streams.root("attacker", 0).child("explain")]).detached_clone().tensors
    seen = {name: tensor.double() for name, tensor in observation.update.tensors.items()}
    inner = {name: float((tensor * made[name].double()).sum()) for name, tensor in seen.items()}
    size = sum(float(made[name].double().square().sum()) for name in seen)
    # The best multiple of it: clipping and learning rates that nobody told of change the size only.
    best = max(0.0, sum(inner.values()) / size) if size > 0 else 0.0
    squares = {name: float(tensor.square().sum()) for name, tensor in seen.items()}
    off = {
        name: float((tensor - best * made[name].double()).square().sum())
        for name, tensor in seen.items()
    }
    total = sum(squares.values())
    # The gradient of a key's bias is zero, and what is there is rounding: nothing explains that.
    counted = [name for name in squares if squares[name] > NOTHING * total]
    shares = {name: max(0.0, 1 - off[name] / squares[name]) for name in counted}
    return Explained(max(0.0, 1 - sum(off.values()) / total), shares)


def _weigh_each(
    observation: Observation, sentences: Sequence[Sequence[int]], labels: Labelling
) -> tuple[float, ...]:
    """Returns how much less of an update multiples of the others' gradients account for, without
    each sentence: nothing where a guess is of no use."""
    target, seen = observation.target, observation.update.tensors
    rows = []
    for place, sentence in enumerate(sentences):
        label = None if labels is None else labels[place : place + 1]
        if isinstance(target, TokenClassifier):
            assert isinstance(label, Tensor)
            label = label[:, : len(sentence)]
        batch = target.batch_of([sentence], label)[None]
        made = observation.simulate_undefended(batch, [Streams.root("attacker", 0)]).tensors
        rows.append(torch.cat([made[name].detach().double().flatten() for name in seen]))
    update = torch.cat([tensor.double().flatten() for tensor in seen.values()])
    gradients = torch.stack(rows)
    products, aims = gradients @ gradients.T, gradients @ update
    total = float(update.square().sum())

    def account_for(kept: list[int]) -> float:
        """The share of the update's square that lies in the span of these gradients."""
        if not kept:
            return 0.0
        shares = solve_least_squares(products[kept][:, kept], aims[kept, None]).solution
        return float(aims[kept] @ shares[:, 0]) / total

    every = list(range(len(rows)))
    whole = account_for(every)
    return tuple(
        max(0.0, whole - account_for([other for other in every if other != place]))
        for place in every
    )


def _write_share(share: float | None) -> str:
    return "—" if share is None else f"{share:.1%}"
