"""A record in words: its judgement, what no attack could do, what its defenses prove, and how large
their noise is.

A low score never becomes "protected" by itself: what was tried and what is in doubt stand beside
it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from gradleak.records.flags import FLAGS
from gradleak.records.judgement import (
    CEILING,
    INFORMATION,
    LEAKS,
    NO_FLAGS,
    NOT_JUDGED,
    NOT_SHOWN,
    SECRETS,
    Bracket,
    Judgement,
    find_bound,
    leading_metric,
    list_brackets,
)
from gradleak.records.schema import BoundRecord, GuaranteeRecord, Record, Score
from gradleak.records.settings import looks
from gradleak.report.numbers import MISSING, write_blind, write_count, write_gain, write_interval

FULL = 0.9995  # from there on a guarantee guarantees nothing
UNEXPLAINED = (
    "not known: the record does not say whether there was no noise or the accountant failed"
)


def explain(name: str, details: dict[str, str]) -> str:
    """A raised flag with its numbers, its meaning and what to do about it."""
    who, numbers = ", ".join(filter(None, details)), {*details.values()}
    if len(numbers) == 1:
        said = f"{name}{who and f' ({who})'}: {numbers.pop()}"
    else:
        said = f"{name}: {' '.join(f'{key}: {detail}' for key, detail in details.items())}"
    return f"{said} {explain_doubt(name)}".rstrip()


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
    percent = ", in %" if score.unit == "fraction" else ""
    exact = record.worst_case.get("exact_match")
    whole = "" if exact is None else count_whole(exact)
    return (
        f"Worst case over {write_count(looking, 'attack', 'attacks')}, n = {score.n}: {metric} "
        f"{write_interval(score)}, blind {write_blind(score)}, gain {write_gain(score)}{percent}"
        f"{whole and f'; {whole} rebuilt word for word'}."
    )


def count_whole(exact: Score) -> str:
    """Writes `3 of 30`: how many were rebuilt word for word; nothing where that has no value."""
    return "" if exact.mean is None else f"{round(exact.mean * exact.n)} of {exact.n}"


def write_conclusion(judgement: Judgement, record: Record) -> str:
    """The verdict and its reason; where no leak is shown, what stands against calling it safe. Then
    what no attack could do, where that was computed."""
    if judgement.verdict == LEAKS:
        said = f"This setting leaks: {give_reason(judgement, record)}. {_room(judgement, record)}"
    elif judgement.verdict == NOT_SHOWN:
        said = (
            f"Not shown either way: {_chance(record)}. That bounds these attacks, not what a"
            " stronger one could do."
        )
    else:
        said = (
            f"Could not be judged: {_chance(record)}, and that says nothing. In doubt: "
            f"{', '.join(judgement.doubts)}."
        )
    return said + _limit(record)


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
        f"the updates name every word in {judgement.named} of {batches} batches, without any"
        " attack": judgement.named,
    }
    return "; ".join(words for words, holds in found.items() if holds)


def count_verdicts(verdicts: Sequence[str]) -> str:
    """`1 of 3 settings leak; 1 not shown either way; 1 could not be judged`.

    The others are never left to be taken for safe.
    """
    count, leaking = len(verdicts), verdicts.count(LEAKS)
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
    return "; ".join([leak, *count_others(verdicts)])


def count_others(verdicts: Sequence[str]) -> Iterator[str]:
    """Counts what is not shown to leak: `1 not shown either way`, then `1 could not be judged`."""
    words = {NOT_SHOWN: "not shown either way", NOT_JUDGED: "could not be judged"}
    yield from (f"{verdicts.count(one)} {words[one]}" for one in words if one in verdicts)


def _room(judgement: Judgement, record: Record) -> str:
    exact = record.worst_case.get("exact_match")
    if exact is not None and exact.mean == 1:
        return "Nothing is left for a stronger attack."
    doubts = judgement.doubts and f"; in doubt, as too low: {', '.join(judgement.doubts)}"
    return f"Stronger attacks can only raise these numbers{doubts or ''}."


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
        against = "; not against the server, which sees updates before it"
        run = _describe_sampling(record, defense) if reading == "whole run" else ""
        yield (
            f"{defense}, {reading}{run}, per {first.protects}: "
            f"{', '.join(write_epsilons(readings))} at δ {first.delta:g}"
            f"{'' if first.against_server else against}"
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
    said = f"{noise.ratio:.3g} times the norm of what is seen"
    least, most = f"{noise.least:.3g}", f"{noise.most:.3g}"
    if least != most:
        said += f" ({least} to {most} over the batches)"
    tensors = [value for value in noise.by_tensor.values() if value is not None]
    if len(tensors) > 1:
        said += f"; by tensor {_write_times(min(tensors))} to {_write_times(max(tensors))} times"
    return said


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


def write_rebuilt(bracket: Bracket) -> str:
    """Writes what the attack that was named first got."""
    if bracket.rebuilt is None or bracket.rebuilt.mean is None:
        return MISSING
    return write_interval(bracket.rebuilt)


def write_bound(bound: BoundRecord) -> str:
    """Writes `40.1 [35.2, 45.3]` of a share in percent, and `0.72` of bits."""
    if bound.unit == "bits":
        return write_bits(bound.mean)
    ends = (bound.low, bound.high)
    if None in ends:
        return f"{100 * bound.mean:.1f}"
    low, high = (100 * (end or 0.0) for end in ends)
    return f"{100 * bound.mean:.1f} [{low:.1f}, {high:.1f}]"


def write_bits(bits: float) -> str:
    """Writes `7,213` or `0.72`."""
    return f"{bits:,.0f}" if bits >= 100 else f"{bits:.2g}"


def write_without(bound: BoundRecord) -> str:
    """Writes what is right without the update."""
    return MISSING if bound.without_update is None else f"{100 * bound.without_update:.1f}"


def write_bracket(bracket: Bracket) -> list[str]:
    """Writes what was rebuilt, what no attack could, what the noise guarantees, and chance."""
    guaranteed, at_most = bracket.guaranteed, bracket.at_most
    return [
        *(write_rebuilt(bracket), write_bound(at_most)),
        *(MISSING if guaranteed is None else write_bound(guaranteed), write_without(at_most)),
    ]


def describe_bounds(record: Record) -> Iterator[str]:
    """Yields what stands behind a bracket, in sentences."""
    if record.bounds is None:
        return
    brackets = list(list_brackets(record))
    if brackets:
        attack = brackets[0].attack
        who = "No attack was run." if attack is None else f"Rebuilt: by {attack}."
        yield (
            f"{who} At most: by an oracle that is told the labels, the lengths, the defense and all"
            f" other words, under the prior {record.bounds.prior}; what it gets right without the"
            " update stands last. Shares in %."
        )
    for bracket in brackets:
        if bracket.is_crossed:
            yield (
                f"The attack has more {bracket.of} than the oracle: these texts are not as the"
                " prior believes, or its guesses were aligned with the secrets."
            )
        if bracket.guaranteed is not None and bracket.guaranteed.mean > FULL:
            yield f"The noise alone guarantees nothing for {bracket.of}."
    ceiling = find_bound(record, CEILING, "token_accuracy")
    if ceiling is not None:
        yield (
            f"Not told the other words, nobody has more than {write_bound(ceiling)} % of the words"
            " right."
        )
    yield from _describe_information(record)
    for bound in record.bounds.bounds:
        if bound.bound == SECRETS and bound.unit == "bits":
            form = bound.of.removeprefix("bits of ")
            first = find_bound(record, SECRETS, f"{form} first")
            told = "" if first is None else f"; it is first in {write_bound(first)} % of cases"
            yield (
                f"Marked secrets of {form}, n = {bound.n}: told all else, the right one stands out"
                f" by {write_bits(bound.mean)} bits on average{told}."
            )
    rounds = record.bounds.rounds
    if rounds > 1:
        yield f"All {rounds} rounds of the same batch are seen while the model stands still."
    yield from record.bounds.remarks


def _describe_information(record: Record) -> Iterator[str]:
    proven = find_bound(record, INFORMATION, "bits")
    measured = find_bound(record, "information measured", "bits")
    if proven is not None:
        yield (
            f"What is seen carries at most {write_bits(proven.mean)} bits about one"
            f" {proven.protects}, whoever attacks (theorem)."
        )
    # Where every gradient is clipped the two are one
    if measured is not None and (proven is None or measured.mean < 0.99 * proven.mean):
        yield (
            f"By the size of what these secrets sent: at most {write_bound(measured)} bits about"
            f" one {measured.protects} (estimate)."
        )
