"""Several attacks in turn, the exact ones first.

The next one gets what the ones before could not prove.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks import evidence
from gradleak.attacks.certificate import with_certificates
from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.attacks.recipes.lamp import LampPlus
from gradleak.attacks.rows.rows_attack import RowsAttack
from gradleak.attacks.search.hypotheses import Source
from gradleak.attacks.search.likelihood import order_by_prior
from gradleak.attacks.search.matched import Matched, can_judge, find_labels
from gradleak.attacks.search.search_rows import stack_batches
from gradleak.attacks.span import Span
from gradleak.core.attack import Attack, Bench, Cost, Fate, Reconstruction, Scale, Sentences, Stage
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.prior import Prior
from gradleak.core.registry import register
from gradleak.records.files import write_whole
from gradleak.records.plain import from_plain, to_plain

# Members that hold their guesses against the update themselves
CERTIFYING = ("span", "rows", "energy")
COMPARING = 0.05  # of a time limit: kept back to compare the members' guesses
MOST_ORDERED = 20_000  # words times places: for more the prior is not asked for an order
LONGEST = 300  # characters of an error
# Texts in a batch from which rows has a turn; what it leaves the members after it would not find
# in hours: they search all sentences of a batch at once.
LARGE = 16
# RuntimeError is out of memory on a GPU, and LinAlgError.
COMPUTING_ERRORS = (GradleakError, MemoryError, RuntimeError, ArithmeticError)


@register("attack", "portfolio")
@dataclass(frozen=True)
class Portfolio(Attack):
    """The default of an audit: span, energy, then LAMP, each where no guess is proven yet.

    Of batches of 16 texts and more, rows is tried after span, and its guess is the last. LAMP ends
    with a last search. Under noise, where nothing can be proven, a guess that matches all but the
    noise will do.
    """

    version = 3  # span's and energy's third; under a likelihood guesses are told apart by it
    wants_classes = False

    restarts: int = 8  # of energy
    steps: int = 2000  # of LAMP; 0 leaves it out
    starts: int = 500
    labels: Source = "known"  # for LAMP and for judging; span and energy need none
    lengths: Source = "known"
    # LAMP, and the distance by which guesses are judged, adapt to a defense that is known.
    adaptive: bool = True

    @property
    def members(self) -> tuple[Attack, ...]:
        members = (
            Span(),
            RowsAttack(),
            self._energy,
            LampPlus(
                steps=self.steps,
                starts=self.starts,
                labels=self.labels,
                lengths=self.lengths,
                adaptive=self.adaptive,
            ),
        )
        return members if self.steps else members[:-1]

    @property
    def _energy(self) -> EnergyAttack:
        return EnergyAttack(restarts=self.restarts, lengths=self.lengths)

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
        # One is enough: the nearest guess by LAMP's distance counts.
        return any(member.adapts_to(channel) for member in self.members)

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        """Returns the proven guess of each observation, or the one that matches best.

        A member that refuses, fails or has no time leaves word of that, and the next one goes on.
        As each of them ends, what it made is kept in the bench's checkpoint, from which a call that
        was cut goes on.
        """
        call = _read_checkpoint(bench.checkpoint, observations)
        began = time.monotonic() - call.seconds
        pairs = list(zip(observations, call.runs, strict=True))
        if bench.deadline is not None:
            bench = replace(bench, deadline=bench.deadline - call.seconds)
        early = bench.ending_early(COMPARING)
        members = [one for one in self.members if any(_serves(one, seen) for seen in observations)]
        for place, member in list(enumerate(members))[call.members :]:
            left = [(one, run) for one, run in pairs if not run.settled and _serves(member, one)]
            seen = [one for one, _ in left]
            # Of the time that is left each member gets as much as those after it; rows gets all,
            # since no other has a turn where it has a guess.
            turns = 1 if isinstance(member, RowsAttack) else len(members) - place
            made = _attempt(member, seen, early.ending_early(1 - 1 / turns)) if seen else []
            for (one, run), (stage, guess) in zip(left, made, strict=True):
                run.add(one, stage, guess, early)
            call = PortfolioCheckpoint(place + 1, time.monotonic() - began, call.runs)
            if bench.checkpoint is not None:
                write_whole(bench.checkpoint, json.dumps(to_plain(call, keep_nan=True)))
        for one, run in pairs:
            if not run.guesses:
                run.say_outright(one, bench)
        _refuse_where_nothing_applies(call.runs)
        # What was kept back is there even if a member took more than its share.
        if bench.deadline is not None and early.deadline is not None:
            late = time.monotonic() + bench.deadline - early.deadline
            bench = replace(bench, deadline=max(bench.deadline, late))
        return [self._choose(*pair, bench) for pair in pairs]

    def objective(
        self, observations: Sequence[Observation], batches: Sequence[Batch]
    ) -> Float[Tensor, "observations"] | None:
        if any(one.target.labels_are_open for one in observations):
            return None  # LAMP's distance, by which guesses are judged, wants classes
        if observations and all(map(self._energy.searches_vocabulary, observations)):
            return self._energy.objective(observations, batches)
        try:
            lamp = LampPlus(labels=self.labels, lengths=self.lengths, adaptive=self.adaptive)
            return lamp.objective(observations, batches)
        except GradleakError:  # nothing that is seen can be matched
            return None

    def objective_scale(self, observation: Observation) -> Scale:
        drowned = self._energy.searches_vocabulary(observation)
        return self._energy.objective_scale(observation) if drowned else Scale()

    def penalty(self, observation: Observation, sentences: Sentences, prior: Prior) -> float:
        """Returns the prior's nats where guesses are told apart by their exact likelihood."""
        if not self._energy.searches_vocabulary(observation):
            return 0.0
        return self._energy.penalty(observation, sentences, prior)

    def _choose(
        self, observation: Observation, run: "PortfolioRun", bench: Bench
    ) -> Reconstruction:
        """Chooses the nearest of a run's guesses.

        Of those that there is no time to compare it takes the one that is best by its making.
        """
        stages, costs = tuple(run.stages), [stage.cost for stage in run.stages]
        cost = Cost(sum(one.seconds for one in costs), sum(one.steps for one in costs))
        if not run.guesses:
            return Reconstruction(say_nothing(observation), cost=cost, stages=stages)
        best, nearest = run.likeliest, None
        if len({guess.sentences for guess in run.guesses}) > 1 and not best.certified:
            for guess in run.guesses:
                if bench.out_of_time:
                    break
                distance = self._measure_distance(observation, guess, bench)
                if distance < torch.inf and (nearest is None or distance < nearest):
                    best, nearest = guess, distance
        return replace(best, cost=cost, stages=stages)

    def _measure_distance(
        self, observation: Observation, guess: Reconstruction, bench: Bench
    ) -> float:
        """Measures how far a guess is from what was seen; infinitely where that cannot be told."""
        if observation.knows.lengths not in (None, tuple(map(len, guess.sentences))):
            return torch.inf
        labels = guess.labels or evidence.find_labels(observation)
        labelled = labels is not None and len(labels) == len(guess.sentences)
        if not labelled and not observation.target.labels_are_tokens:
            return torch.inf
        try:
            with torch.no_grad():
                batch = observation.target.batch_of(guess.sentences, labels)
                found = self.objective([observation], [batch])
                likely = self.penalty(observation, guess.sentences, bench.words)
        except COMPUTING_ERRORS:  # too large to compare, say: no reason to lose what was found
            return torch.inf
        return torch.inf if found is None else float(found[0]) + likely


