"""Several attacks in turn, the exact ones first; the next one gets what the ones before could not prove."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks import evidence
from gradleak.attacks.certificate import with_certificates
from gradleak.attacks.energy.attack import EnergyAttack
from gradleak.attacks.outright import say_nothing, say_outright
from gradleak.attacks.recipes.lamp import LampPlus
from gradleak.attacks.search.hypotheses import Source
from gradleak.attacks.search.matched import Matched, can_judge
from gradleak.attacks.search.matched import find_labels as labels_of
from gradleak.attacks.search.search_rows import stack_batches as side_by_side
from gradleak.attacks.span.attack import Span
from gradleak.core.attack import Attack, Bench, Cost, Fate, Reconstruction, Stage
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.kept_guesses import guess_from_plain, guess_to_plain, stage_from_plain
from gradleak.core.observation import Fact, Observation
from gradleak.core.registry import register
from gradleak.records.files import write_whole

CERTIFYING = ("span", "energy")  # members that hold their guesses against the update themselves
COMPARING = 0.05  # of a time limit: kept back to compare the members' guesses
LONGEST = 300  # characters of an error
COMPUTING = (GradleakError, MemoryError, RuntimeError, ArithmeticError)  # RuntimeError: out of memory on a GPU, and LinAlgError


@register("attack", "portfolio")
@dataclass(frozen=True)
class Portfolio(Attack):
    """Span, then energy, then LAMP with a last search: each where no guess before it is proven. The default of an audit.

    Under noise, where nothing can be proven, a guess that matches all but the noise will do.
    """

    restarts: int = 8  # of energy
    steps: int = 2000  # of LAMP; 0 leaves it out
    starts: int = 500
    labels: Source = "known"  # for LAMP and for judging; span and energy need none
    lengths: Source = "known"
    adaptive: bool = True  # LAMP, and the distance by which guesses are judged, to a defense that is known

    @property
    def members(self) -> tuple[Attack, ...]:
        lamp = LampPlus(steps=self.steps, starts=self.starts, labels=self.labels, lengths=self.lengths, adaptive=self.adaptive)
        members = (Span(), EnergyAttack(restarts=self.restarts, lengths=self.lengths), lamp)
        return members if self.steps else members[:-1]

    @property
    def passes(self) -> int:
        return max(member.passes for member in self.members)

    @property
    def requires(self) -> frozenset[Fact]:
        return frozenset().union(*(member.requires for member in self.members))

    @property
    def uses(self) -> frozenset[Fact]:
        return frozenset().union(*(member.uses for member in self.members))

    def adapts_to(self, channel: Channel) -> bool:
        return any(member.adapts_to(channel) for member in self.members)  # the nearest guess by LAMP's distance counts

    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        """The proven guess of each observation, or of those that were made the one that matches best.

        A member that refuses, fails or has no time leaves word of that, and the next one goes on. As each of them ends, what it
        made is kept in the bench's checkpoint, from which a call that was cut goes on.
        """
        began, kept = time.monotonic(), _kept(bench.checkpoint, observations)
        runs = {observation.index: Run(observation) for observation in observations} if kept is None else kept.runs
        if kept is not None:
            began -= kept.seconds
            if bench.deadline is not None:
                bench = replace(bench, deadline=bench.deadline - kept.seconds)
        kept_back = 0.0 if bench.deadline is None else COMPARING * (bench.deadline - time.monotonic())
        early = bench if bench.deadline is None else replace(bench, deadline=bench.deadline - kept_back)
        for place, member in enumerate(self.members):
            if kept is not None and place < kept.members:
                continue
            left = [one for one in observations if not runs[one.index].settled]
            turn = _share(early, len(self.members) - place)
            for one, (stage, guess) in zip(left, _attempt(member, left, turn) if left else (), strict=True):
                runs[one.index].add(stage, guess, early)
            if bench.checkpoint is not None:
                _keep(bench.checkpoint, runs, place + 1, time.monotonic() - began)
        for run in runs.values():
            if not run.guesses:
                run.say_outright(bench)
        _refuse_where_nothing_applies(list(runs.values()))
        if bench.deadline is not None:  # what was kept back is there even if a member took more than its share
            bench = replace(bench, deadline=max(bench.deadline, time.monotonic() + kept_back))
        return [self._chosen(run, bench) for run in runs.values()]

    def objective(self, observations: Sequence[Observation], batches: Sequence[Batch]) -> Float[Tensor, "observations"] | None:
        try:
            return LampPlus(labels=self.labels, lengths=self.lengths, adaptive=self.adaptive).objective(observations, batches)
        except GradleakError:  # nothing that is seen can be matched
            return None

    def _chosen(self, run: "Run", bench: Bench) -> Reconstruction:
        """The nearest of a run's guesses; of those that there is no time to compare, the one that is best by its making."""
        stages = tuple(run.stages)
        cost = Cost(sum(stage.cost.seconds for stage in stages), sum(stage.cost.steps for stage in stages))
        if not run.guesses:
            return Reconstruction(say_nothing(run.observation), cost=cost, stages=stages)
        best, nearest = run.likeliest, None
        if len({guess.sentences for guess in run.guesses}) > 1 and not best.certified:
            for guess in run.guesses:
                distance = torch.inf if bench.out_of_time else self._distance(run.observation, guess)
                if distance < torch.inf and (nearest is None or distance < nearest):
                    best, nearest = guess, distance
        return replace(best, cost=cost, stages=stages)

    def _distance(self, observation: Observation, guess: Reconstruction) -> float:
        """How far a guess is from what was seen; infinitely where that cannot be told."""
        if observation.knows.lengths not in (None, tuple(map(len, guess.sentences))):
            return torch.inf
        labels = guess.labels or _labels(observation)
        fits = observation.target.labels_are_tokens or (labels is not None and len(labels) == len(guess.sentences))
        if not fits:
            return torch.inf
        try:
            with torch.no_grad():
                found = self.objective([observation], [observation.target.batch_of(guess.sentences, labels)])
        except COMPUTING:  # too large to compare, say: no reason to lose what was found
            return torch.inf
        return torch.inf if found is None else float(found[0])


