"""A judgement in words.

A low score never becomes "protected" by itself: what was tried and what is in doubt stand beside
it.
"""

from collections.abc import Sequence

from gradleak.records.flags import FLAGS
from gradleak.records.judgement import (
    LEAKS,
    NO_FLAGS,
    NOT_JUDGED,
    NOT_SHOWN,
    Judgement,
    leading_metric,
)
from gradleak.records.schema import Record
from gradleak.records.settings import looks
from gradleak.report.numbers import write_blind, write_count, write_gain, write_interval


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


def worst_case_sentence(record: Record) -> str:
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


def closing_sentence(judgement: Judgement, record: Record) -> str:
    """The verdict and its reason; where no leak is shown, what stands against calling it safe."""
    if judgement.verdict == LEAKS:
        return f"This setting leaks: {reason(judgement, record)}. {_room(judgement, record)}"
    chance = _chance(record)
    if judgement.verdict == NOT_SHOWN:
        return (
            f"Not shown either way: {chance}. That bounds these attacks, not what a stronger "
            "one could do."
        )
    return (
        f"Could not be judged: {chance}, and that says nothing. In doubt: "
        f"{', '.join(judgement.doubts)}."
    )


def reason(judgement: Judgement, record: Record) -> str:
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


def shares(verdicts: Sequence[str]) -> str:
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