@dataclass(eq=False)
class PortfolioRun:
    """What the members made of one observation so far."""

    index: int  # of the observation
    stages: list[Stage] = field(default_factory=list)
    guesses: list[Reconstruction] = field(default_factory=list)
    settled: bool = False

    def add(
        self, observation: Observation, stage: Stage, guess: Reconstruction | None, bench: Bench
    ) -> None:
        """Notes what the next member made of it."""
        if guess is not None:
            if stage.attack not in CERTIFYING:
                (guess,) = with_certificates([observation], [guess], bench)
                stage = replace(stage, certified=guess.certified)
            guess = put_in_order(guess, observation.knows.lengths)
            self.guesses.append(guess)
            in_time = not bench.out_of_time
            self.settled = guess.certified or (in_time and _fits(observation, guess, bench))
            stage = replace(stage, sentences=guess.sentences)
            if self.settled:  # nothing was left to do when the time was up
                stage = replace(stage, fate="ran", reason="")
            self.settled |= stage.attack == RowsAttack.name
        self.stages.append(stage)

    def say_outright(self, observation: Observation, bench: Bench) -> None:
        """Lets the update speak for itself, where no member has a guess."""
        began = time.monotonic()
        said = say_outright(observation, bench)
        if said is not None:
            self.guesses.append(Reconstruction(said))
            self.stages.append(Stage("outright", said, False, Cost(time.monotonic() - began)))

    @property
    def likeliest(self) -> Reconstruction:
        """The guess that is proven, or the last of a member that came to its end, or the last.

        A guess of rows stands, even cut: it is made where no other member's is one."""
        made = zip([one for one in self.stages if one.has_guess], self.guesses, strict=True)
        stands = ("ran", RowsAttack.name)
        ended = [
            guess for stage, guess in made if stage.fate in stands or stage.attack in stands
        ] or self.guesses
        return next((guess for guess in self.guesses if guess.certified), ended[-1])


