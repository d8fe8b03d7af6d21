"""What may be concluded. A low score never becomes "protected" by itself: what was tried and what is in doubt stand beside it."""

from gradleak.records.flags import FLAGS, LEADING
from gradleak.records.schema import Record, Score
from gradleak.report.findings import named_words
from gradleak.report.numbers import counted, gain, mean_and_interval, number


def raised(record: Record) -> dict[str, dict[str, str]]:
    """Flags by name: the attacks that raised them, each with its numbers; under "" what belongs to the whole audit."""
    found: dict[str, dict[str, str]] = {}
    for key, attack in record.attacks.items():
        for flag in attack.flags:
            found.setdefault(flag.name, {})[key] = flag.detail
    for flag in record.flags:
        found.setdefault(flag.name, {"": flag.detail})
    return found


def explain(name: str, details: dict[str, str]) -> str:
    """A raised flag with its numbers, its meaning and what to do about it."""
    same = len(set(details.values())) == 1
    who = ", ".join(filter(None, details))
    numbers = next(iter(details.values())) if same else " ".join(f"{key}: {detail}" for key, detail in details.items())
    flag = FLAGS.get(name)  # a later version may know more flags
    return f"{name}{f' ({who})' if same and who else ''}: {numbers}" + (f" {flag.meaning} {flag.what_to_do}" if flag else "")


def worst_case_sentence(record: Record) -> str:
    """The most that was rebuilt, example by example, over all attacks."""
    metric, score = _leading(record)
    if score is None:
        return "Worst case: no score."
    attacks = counted(len(record.attacks), "attack", "attacks")
    percent = ", in %" if score.unit == "fraction" else ""
    sentence = (
        f"Worst case over {attacks}, n = {score.n}: {metric} {mean_and_interval(score)}, "
        f"blind {number(score.blind, score.unit)}, gain {gain(score)}{percent}"
    )
    exact = record.worst_case.get("exact_match")
    if exact is not None and exact.mean is not None:
        sentence += f"; {round(exact.mean * exact.n)} of {exact.n} rebuilt word for word"
    return sentence + "."


def closing_sentence(record: Record) -> str:
    """Leaks, or not shown to leak; in the second case always with what stands against calling it safe."""
    beaten = beats_blind(record)
    leading = next((name for name in LEADING if name in record.worst_case), None)
    if leading in beaten or (beaten and leading is None):
        return f"This setting leaks: more was rebuilt than by a blind guess ({', '.join(beaten)}). " + (
            "Nothing is left for a stronger attack." if _all_of_it(record) else "Stronger attacks can only raise these numbers."
        )
    doubts = ", ".join(name for name in raised(record) if name != "near_chance")
    elsewhere = f" By {', '.join(beaten)} it was more: something gets through." if beaten else ""
    measure = f" by {leading}" if beaten else ""
    return (
        f"These attacks rebuilt no more than a blind guess{measure}, as far as these examples can tell.{elsewhere} "
        "That bounds these attacks, not what a stronger one could do." + (f" In doubt: {doubts}." if doubts else "")
    ) + _without_attack(record)


def _all_of_it(record: Record) -> bool:
    """Whether every example was rebuilt word for word."""
    exact = record.worst_case.get("exact_match")
    return exact is not None and exact.mean == 1


def _without_attack(record: Record) -> str:
    """What needs no attack at all: words that the updates name themselves."""
    named = named_words(record)
    if not named:
        return ""
    return f" Yet the updates name every word in {named} of {record.data.batches} batches: that leaks without any attack."


def beats_blind(record: Record) -> list[str]:
    """Metrics by which the worst case lies above the blind attack beyond chance. Legacy ones repeat the honest ones."""
    honest = {name: score for name, score in record.worst_case.items() if not name.endswith("_legacy")}
    return [name for name, score in honest.items() if (_paired_above_blind(record) if name in LEADING else _above_blind(score))]


def _paired_above_blind(record: Record) -> bool:
    """Whether some attack was not flagged as near chance: paired differences see more than two intervals do."""
    return any(all(flag.name != "near_chance" for flag in attack.flags) for attack in record.attacks.values())


def _above_blind(score: Score) -> bool:
    if score.low is None or score.high is None or score.blind is None:
        return False
    return score.low > score.blind if score.direction == "higher" else score.high < score.blind


def _leading(record: Record) -> tuple[str, Score | None]:
    """ROUGE-1 (of pictures, the squared error) where it was measured, else the first metric that was."""
    measured = {name: score for name, score in record.worst_case.items() if score.mean is not None}
    name = next((name for name in (*LEADING, *measured) if name in measured), LEADING[0])
    return name, measured.get(name)
