"""The words and numbers of a bracket, the same on a terminal and on the page."""

from collections.abc import Iterator

from gradleak.records.brackets import (
    CEILING,
    COUNT,
    GUARANTEE_OF_RUN,
    INFORMATION,
    SECRETS,
    Bracket,
    find_bound,
    list_brackets,
)
from gradleak.records.schema import BoundRecord, Record
from gradleak.report.numbers import MISSING, write_interval

FULL = 0.9995  # from there on a guarantee guarantees nothing


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
    open_ended = [one.of for one in brackets if one.guaranteed and one.guaranteed.mean > FULL]
    if open_ended:
        yield f"The noise alone guarantees nothing for {' and '.join(open_ended)}."
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
    run = find_bound(record, GUARANTEE_OF_RUN, "token_accuracy")
    if run is not None:
        yield (
            f"To who sees the whole run and does not know whether the {run.protects} took part:"
            f" guaranteed at most {write_bound(run)} % of the words, where {write_without(run)} are"
            " right without."
        )
    counted = find_bound(record, COUNT, "words")
    if counted is not None:
        yield (
            f"Of {counted.without_update or 0:.0f} words that were tried at each place, with all"
            f" else given, {counted.mean:.1f} fit what arrived on average (n = {counted.n})."
        )
    rounds = record.bounds.rounds
    if rounds > 1:
        moved = record.bounds.learning_rate
        still = f"moves by {moved:g} of each update" if moved else "stands still"
        yield f"All {rounds} rounds of the same batch are seen while the model {still}."
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
