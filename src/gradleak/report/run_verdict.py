"""The verdict over a whole run: where most leaks, and every reason to doubt that."""

from collections.abc import Sequence

from gradleak.records.flags import FLAGS
from gradleak.records.schema import Record
from gradleak.records.settings import Setting
from gradleak.report.attack_heat import LOW, score_leak
from gradleak.report.findings import named_words
from gradleak.report.labels import Labels
from gradleak.report.model import FlagLine, ScoreLine, Verdict
from gradleak.report.numbers import gain, mean_and_interval, number
from gradleak.report.verdict import beats_blind, closing_sentence, raised, worst_case_sentence

PAIRED = ("rouge1", "mse")  # of texts, of pictures: what near_chance is decided by, example by example
# A low score under one of these is not evidence: the attacks, not the defense, may be why it is low.
DOUBTS = ("search_failed", "not_adaptive", "dead_gradient", "no_objective", "unmodelled_dropout", "few_examples")
EVERY_ATTACK = ("not_adaptive", "no_objective")  # one attack without the fault is enough


def leaks(setting: Setting, metric: str) -> bool:
    """Whether more was rebuilt than by a blind guess, beyond chance; quick, from what each audit found."""
    if metric in PAIRED:
        return any(all(flag.name != "near_chance" for flag in ran.attack.flags) for ran in setting.attacks)
    return any(metric in beats_blind(summary.record) for summary in setting.summaries)


def doubts(setting: Setting) -> list[str]:
    """Flags that make a low score of this setting unreliable."""
    names = [{flag.name for flag in ran.attack.flags} for ran in setting.attacks if ran.attack.spec.get("name") != "blind"]
    if not names:
        return ["only_blind"]
    return [name for name in DOUBTS if (all if name in EVERY_ATTACK else any)(name in one for one in names)]


def order(settings: Sequence[Setting], metric: str) -> list[Setting]:
    """The settings that leak most first."""

    def leak(setting: Setting) -> float:
        mean = setting.mean(metric)
        higher = setting.record.worst_case[metric].direction == "higher"
        return float("-inf") if mean is None else mean if higher else -mean

    return sorted(settings, key=leak, reverse=True)


def verdict(settings: Sequence[Setting], labels: Labels, metric: str) -> Verdict:
    """Of settings in the order of what they leak."""
    worst = settings[0]
    record = worst.merged()
    leaking = sum(leaks(setting, metric) for setting in settings)
    exact = record.worst_case.get("exact_match")
    score = record.worst_case[metric]
    doubtful = not leaking or score_leak(score) < LOW
    return Verdict(
        leaks=leaking > 0 or named_words(record) > 0,
        in_doubt=doubtful and bool(doubts(worst)),
        headline=_headline(record, metric, leaking, len(settings)),
        sentences=tuple(_sentences(record, labels, worst, len(settings))),
        setting=labels.setting(record),
        exact="" if exact is None or exact.mean is None else f"{round(exact.mean * exact.n)} of {exact.n}",
        scores=tuple(ScoreLine(name, one) for name, one in record.worst_case.items() if one.mean is not None),
        knowledge=tuple(sorted({fact for ran in worst.attacks for fact in ran.attack.knowledge})),
        flags=tuple(flag_lines(settings, labels)),
    )


def _headline(record: Record, metric: str, leaking: int, settings: int) -> str:
    score = record.worst_case[metric]
    named = named_words(record)
    if not leaking and named:
        batches = f"{named} of {record.data.batches} batches"
        return f"The updates themselves name every word in {batches}; no attack rebuilt more than a blind guess."
    if not leaking:
        return "Not shown to leak: no attack rebuilt more than a blind guess. That is not a proof of safety."
    share = "This setting leaks" if settings == 1 else f"{leaking} of {settings} settings leak"
    much = f"{metric} {mean_and_interval(score)}, blind {number(score.blind, score.unit)}, gain {gain(score)}"
    return f"{share}. In the worst, {much}{' (in %)' if score.unit == 'fraction' else ''}."


def _sentences(record: Record, labels: Labels, worst: Setting, settings: int) -> list[str]:
    where = [f"Most was rebuilt under: {labels.setting(record)}."] if settings > 1 else []
    told = sorted({fact for ran in worst.attacks for fact in ran.attack.knowledge})
    return [
        *where,
        worst_case_sentence(record),
        closing_sentence(record),
        f"The attacker was told: {', '.join(told) or 'nothing beyond the update'}; attacks: {', '.join(record.attacks)}.",
    ]


def flag_lines(settings: Sequence[Setting], labels: Labels) -> list[FlagLine]:
    """Every flag raised in the run, once."""
    found: dict[str, tuple[dict[str, None], int, str]] = {}
    for setting in settings:
        here: dict[str, tuple[dict[str, None], str]] = {}
        for summary in setting.summaries:
            for name, details in raised(summary.record).items():
                attacks, detail = here.setdefault(name, ({}, next(iter(details.values()))))
                attacks.update({labels.attack(summary.record.attacks[key].spec): None for key in details if key})
        for name, (attacks, detail) in here.items():
            before, count, first = found.get(name, ({}, 0, detail))
            found[name] = ({**before, **attacks}, count + 1, first)
    lines = [_flag_line(name, *rest) for name, rest in found.items()]
    return sorted(lines, key=lambda line: not line.lowers_trust)


def _flag_line(name: str, attacks: dict[str, None], settings: int, detail: str) -> FlagLine:
    flag = FLAGS.get(name)  # a later version may know more flags
    meaning, what_to_do = (flag.meaning, flag.what_to_do) if flag else ("", "")
    return FlagLine(name, tuple(attacks), settings, detail, meaning, what_to_do, name in DOUBTS)
