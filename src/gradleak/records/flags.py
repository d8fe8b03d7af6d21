"""Ten reasons to doubt a number, each decided by a rule with its number in it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BEYOND_LUCK = 4  # tokens of a text that is not hit by chance
FEWEST_EXAMPLES = 30
FAILED_SHARE = 0.10  # of the batches
RELATIVE_EXCESS = 1e-3  # of the objective at the truth
ABSOLUTE_EXCESS = 1e-6  # the objective at the truth may be zero up to rounding
DEAD_NORM = 1e-8
DEAD_SHARE = 0.10  # of the batches
GENEROUS = ("labels", "lengths")
LEADING = ("rouge1", "mse")  # what decides whether an attack did better than chance: of texts, of pictures


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
        f"In at least {FAILED_SHARE:.0%} of the batches the attack's objective at its guess exceeds the objective at the truth "
        f"by more than {RELATIVE_EXCESS:g} of it (and by more than {ABSOLUTE_EXCESS:g}).",
        "The search stopped short of an answer that fits the update better: the low score is the search's, not the defense's.",
        "Give the attack more steps, more starts or a better prior; until then read the score as a lower bound on the leak.",
    ),
    Flag(
        "near_chance",
        "The lower end of the 95 % paired bootstrap interval of ROUGE-1, attack minus blind (of pictures: of the squared error, "
        "blind minus attack), is at or below 0, and blind missed "
        f"no text of {BEYOND_LUCK} or more tokens that was rebuilt whole.",
        "This attack did no better than guessing without the update, as far as this many examples can tell.",
        "Do not call the setting protected on this attack alone: run stronger attacks and more examples.",
    ),
    Flag(
        "few_examples",
        f"Fewer than {FEWEST_EXAMPLES} examples were attacked.",
        "The interval is wide and rare bad cases are likely to be missed.",
        f"Audit at least {FEWEST_EXAMPLES} examples: raise --limit.",
    ),
    Flag(
        "generous_knowledge",
        "The attack was given at least 1 of these facts: labels, lengths.",
        "A real server may have to guess these first, so the score may overstate what it can do.",
        "Run again without granting them, and report both.",
    ),
    Flag(
        "dead_gradient",
        f"In at least {DEAD_SHARE:.0%} of the batches the visible update has a norm below {DEAD_NORM:g}.",
        "There was almost nothing to attack (an adapter at its first step, a saturated model): no leak here proves nothing.",
        "Audit a later step, another state of the model, or a wider view of the update.",
    ),
    Flag(
        "no_objective",
        "The attack minimises 0 objectives, so that its guess and the truth cannot be compared under one.",
        "Whether its search failed cannot be told.",
        "Run an attack that has an objective beside it.",
    ),
    Flag(
        "unmodelled_dropout",
        "The client dropped entries at random in its forward pass; the attack computes with 0 of them dropped.",
        "The attack held its guesses against the gradient of another computation than the client's, so the score may be too low.",
        "Read the score as a lower bound on the leak, and audit the same client without dropout beside it.",
    ),
    Flag(
        "not_adaptive",
        "At least 1 defense changes what is seen, and the attack does not take it into account (or was not told of it).",
        "Whoever knows the defense would attack otherwise: a low score may show the attack's ignorance, not the defense's worth.",
        "Run attacks that adapt (adaptive=true, and --know defense) beside it, and trust the worst case.",
    ),
    Flag(
        "one_draw",
        "A defense draws at random, and each secret was attacked on 1 draw only.",
        "Another draw may leak more: the interval is over secrets and does not hold the luck of the draw.",
        "Attack several draws of each secret: raise --draws.",
    ),
    Flag(
        "seen_before_defense",
        "At least 1 defense is applied by the server, after it has seen the update.",
        "It protects from whoever gets the model, not from the server: the scores are those of no such defense.",
        "Do not count it against an honest-but-curious server: noise must be added on the client (dp_sgd, client_dp).",
    ),
)
FLAGS = {flag.name: flag for flag in _ALL}


def search_failed(at_guess: Sequence[float | None], at_truth: Sequence[float | None]) -> RaisedFlag | None:
    """Compares the objective at guess and truth, batch by batch; batches without both numbers are left out."""
    judged = [
        (guess, truth)
        for guess, truth in zip(at_guess, at_truth, strict=True)
        if guess is not None and truth is not None and math.isfinite(truth)
    ]
    # "not <=" rather than ">": a guess whose objective is not a number is a failed search too
    failed = [pair for pair in judged if not pair[0] - pair[1] <= max(RELATIVE_EXCESS * abs(pair[1]), ABSOLUTE_EXCESS)]
    if not judged or len(failed) / len(judged) < FAILED_SHARE:
        return None
    return RaisedFlag("search_failed", f"The guess is worse than the truth in {len(failed)} of {len(judged)} batches.")


def near_chance(difference_low: float, metric: str = "rouge1") -> RaisedFlag | None:
    """From the lower end of `paired_difference(attack, blind)` on ROUGE-1, or of (blind, attack) on the squared error."""
    if difference_low > 0:
        return None
    # In % as in every table, where the metric is a fraction
    low = f"{100 * difference_low:z.1f} (ROUGE-1, in %)" if metric == "rouge1" else f"{difference_low:z.3g} ({metric})"
    return RaisedFlag("near_chance", f"The gain over blind may be as low as {low}.")


def few_examples(examples: int) -> RaisedFlag | None:
    """From the number of examples attacked."""
    if examples >= FEWEST_EXAMPLES:
        return None
    attacked = "1 example was" if examples == 1 else f"{examples} examples were"
    return RaisedFlag("few_examples", f"{attacked} attacked; {FEWEST_EXAMPLES} are the least.")


def generous_knowledge(knowledge: Iterable[str]) -> RaisedFlag | None:
    """From the names of the facts the attack was given."""
    held = set(knowledge)
    generous = [fact for fact in GENEROUS if fact in held]
    return RaisedFlag("generous_knowledge", f"The attack was given {' and '.join(generous)}.") if generous else None


def dead_gradient(update_norms: Sequence[float]) -> RaisedFlag | None:
    """From the norm of the visible update of each batch."""
    dead = [norm for norm in update_norms if not norm >= DEAD_NORM]  # a norm that is not a number carries nothing either
    if not update_norms or len(dead) / len(update_norms) < DEAD_SHARE:
        return None
    return RaisedFlag(
        "dead_gradient", f"The visible update is below {DEAD_NORM:g} in {len(dead)} of {len(update_norms)} batches."
    )


def no_objective(has_objective: bool) -> RaisedFlag | None:
    """From whether the attack has an objective."""
    return None if has_objective else RaisedFlag("no_objective", "This attack has no objective.")


def unmodelled_dropout(dropout: bool) -> RaisedFlag | None:
    """From whether the client trained with dropout on, which no attack here takes into account."""
    return RaisedFlag("unmodelled_dropout", "Dropout was on at the client, and the attack did not model it.") if dropout else None


def not_adaptive(defended: bool, adapts: bool) -> RaisedFlag | None:
    """From whether a defense changes what is seen, and whether the attack takes it into account."""
    return RaisedFlag("not_adaptive", "This attack ignored the defense.") if defended and not adapts else None


def one_draw(randomised: bool, draws: int) -> RaisedFlag | None:
    """From whether a defense draws at random, and how many draws of each secret were attacked."""
    return RaisedFlag("one_draw", "1 draw of each secret was attacked.") if randomised and draws < 2 else None


def seen_before_defense(after_server: bool) -> RaisedFlag | None:
    """From whether a defense comes after the server has seen the update."""
    return RaisedFlag("seen_before_defense", "The server saw the update before this defense.") if after_server else None