@dataclass(frozen=True)
class PortfolioCheckpoint:
    """What a call has done, and leaves where it is cut: so many members ended, in some seconds."""

    members: int
    seconds: float
    runs: tuple[PortfolioRun, ...]


def _read_checkpoint(path: Path | None, observations: Sequence[Observation]) -> PortfolioCheckpoint:
    """Reads what an earlier call on these observations has left, or begins."""
    fresh = PortfolioCheckpoint(0, 0.0, tuple(PortfolioRun(one.index) for one in observations))
    if path is None or not path.is_file():
        return fresh
    plain = json.loads(path.read_text(encoding="utf-8"))
    kept: PortfolioCheckpoint = from_plain(PortfolioCheckpoint, plain, path.name)
    is_same = [run.index for run in kept.runs] == [run.index for run in fresh.runs]
    return kept if is_same else fresh


def _serves(member: Attack, observation: Observation) -> bool:
    """Whether a member has a turn at a batch of this size, with labels of this kind."""
    if observation.target.labels_are_open and member.wants_classes:
        return False
    return not isinstance(member, RowsAttack) or (observation.knows.batch_size or 1) >= LARGE


def _fits(observation: Observation, guess: Reconstruction, bench: Bench) -> bool:
    """Whether nothing but noise is left of what was seen without a guess."""
    lengths = tuple(map(len, guess.sentences))
    if not can_judge(observation) or observation.knows.lengths not in (None, lengths):
        return False
    batch = observation.target.batch_of(guess.sentences, find_labels(observation) or None)
    try:
        return bool(Matched([observation]).fits(stack_batches([batch]), bench))
    except COMPUTING_ERRORS:
        return False


def put_in_order(guess: Reconstruction, lengths: tuple[int, ...] | None) -> Reconstruction:
    """Puts the sentences in the order of the known lengths, which span does not look at.

    They stay as they are where lengths do not fit.
    """
    if lengths is None or sorted(map(len, guess.sentences)) != sorted(lengths):
        return guess
    left, order = list(range(len(guess.sentences))), list[int]()
    for length in lengths:
        order.append(next(place for place in left if len(guess.sentences[place]) == length))
        left.remove(order[-1])
    labels = None if guess.labels is None else tuple(guess.labels[place] for place in order)
    return replace(guess, sentences=tuple(guess.sentences[place] for place in order), labels=labels)