@dataclass(eq=False)
class Run:
    """What the members made of one observation so far."""

    observation: Observation
    stages: list[Stage] = field(default_factory=list)
    guesses: list[Reconstruction] = field(default_factory=list)
    settled: bool = False

    def add(self, stage: Stage, guess: Reconstruction | None, bench: Bench) -> None:
        """What the next member made of it."""
        if guess is not None:
            if stage.attack not in CERTIFYING:
                (guess,) = with_certificates([self.observation], [guess], bench)
                stage = replace(stage, certified=guess.certified)
            guess = in_order(guess, self.observation.knows.lengths)
            self.guesses.append(guess)
            self.settled = guess.certified or (not bench.out_of_time and _fits(self.observation, guess, bench))
            stage = replace(stage, sentences=guess.sentences)
            if self.settled:  # nothing was left to do when the time was up
                stage = replace(stage, fate="ran", reason="")
        self.stages.append(stage)

    def say_outright(self, bench: Bench) -> None:
        """Lets the update speak for itself, where no member has a guess."""
        began = time.monotonic()
        said = say_outright(self.observation, bench)
        if said is not None:
            self.guesses.append(Reconstruction(said))
            self.stages.append(Stage("outright", said, False, Cost(time.monotonic() - began)))

    @property
    def likeliest(self) -> Reconstruction:
        """The guess that is proven, or the last of a member that came to its end, or the last."""
        made = list(zip([stage for stage in self.stages if stage.has_guess], self.guesses, strict=True))
        ended = [guess for stage, guess in made if stage.fate == "ran"] or self.guesses
        return next((guess for guess in self.guesses if guess.certified), ended[-1])


@dataclass(frozen=True)
class Kept:
    """What a call that was cut has left: so many members came to their end, in so many seconds."""

    members: int
    seconds: float
    runs: dict[int, Run]


def _keep(path: Path, runs: Mapping[int, Run], members: int, seconds: float) -> None:
    plain = {
        str(index): {
            "stages": [asdict(stage) for stage in run.stages],
            "guesses": [guess_to_plain(guess) for guess in run.guesses],
            "settled": run.settled,
        }
        for index, run in runs.items()
    }
    write_whole(path, json.dumps({"members": members, "seconds": seconds, "runs": plain}))


def _kept(path: Path | None, observations: Sequence[Observation]) -> Kept | None:
    """What an earlier call on these observations has left."""
    if path is None or not path.is_file():
        return None
    plain = json.loads(path.read_text(encoding="utf-8"))
    if [*plain["runs"]] != [str(one.index) for one in observations]:
        return None
    runs = {one.index: _run(one, plain["runs"][str(one.index)]) for one in observations}
    return Kept(plain["members"], plain["seconds"], runs)


