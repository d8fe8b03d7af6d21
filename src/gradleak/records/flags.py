"""Thirteen reasons to doubt a number, each decided by a rule with its number in it."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BEYOND_LUCK = 4  # tokens of a text that is not hit by chance
FEWEST_EXAMPLES = 30
FAILED_SHARE = 0.10  # of the batches
# Of an objective, and of a distance of one, where nothing else is said: core/attack.py says why
ROUNDING = 1e-5
UNITS = {"nats": " nats", "log": " of the log"}
DEAD_NORM = 1e-8
DEAD_SHARE = 0.10  # of the batches
GENEROUS = ("labels", "lengths")
ENDS = (".", "!", "?")  # of a sentence


@dataclass(frozen=True)
class Flag:
    """One reason to doubt: when it is raised, what that means, what to do about it."""

    name: str
    rule: str
    meaning: str
    what_to_do: str


@dataclass(frozen=True)
class RaisedFlag:
    """A flag raised on one result, with the numbers that raised it."""

    name: str
    detail: str


_ALL = (
    Flag(
        "search_failed",
        f"In at least {FAILED_SHARE:.0%} of the batches the attack's objective at its guess exceeds"
        f" the objective at the truth by more than rounding: {ROUNDING:g} of the sums that a"
        " distance is made of, 0.1 of the log of one, 1 nat of a likelihood.",
        "The search stopped short of an answer that fits the update better: the low score is the"
        " search's, not the defense's.",
        "Give the attack more steps, more starts or a better prior; until then read the score as a"
        " lower bound on the leak.",
    ),
    Flag(
        "other_answer_fits",
        f"In at least {FAILED_SHARE:.0%} of the batches the guess is not the private text, and the"
        " attack's objective at it is lower than at the truth, or the same to rounding (as in"
        " search_failed).",
        "The search did its work, and what it minimises cannot tell the truth from another answer:"
        " the update does not say (a defense that holds, a narrow view), or this objective does not"
        " look at all of it.",
        "Run attacks with another objective or a better prior beside it; more search with this one"
        " will not help.",
    ),
    Flag(
        "near_chance",
        "The lower end of the 95 % paired bootstrap interval of ROUGE-1, attack minus blind (of"
        " pictures: of the squared error, blind minus attack), is at or below 0, and blind missed"
        f" no text of {BEYOND_LUCK} or more tokens that was rebuilt whole, and no guess is proven.",
        "This attack did no better than guessing without the update, as far as this many examples"
        " can tell.",
        "Do not call the setting protected on this attack alone: run stronger attacks and more"
        " examples.",
    ),
    Flag(
        "few_examples",
        f"Fewer than {FEWEST_EXAMPLES} examples were attacked.",
        "The interval is wide and rare bad cases are likely to be missed.",
        f"Audit at least {FEWEST_EXAMPLES} examples: raise --limit.",
    ),
    Flag(
        "generous_knowledge",
        "The attack was given at least 1 of these facts: labels, lengths; of several in turn, one"
        " whose guess counts. A guess that was proven by an attack that was not given them does"
        " not.",
        "A real server may have to guess these first, so the score may overstate what it can do.",
        "Run again without granting them, and report both.",
    ),
    Flag(
        "dead_gradient",
        f"In at least {DEAD_SHARE:.0%} of the batches the visible update has a norm below"
        f" {DEAD_NORM:g}.",
        "There was almost nothing to attack (an adapter at its first step, a saturated model): no"
        " leak here proves nothing.",
        "Audit a later step, another state of the model, or a wider view of the update.",
    ),
    Flag(
        "no_objective",
        "The attack minimises 0 objectives, so that its guess and the truth cannot be compared"
        " under one, and at least 1 guess is not proven.",
        "Whether its search failed cannot be told.",
        "Run an attack that has an objective beside it.",
    ),
    Flag(
        "unmodelled_dropout",
        "The client dropped entries at random in its forward pass; the attack computes with 0 of"
        " them dropped.",
        "The attack held its guesses against the gradient of another computation than the client's,"
        " so the score may be too low.",
        "Read the score as a lower bound on the leak, and audit the same client without dropout"
        " beside it.",
    ),
    Flag(
        "not_adaptive",
        "At least 1 defense changes what is seen, and the attack does not take it into account (or"
        " was not told of it).",
        "Whoever knows the defense would attack otherwise: a low score may show the attack's"
        " ignorance, not the defense's worth.",
        "Run attacks that adapt (adaptive=true, and --know defense) beside it, and trust the worst"
        " case.",
    ),
    Flag(
        "one_draw",
        "A defense draws at random, and each secret was attacked on 1 draw only.",
        "Another draw may leak more: the interval is over secrets and does not hold the luck of the"
        " draw.",
        "Attack several draws of each secret: raise --draws.",
    ),
    Flag(
        "seen_before_defense",
        "At least 1 defense is applied by the server, after it has seen the update.",
        "It protects from whoever gets the model, not from the server: the scores are those of no"
        " such defense.",
        "Do not count it against an honest-but-curious server: noise must be added on the client"
        " (dp_sgd, client_dp).",
    ),
    Flag(
        "member_failed",
        "At least 1 attack of several in turn refused at least 1 batch, or ended with an error"
        " on it.",
        "Others went on without it: what it would have rebuilt there is missing from the score.",
        "Read its reason: some attacks apply to other views only; elsewhere mend what it names and"
        " run again.",
    ),
    Flag(
        "member_out_of_time",
        "At least 1 attack of several in turn was not begun on at least 1 batch, or was cut,"
        " because its time was up.",
        "What it would have rebuilt with more time is missing from the score.",
        "Raise --time-limit; until then the leak may be larger.",
    ),
)
FLAGS = {flag.name: flag for flag in _ALL}


Objectives = Sequence[float | None]
# For every batch the unit of its objective, and what of it may be rounding
Scales = Sequence[tuple[str, float]]


def search_failed(
    at_guess: Objectives, at_truth: Objectives, scales: Scales | None = None
) -> RaisedFlag | None:
    """Compares the objective at guess and truth, batch by batch; batches without both numbers
    are left out."""
    excesses = _excesses(at_guess, at_truth, scales)
    # "not <=" rather than ">": a guess whose objective is not a number is a failed search too
    failed = [one for one in excesses if not one.difference <= one.rounding]
    if not excesses or len(failed) / len(excesses) < FAILED_SHARE:
        return None
    return RaisedFlag(
        "search_failed",
        f"The guess is worse than the truth in {len(failed)} of {len(excesses)}"
        f" batches{_by_how_much(failed)}.",
    )


def other_answer_fits(
    at_guess: Objectives, at_truth: Objectives, right: Sequence[bool], scales: Scales | None = None
) -> RaisedFlag | None:
    """From the same, and from which guesses are the truth."""
    excesses = _excesses(at_guess, at_truth, scales)
    fitting = [one for one in excesses if not right[one.batch] and one.difference <= one.rounding]
    if not excesses or len(fitting) / len(excesses) < FAILED_SHARE:
        return None
    lower = [one for one in fitting if one.difference < -one.rounding]
    return RaisedFlag(
        "other_answer_fits",
        f"A wrong guess fits as well as the truth in {len(fitting)} of {len(excesses)} batches"
        + (f", better in {len(lower)}{_by_how_much(lower)}." if lower else "."),
    )


@dataclass(frozen=True)
class _Excess:
    """By how much a guess is worse than the truth, and how much of that may be rounding."""

    batch: int
    difference: float
    rounding: float
    unit: str


def _excesses(at_guess: Objectives, at_truth: Objectives, scales: Scales | None) -> list[_Excess]:
    rows = zip(at_guess, at_truth, scales or [("", ROUNDING)] * len(at_guess), strict=True)
    return [
        _Excess(batch, guess - truth, max(ROUNDING * abs(truth), rounding), unit)
        for batch, (guess, truth, (unit, rounding)) in enumerate(rows)
        if guess is not None and truth is not None and math.isfinite(truth)
    ]


def _by_how_much(excesses: Sequence[_Excess]) -> str:
    """The median in the unit that most have; nothing where no difference is a number."""
    finite = [one for one in excesses if math.isfinite(one.difference)]
    if not finite:
        return ""
    unit = statistics.mode(one.unit for one in finite)
    median = statistics.median(abs(one.difference) for one in finite if one.unit == unit)
    return f", by {median:.3g}{UNITS.get(unit, '')} at the median"


def near_chance(difference_low: float, metric: str = "rouge1") -> RaisedFlag | None:
    """From the lower end of `paired_difference(attack, blind)` on ROUGE-1, or of (blind, attack)
    on the squared error."""
    if difference_low > 0:
        return None
    # In % as in every table, where the metric is a fraction
    percent = f"{100 * difference_low:z.1f} (ROUGE-1, in %)"
    low = percent if metric == "rouge1" else f"{difference_low:z.3g} ({metric})"
    return RaisedFlag("near_chance", f"The gain over blind may be as low as {low}.")


def few_examples(examples: int) -> RaisedFlag | None:
    """From the number of examples attacked."""
    if examples >= FEWEST_EXAMPLES:
        return None
    attacked = "1 example was" if examples == 1 else f"{examples} examples were"
    return RaisedFlag("few_examples", f"{attacked} attacked; {FEWEST_EXAMPLES} are the least.")


def generous_knowledge(knowledge: Iterable[str]) -> RaisedFlag | None:
    """From the names of the facts the attack was given."""
    generous = " and ".join(sorted({*knowledge}.intersection(GENEROUS)))
    said = f"The attack was given {generous}."
    return RaisedFlag("generous_knowledge", said) if generous else None


def dead_gradient(update_norms: Sequence[float]) -> RaisedFlag | None:
    """From the norm of the visible update of each batch."""
    # A norm that is not a number carries nothing either
    dead = [norm for norm in update_norms if not norm >= DEAD_NORM]
    if not update_norms or len(dead) / len(update_norms) < DEAD_SHARE:
        return None
    return RaisedFlag(
        "dead_gradient",
        f"The visible update is below {DEAD_NORM:g} in {len(dead)} of {len(update_norms)} batches.",
    )


def no_objective(has_objective: bool) -> RaisedFlag | None:
    """From whether the attack has an objective, or needs none: its guesses are proven."""
    return None if has_objective else RaisedFlag("no_objective", "This attack has no objective.")


def unmodelled_dropout(dropout: bool) -> RaisedFlag | None:
    """From whether the client trained with dropout on, which no attack here takes into account."""
    said = "Dropout was on at the client, and the attack did not model it."
    return RaisedFlag("unmodelled_dropout", said) if dropout else None


def not_adaptive(defended: bool, adapts: bool) -> RaisedFlag | None:
    """From whether a defense changes what is seen, and whether the attack takes it into account."""
    return (
        RaisedFlag("not_adaptive", "This attack ignored the defense.")
        if defended and not adapts
        else None
    )


def one_draw(randomised: bool, draws: int) -> RaisedFlag | None:
    """From whether a defense draws at random, and how many draws of each secret were attacked."""
    return (
        RaisedFlag("one_draw", "1 draw of each secret was attacked.")
        if randomised and draws < 2
        else None
    )


def seen_before_defense(after_server: bool) -> RaisedFlag | None:
    """From whether a defense comes after the server has seen the update."""
    return (
        RaisedFlag("seen_before_defense", "The server saw the update before this defense.")
        if after_server
        else None
    )


@dataclass(frozen=True)
class MemberFate:
    """What became of one attack of several on some batches, where it did not come to its end."""

    attack: str
    fate: str  # refused, failed, cut or no_time
    batches: int
    reason: str = ""


def member_failed(fates: Sequence[MemberFate]) -> RaisedFlag | None:
    """From the attacks of several in turn that refused or ended with an error."""
    said = [
        f"{one.attack} {one.fate}: {one.reason}{'' if one.reason.endswith(ENDS) else '.'}"
        for one in fates
        if one.fate in ("refused", "failed")
    ]
    return RaisedFlag("member_failed", " ".join(said)) if said else None


def member_out_of_time(fates: Sequence[MemberFate], batches: int) -> RaisedFlag | None:
    """From the attacks of several in turn that were cut or not begun, and the number of all
    batches."""
    words = {"cut": "was cut", "no_time": "was not begun"}
    late = [
        f"{one.attack} {words[one.fate]} in {one.batches} of {batches} batches"
        for one in fates
        if one.fate in words
    ]
    return RaisedFlag("member_out_of_time", f"{', '.join(late)}.") if late else None
