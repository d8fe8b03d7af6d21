"""What a trade-off holds, which setting it recommends, and the sentences below it."""

from collections.abc import Iterator
from dataclasses import dataclass

from gradleak.records.flags import few_examples
from gradleak.records.judgement import LEAKS, NOT_JUDGED, Judgement
from gradleak.records.schema import GuaranteeRecord, Score
from gradleak.records.statistics import Interval
from gradleak.report.numbers import number
from gradleak.report.privacy import epsilon, epsilons, is_finite

NONE = "–"
WHY = {"search_failed": "the search failed there", "not_adaptive": "no attack was adapted to it"}
UNDEFENDED = "none"  # the setting without a defense


@dataclass(frozen=True)
class Point:
    """One setting: what leaked under it, and what training under it gave."""

    defense: str
    leak: Score  # the worst case over attacks, blind beside it
    gain: Interval  # of the worst case over blind, paired example by example; more leaks more, whatever the metric's direction
    utility: dict[str, Interval]  # mcc, f1, accuracy
    guarantees: tuple[GuaranteeRecord, ...]  # of the whole training run
    one_draw: bool
    audit: str  # id of its record
    training: str  # id of its training
    judgement: Judgement | None = None  # of its audit; none in a result of before there were any, whose record is not at hand

    @property
    def verdict(self) -> str:
        return NOT_JUDGED if self.judgement is None else self.judgement.verdict

    @property
    def in_doubt(self) -> bool:
        """Whether the attacks rather than the defense may be why no more leaked."""
        return self.judgement is None or self.judgement.may_be_more

    @property
    def why_in_doubt(self) -> str:
        if self.judgement is None:
            return "its audit is not at hand"
        return WHY.get(self.judgement.doubts[0], f"{self.judgement.doubts[0]} stands against its audit")


@dataclass(frozen=True)
class Missing:
    """A setting without an audit or without a training."""

    defense: str
    reason: str


@dataclass(frozen=True)
class Tradeoff:
    """A whole trade-off, as tradeoff.json keeps it."""

    created: str
    target: str
    data: str
    attacks: tuple[str, ...]
    metric: str
    utility: str
    max_leak: float
    batches: int
    batch_size: int
    draws: int
    knows: tuple[str, ...]
    train_data: str
    eval_data: str
    training_examples: int
    test_examples: int
    training: dict[str, float]  # epochs, batch_size, learning_rate, seed
    points: tuple[Point, ...]
    missing: tuple[Missing, ...] = ()

    def meets(self, point: Point) -> bool:
        """Whether the upper end of the gain's interval lies within the target."""
        return point.gain.high <= self.max_leak

    @property
    def weakest(self) -> Point | None:
        """Of the settings that meet the target the one with the best utility; of equals the first."""
        fit = [point for point in self.points if self.meets(point)]
        return max(fit, key=lambda point: point.utility[self.utility].mean, default=None)


def heading(tradeoff: Tradeoff) -> list[str]:
    """All that was held fixed: of the audits, then of the trainings."""
    told = ", ".join(tradeoff.knows) or "nothing"
    schedule = tradeoff.training
    draws = f", {tradeoff.draws} draws each" if tradeoff.draws > 1 else ""
    return [
        f"Leak: target {tradeoff.target} · data {tradeoff.data} · {tradeoff.batches} client batches of {tradeoff.batch_size}"
        f"{draws} · worst case over {', '.join(tradeoff.attacks)} · told {told}",
        f"Utility: trained on {tradeoff.training_examples} examples of {tradeoff.train_data} in steps of "
        f"{schedule['batch_size']:g}, learning rate {schedule['learning_rate']:g}, epochs: {schedule['epochs']:g}, "
        f"each step's gradient defended; tested on {tradeoff.test_examples} ({tradeoff.eval_data}) · seed {schedule['seed']:g}",
    ]


def gain_text(point: Point) -> str:
    """`+45.2 [30.1, 60.3]`, with a question mark where that is in doubt."""
    unit = point.leak.unit
    sign = "+" if point.gain.mean > 0 else ""
    ends = f"[{number(point.gain.low, unit)}, {number(point.gain.high, unit)}]"
    return f"{sign}{number(point.gain.mean, unit)} {ends}" + ("?" if point.in_doubt else "")


def utility_text(found: Interval) -> str:
    """`0.59 [0.41, 0.75]`."""
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"