def _attempt(
    member: Attack, observations: Sequence[Observation], bench: Bench, spent: float = 0.0
) -> list[tuple[Stage, Reconstruction | None]]:
    """Returns for each observation what the member made of it, or why there is nothing.

    Where it gives up on several at once, each half is tried by itself, so that one of them does not
    stop it for all: that is at most as often the whole work as halves can be halved.
    """
    if bench.out_of_time:
        late = Stage(member.name, (), False, Cost(spent), "no_time", "No time was left for it.")
        return [(late, None)] * len(observations)
    began = time.monotonic()
    fate: Fate
    try:
        return [
            _note_guess(member, guess, bench) for guess in member.reconstruct(observations, bench)
        ]
    except GradleakError as error:
        fate, reason = "refused", str(error)
    except Exception as error:  # whatever it is, it is shown, and others may still do better
        fate, reason = "failed", _describe_error(error)
    spent += (time.monotonic() - began) / len(observations)
    if len(observations) == 1:
        return [(Stage(member.name, (), False, Cost(spent), fate, reason), None)]
    half = len(observations) // 2
    return [
        *_attempt(member, observations[:half], bench, spent),
        *_attempt(member, observations[half:], bench, spent),
    ]


def _note_guess(
    member: Attack, guess: Reconstruction, bench: Bench
) -> tuple[Stage, Reconstruction]:
    stage = Stage(member.name, guess.sentences, guess.certified, guess.cost)
    if bench.out_of_time:
        stage = replace(stage, fate="cut", reason="Its time was up before it had ended.")
    return stage, guess


def _describe_error(error: Exception) -> str:
    """Returns the error's name and its first line: the rest is for who mends the program."""
    first = next(iter(str(error).strip().splitlines()), "")
    name = type(error).__name__.lstrip("_")
    return f"{name}: {first[:LONGEST]}" if first else f"{name}."


def _refuse_where_nothing_applies(runs: Sequence[PortfolioRun]) -> None:
    """Says why, where every member refuses all that is seen.

    One that fails or has no time leaves a record instead.
    """
    stages = [stage for run in runs for stage in run.stages]
    if any(run.guesses for run in runs) or any(stage.fate != "refused" for stage in stages):
        return
    reasons = dict.fromkeys(f"{stage.attack}: {stage.reason}" for stage in stages)
    raise GradleakError(
        f"No attack of the portfolio applies to what is visible. {' '.join(reasons)}"
    )


def say_outright(observation: Observation, bench: Bench) -> Sentences | None:
    """Makes sentences of the words that the update shows; none where it shows no words.

    The words are those whose rows of the word embeddings moved. Their order is one that is likely
    beforehand; there is no search for a match.
    """
    words = evidence.bag_of_words(observation)
    if words is None or not words.values:
        return None
    lengths = _estimate_lengths(observation, len(words.values))
    if not bench.out_of_time and len(words.values) * sum(lengths) <= MOST_ORDERED:
        return order_by_prior(bench.words, observation.target, words.values, lengths, beams=1)
    return _lay_in_turn(observation, words.values, lengths)


def say_nothing(observation: Observation) -> Sentences:
    """Returns as many sentences as there are known to be, without a word in them."""
    vocabulary = observation.target.vocabulary
    return ((*vocabulary.prefix, *vocabulary.suffix),) * (observation.knows.batch_size or 1)


def _estimate_lengths(observation: Observation, words: int) -> Sequence[int]:
    """Estimates lengths: as known, or as the positions say, or with room for every word once."""
    if observation.knows.lengths is not None:
        return observation.knows.lengths
    size, vocabulary = observation.knows.batch_size or 1, observation.target.vocabulary
    longest = evidence.longest_length(observation)
    if longest is not None:
        return longest.values * size
    return (-(-words // size) + len(vocabulary.prefix) + len(vocabulary.suffix),) * size


def _lay_in_turn(
    observation: Observation, words: Sequence[int], lengths: Sequence[int]
) -> Sentences:
    vocabulary = observation.target.vocabulary
    sentences, at = [], 0
    for length in lengths:
        frame, fixed = vocabulary.frame(length)
        for place in range(length):
            if not fixed[place]:
                frame[place], at = words[at % len(words)], at + 1
        sentences.append(tuple(frame))
    return tuple(sentences)
