"""A record in words: its judgement, what its defenses prove, and how large their noise is.

A low score never becomes "protected" by itself: what was tried and what is in doubt stand beside
it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from gradleak.records.brackets import list_brackets
from gradleak.records.flags import FLAGS
from gradleak.records.judgement import (
    LEAKS,
    NO_FLAGS,
    NOT_JUDGED,
    NOT_SHOWN,
    Judgement,
    leading_metric,
)
from gradleak.records.schema import GuaranteeRecord, Record
from gradleak.records.settings import looks
from gradleak.report.bracket_words import write_bound, write_without
from gradleak.report.numbers import write_blind, write_count, write_gain, write_interval

UNEXPLAINED = (
    "not known: the record does not say whether there was no noise or the accountant failed"
)


def explain(name: str, details: dict[str, str]) -> str:
    """A raised flag with its numbers, its meaning and what to do about it."""
    same = len(set(details.values())) == 1
    who = ", ".join(filter(None, details))
    numbers = (
        next(iter(details.values()))
        if same
        else " ".join(f"{key}: {detail}" for key, detail in details.items())
    )
    meaning = explain_doubt(name)
    return f"{name}{f' ({who})' if same and who else ''}: {numbers}" + (
        f" {meaning}" if meaning else ""
    )


def explain_doubt(name: str) -> str:
    """Explains a reason to doubt and what to do about it; nothing of a flag not known here."""
    return (
        f"{FLAGS[name].meaning} {FLAGS[name].what_to_do}"
        if name in FLAGS
        else NO_FLAGS.get(name, "")
    )


def write_worst_case(record: Record) -> str:
    """The most that was rebuilt, example by example, over all attacks."""
    metric = leading_metric(record.worst_case)
    score = record.worst_case.get(metric)
    if score is None or score.mean is None:
        return "Worst case: no score."
    looking = sum(map(looks, record.attacks.values())) or len(record.attacks)
    attacks = write_count(looking, "attack", "attacks")
    percent = ", in %" if score.unit == "fraction" else ""
    sentence = (
        f"Worst case over {attacks}, n = {score.n}: {metric} {write_interval(score)}, "
        f"blind {write_blind(score)}, gain {write_gain(score)}{percent}"
    )
    exact = record.worst_case.get("exact_match")
    if exact is not None and exact.mean is not None:
        sentence += f"; {round(exact.mean * exact.n)} of {exact.n} rebuilt word for word"
    return sentence + "."


def write_conclusion(judgement: Judgement, record: Record) -> str:
    """The verdict and its reason; where no leak is shown, what stands against calling it safe. Then
    what no attack could do, where that was computed."""
    if judgement.verdict == LEAKS:
        said = f"This setting leaks: {give_reason(judgement, record)}. {_room(judgement, record)}"
        return said + _limit(record)
    chance = _chance(record)
    if judgement.verdict == NOT_SHOWN:
        return (
            f"Not shown either way: {chance}. That bounds these attacks, not what a stronger "
            f"one could do.{_limit(record)}"
        )
    return (
        f"Could not be judged: {chance}, and that says nothing. In doubt: "
        f"{', '.join(judgement.doubts)}.{_limit(record)}"
    )


def _limit(record: Record) -> str:
    """What no attack could do, and whether that is much more than was done."""
    bracket = next(list_brackets(record), None)
    if bracket is None or record.bounds is None:
        return ""
    told = (
        f" Told all other words, an oracle has {write_bound(bracket.at_most)} % of the words right"
        f" (without the update {write_without(bracket.at_most)} %): no attack has more, under the"
        f" prior {record.bounds.prior}."
    )
    rebuilt, lowest = bracket.rebuilt, bracket.at_most.low
    if rebuilt is None or rebuilt.high is None or lowest is None or lowest <= rebuilt.high:
        return told
    return f"{told} The attack is far below: a better search may get more."


def give_reason(judgement: Judgement, record: Record) -> str:
    """Why it is said to leak, the strongest reason first."""
    of, batches = judgement.examples, record.data.batches
    named = f"the updates name every word in {judgement.named} of {batches} batches"
    found = {
        f"the update proves {judgement.proven} of {write_count(of, 'guess', 'guesses')}": (
            judgement.proven
        ),
        f"{judgement.whole} of {of} rebuilt to the last word, which is not luck": (
            judgement.whole > judgement.proven
        ),
        f"more was rebuilt than by a blind guess ({', '.join(judgement.above_blind)})": (
            judgement.above_blind
        ),
        f"{named}, without any attack": judgement.named,
    }
    return "; ".join(words for words, holds in found.items() if holds)


def count_verdicts(verdicts: Sequence[str]) -> str:
    """`1 of 3 settings leak; 1 not shown either way; 1 could not be judged`.

    The others are never left to be taken for safe.
    """
    count, leaking = len(verdicts), verdicts.count(LEAKS)
    others = {
        "not shown either way": verdicts.count(NOT_SHOWN),
        "could not be judged": verdicts.count(NOT_JUDGED),
    }
    if count == 1:
        return {
            LEAKS: "This setting leaks",
            NOT_SHOWN: "Not shown either way",
            NOT_JUDGED: "Could not be judged",
        }[verdicts[0]]
    leak = (
        f"{leaking} of {count} settings leak"
        if leaking
        else f"None of {count} settings is shown to leak"
    )
    return "; ".join([leak, *(f"{number} {words}" for words, number in others.items() if number)])


def _room(judgement: Judgement, record: Record) -> str:
    exact = record.worst_case.get("exact_match")
    if exact is not None and exact.mean == 1:
        return "Nothing is left for a stronger attack."
    doubts = ", ".join(judgement.doubts)
    return "Stronger attacks can only raise these numbers" + (
        f"; in doubt, as too low: {doubts}." if doubts else "."
    )


def _chance(record: Record) -> str:
    """What came of attacks that are not shown to do better than a blind guess."""
    score = record.worst_case.get(leading_metric(record.worst_case))
    if score is None or score.mean is None:
        return "nothing was measured"
    if not write_gain(score).startswith("+"):
        return "no more was rebuilt than by a blind guess"
    return f"a gain of {write_gain(score)} over a blind guess may be luck with n = {score.n}"


def write_guarantees(record: Record) -> Iterator[str]:
    """Writes a line for each defense and reading.

    `dp_sgd, one release, per example: ε 4.38 (analytic Gaussian), … at δ 1e-05`. Of a whole run it
    has the sampling rate and the number of steps, as ε holds for these only.
    """
    for (defense, reading), group in groupby(
        record.guarantees, key=lambda one: (one.defense, one.reading)
    ):
        readings = list(group)
        first = readings[0]
        values = ", ".join(write_epsilons(readings))
        against = (
            "" if first.against_server else "; not against the server, which sees updates before it"
        )
        run = _describe_sampling(record, defense) if reading == "whole run" else ""
        yield (
            f"{defense}, {reading}{run}, per {first.protects}: {values} at δ "
            f"{first.delta:g}{against}"
        )


def _describe_sampling(record: Record, defense: str) -> str:
    """Writes ` (q = 0.01, T = 1000)`, or nothing where the spec does not have them."""
    for described in record.spec.get("defenses", []):
        if described.get("name") == defense and {"sampling_rate", "steps"} <= described.keys():
            return f" (q = {described['sampling_rate']:.4g}, T = {described['steps']:,})"
    return ""


def describe_noise(record: Record) -> str | None:
    """Says how large the noise was.

    `1.3 times the norm of what is seen (1.2 to 1.4 over the batches)`
    """
    noise = record.noise
    if noise is None:
        return None
    tensors = [value for value in noise.by_tensor.values() if value is not None]
    spread = (
        f"; by tensor {_write_times(min(tensors))} to {_write_times(max(tensors))} times"
        if len(tensors) > 1
        else ""
    )
    least, most = f"{noise.least:.3g}", f"{noise.most:.3g}"
    over = f" ({least} to {most} over the batches)" if least != most else ""
    return f"{noise.ratio:.3g} times the norm of what is seen{over}{spread}"


def _write_times(value: float) -> str:
    """Writes two figures of a ratio, and large ones out: 0.12, 10,000,000."""
    return f"{value:.2g}" if value < 100 else f"{float(f'{value:.2g}'):,.0f}"


def write_epsilons(readings: Iterable[GuaranteeRecord]) -> Iterator[str]:
    """Writes `ε 4.377 (PRV (Opacus))`, or what it is instead and why.

    Accountants that say the same are named together.
    """
    for said, group in groupby(
        readings, key=lambda one: write_epsilon(one.epsilon, one.epsilon_in_words)
    ):
        yield f"ε {said} ({', '.join(one.accountant for one in group)})"


def write_epsilon(value: float | None, in_words: str) -> str:
    """Writes a finite ε as a number; else in words: infinite or not known, a colon, and why."""
    return f"{value:.4g}" if is_finite(value) else in_words or UNEXPLAINED


def is_finite(value: float | None) -> bool:
    """Whether ε is a number; a file keeps an infinite one as none."""
    return value is not None and math.isfinite(value)
