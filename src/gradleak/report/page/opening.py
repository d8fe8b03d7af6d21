"""The verdict over a whole run: where most leaks, what the other settings are, and every reason to doubt that."""

from collections.abc import Mapping, Sequence

from gradleak.records.flags import FLAGS
from gradleak.records.judgement import (
    DOUBTS,
    LEADING,
    LEAKS,
    NOT_JUDGED,
    NOT_SHOWN,
    Coverage,
    Judgement,
    raised_beside,
)
from gradleak.records.schema import Record
from gradleak.records.settings import Setting
from gradleak.report.labels import Labels
from gradleak.report.numbers import gain, mean_and_interval, number
from gradleak.report.page.section import FlagLine, ScoreLine, Verdict
from gradleak.report.verdict import closing_sentence, shares, worst_case_sentence

Judgements = Mapping[Setting, Judgement]
NO_PROOF = "That is not a proof of safety."


def order(judged: Judgements) -> list[Setting]:
    """The settings that leak first, of these the ones that leak most; texts before pictures, whose scores have no scale."""

    def rank(setting: Setting) -> tuple[bool, int, float]:
        metric = judged[setting].metric
        mean = setting.mean(metric)
        leak = float("-inf") if mean is None else mean if setting.known(metric).direction == "higher" else -mean
        medium = LEADING.index(metric) if metric in LEADING else len(LEADING)
        return not judged[setting].leaks, medium, -leak

    return sorted(judged, key=rank)


def verdict(settings: Sequence[Setting], judged: Judgements, coverage: Coverage, labels: Labels) -> Verdict:
    """Of settings in the order of what they leak."""
    worst = settings[0]
    record = worst.merged()
    exact = record.worst_case.get("exact_match")
    words = [judged[setting].verdict for setting in settings]
    word = next(one for one in (LEAKS, NOT_JUDGED, NOT_SHOWN) if one in words)
    return Verdict(
        verdict=word,
        leaks=word == LEAKS,
        in_doubt=word == NOT_JUDGED,
        headline=" ".join(filter(None, [_headline(settings, judged), _uncovered(coverage)])),
        sentences=tuple(_sentences(record, judged[worst], labels, worst, len(settings))),
        setting=labels.setting(record),
        exact="" if exact is None or exact.mean is None else f"{round(exact.mean * exact.n)} of {exact.n}",
        scores=tuple(ScoreLine(name, one) for name, one in record.worst_case.items() if one.mean is not None),
        knowledge=tuple(sorted({fact for ran in worst.attacks for fact in ran.attack.knowledge})),
        flags=tuple(flag_lines(settings, judged, labels)),
    )


def _headline(settings: Sequence[Setting], judged: Judgements) -> str:
    share = shares([judged[setting].verdict for setting in settings])
    leaking = [setting for setting in settings if judged[setting].leaks]
    if not leaking:
        chance = "no attack is shown to have rebuilt more than a blind guess"
        return f"{share}{': ' if len(settings) == 1 else '; '}{chance}. {NO_PROOF}"
    first = judged[leaking[0]]
    if first.named and not first.above_blind and not first.whole:
        batches = leaking[0].record.data.batches
        named = f"The updates themselves name every word in {first.named} of {batches} batches"
        return f"{named}; no attack rebuilt more than a blind guess." + (f" {share}." if len(settings) > 1 else "")
    by_metric = {judged[setting].metric: setting for setting in reversed(leaking)}
    worst = [_quote(setting, judged[setting].metric) for setting in sorted(by_metric.values(), key=leaking.index)]
    return f"{share}. In the worst, {'; '.join(worst)}."


def _quote(setting: Setting, metric: str) -> str:
    score = setting.worst(metric)
    much = f"{metric} {mean_and_interval(score)}, blind {number(score.blind, score.unit)}, gain {gain(score)}"
    return f"{much}{' (in %)' if score.unit == 'fraction' else ''}"


def _uncovered(coverage: Coverage) -> str:
    """Nothing where all is there."""
    return coverage.sentence() if coverage.gaps else ""


def _sentences(record: Record, judgement: Judgement, labels: Labels, worst: Setting, settings: int) -> list[str]:
    most = "Most was rebuilt under" if judgement.leaks else "The highest score is under"
    where = [f"{most}: {labels.setting(record)}."] if settings > 1 else []
    told = sorted({fact for ran in worst.attacks for fact in ran.attack.knowledge})
    return [
        *where,
        worst_case_sentence(record),
        closing_sentence(judgement, record),
        f"The attacker was told: {', '.join(told) or 'nothing beyond the update'}; attacks: {', '.join(record.attacks)}.",
    ]


def flag_lines(settings: Sequence[Setting], judged: Judgements, labels: Labels) -> list[FlagLine]:
    """Every flag that stands against a setting of the run, once."""
    found: dict[str, tuple[dict[str, None], int, str]] = {}
    for setting in settings:
        here: dict[str, tuple[dict[str, None], str]] = {}
        for summary in setting.summaries:
            for name, details in raised_beside(judged[setting], summary.record, summary.columns).items():
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