def _run(observation: Observation, plain: Mapping[str, Any]) -> Run:
    stages, guesses = map(stage_from_plain, plain["stages"]), map(guess_from_plain, plain["guesses"])
    return Run(observation, [*stages], [*guesses], plain["settled"])


def _fits(observation: Observation, guess: Reconstruction, bench: Bench) -> bool:
    """Whether nothing but noise is left of what was seen without a guess."""
    if not can_judge(observation) or observation.knows.lengths not in (None, tuple(map(len, guess.sentences))):
        return False
    batch = observation.target.batch_of(guess.sentences, labels_of(observation) or None)
    try:
        return bool(Matched([observation]).fits(side_by_side([batch]), bench))
    except COMPUTING:
        return False


def in_order(guess: Reconstruction, lengths: tuple[int, ...] | None) -> Reconstruction:
    """Its sentences in the order of the known lengths, which span does not look at; as they are where lengths do not fit."""
    if lengths is None or sorted(map(len, guess.sentences)) != sorted(lengths):
        return guess
    left, order = list(range(len(guess.sentences))), list[int]()
    for length in lengths:
        order.append(left.pop(next(place for place, one in enumerate(left) if len(guess.sentences[one]) == length)))
    labels = None if guess.labels is None else tuple(guess.labels[place] for place in order)
    return replace(guess, sentences=tuple(guess.sentences[place] for place in order), labels=labels)


def _labels(observation: Observation) -> tuple[int, ...] | None:
    """The labels as known, or as the update shows them."""
    if observation.knows.labels is not None:
        return tuple(observation.knows.labels.tolist())
    found = None if observation.target.labels_are_tokens else evidence.labels(observation)
    return None if found is None else found.values


def _attempt(
    member: Attack, observations: Sequence[Observation], bench: Bench, spent: float = 0.0
) -> list[tuple[Stage, Reconstruction | None]]:
    """For each observation what the member made of it: a guess, or the reason why there is none.

    Where it gives up on several at once, each half is tried by itself, so that one of them does not stop it for all: that is at
    most as often the whole work as halves can be halved.
    """
    if bench.out_of_time:
        return [(_without(member, "no_time", "No time was left for it.", spent), None)] * len(observations)
    began = time.monotonic()
    fate: Fate
    try:
        return [_made(member, guess, bench) for guess in member.reconstruct(observations, bench)]
    except GradleakError as error:
        fate, reason = "refused", str(error)
    except Exception as error:  # whatever it is, it is kept and shown, and others may still do better
        fate, reason = "failed", _brief(error)
    spent += (time.monotonic() - began) / len(observations)
    if len(observations) == 1:
        return [(_without(member, fate, reason, spent), None)]
    half = len(observations) // 2
    return [*_attempt(member, observations[:half], bench, spent), *_attempt(member, observations[half:], bench, spent)]


def _made(member: Attack, guess: Reconstruction, bench: Bench) -> tuple[Stage, Reconstruction]:
    stage = Stage(member.name, guess.sentences, guess.certified, guess.cost)
    return (replace(stage, fate="cut", reason="Its time was up before it had ended.") if bench.out_of_time else stage), guess


def _without(member: Attack, fate: Fate, reason: str, seconds: float) -> Stage:
    return Stage(member.name, (), False, Cost(seconds), fate, reason)


def _brief(error: Exception) -> str:
    """The error's name and its first line: what follows is of use to who mends the program."""
    first = next(iter(str(error).strip().splitlines()), "")
    name = type(error).__name__.lstrip("_")
    return f"{name}: {first[:LONGEST]}" if first else f"{name}."


def _share(bench: Bench, turns: int) -> Bench:
    """The bench of whoever is next of so many: of the time that is left each gets as much, and what one leaves is the others'."""
    if bench.deadline is None:
        return bench
    now = time.monotonic()
    return replace(bench, deadline=now + (bench.deadline - now) / turns)


def _refuse_where_nothing_applies(runs: Sequence[Run]) -> None:
    """Says why, where every member refuses all that is seen; one that fails or has no time leaves a record instead."""
    stages = [stage for run in runs for stage in run.stages]
    if any(run.guesses for run in runs) or any(stage.fate != "refused" for stage in stages):
        return
    reasons = dict.fromkeys(f"{stage.attack}: {stage.reason}" for stage in stages)
    raise GradleakError(f"No attack of the portfolio applies to what is visible. {' '.join(reasons)}")