def epsilon_text(point: Point) -> str:
    """`ε 12.3 (PRV)`, by the first accountant that gives one, or `ε not known`; all are in tradeoff.json."""
    if not point.guarantees:
        return NONE
    found = next((one for one in point.guarantees if is_finite(one.epsilon)), point.guarantees[0])
    said, why, _ = epsilon(found.epsilon, found.epsilon_in_words).partition(":")
    return f"ε {said}" if why else f"ε {said} ({found.accountant})"


def conclusions(tradeoff: Tradeoff) -> Iterator[str]:
    """Which setting to take, how sure that is, what the intervals are over."""
    yield _recommendation(tradeoff)
    yield from _doubts(tradeoff)
    few = few_examples(tradeoff.batches * tradeoff.batch_size)
    if few is not None:
        yield few.detail
    if any(point.one_draw for point in tradeoff.points):
        yield "Randomised defenses were attacked on one draw of each update: raise --draws to see how far it matters."
    yield (
        f"95 % intervals: gain over client batches, paired with blind; utility over the {tradeoff.test_examples} test examples "
        "of one training (mcc and f1 bootstrapped, accuracy exact): another seed may move it."
    )
    yield from _unbounded(tradeoff)
    for one in tradeoff.missing:
        yield f"{NONE} {one.defense}: {one.reason}"


def _unbounded(tradeoff: Tradeoff) -> Iterator[str]:
    """Why a setting that is meant to be differentially private has no ε."""
    for point in tradeoff.points:
        if point.guarantees and not any(is_finite(one.epsilon) for one in point.guarantees):
            yield f"Over the whole run, {point.defense}: {', '.join(epsilons(point.guarantees))}."


def _recommendation(tradeoff: Tradeoff) -> str:
    limit = number(tradeoff.max_leak, tradeoff.points[0].leak.unit)
    target = f"a gain over blind ({tradeoff.metric}) whose interval ends at {limit} or below"
    chosen = tradeoff.weakest
    if chosen is None:
        nearest = min(tradeoff.points, key=lambda point: point.gain.high)
        more = (
            "; its mean lies below, so that more examples (--limit) may show it" if nearest.gain.mean <= tradeoff.max_leak else ""
        )
        near = f"{_called(nearest)}, gain {gain_text(nearest)}{more}"
        return f"None of these settings meets the target, {target}. The nearest setting: {near}."
    found = f"{_called(chosen)}, gain {gain_text(chosen)}, {_cost(tradeoff, chosen)}"
    leaks = " It leaks all the same: more than a blind guess, within the target." if chosen.verdict == LEAKS else ""
    return f"Weakest setting that meets the target, {target}: {found}.{leaks}"


def _cost(tradeoff: Tradeoff, chosen: Point) -> str:
    """The utility of a setting beside that of no defense, or else of the best; and whether anything was learnt at all."""
    found = chosen.utility[tradeoff.utility]
    best = max(tradeoff.points, key=lambda point: point.utility[tradeoff.utility].mean)
    beside = next((point for point in tradeoff.points if point.defense == UNDEFENDED), best)
    against = "" if beside is chosen else f" ({_called(beside)}: {utility_text(beside.utility[tradeoff.utility])})"
    unlearnt = ", which may be no better than chance" if tradeoff.utility == "mcc" and found.low <= 0 else ""
    return f"{tradeoff.utility} {utility_text(found)}{against}{unlearnt}"


def _called(point: Point) -> str:
    return "no defense" if point.defense == UNDEFENDED else point.defense


def _doubts(tradeoff: Tradeoff) -> Iterator[str]:
    chosen = tradeoff.weakest
    if chosen is not None and chosen.in_doubt:
        sure = [point for point in tradeoff.points if tradeoff.meets(point) and not point.in_doubt]
        best = max(sure, key=lambda point: point.utility[tradeoff.utility].mean, default=None)
        instead = (
            f"The weakest without this doubt is {_called(best)}." if best else "No setting meets the target without this doubt."
        )
        yield f"But {chosen.why_in_doubt}: more may leak. {instead} Try a stronger --attack, such as portfolio."
    elif chosen is not None:
        yield "That bounds these attacks on these examples, not what a stronger one could do."
    if any(point.in_doubt for point in tradeoff.points):
        yield "? may be more: the search failed, no attack was adapted to the defense, or else; its record says what."
