"""The story of a run for who has to decide: what happened, what it means, what is left open."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradleak.records.flags import FEWEST_EXAMPLES, FLAGS
from gradleak.records.judgement import OF_PICTURES, Judgement
from gradleak.records.schema import Record
from gradleak.records.settings import Setting
from gradleak.report.naming import Labels, write_component
from gradleak.report.numbers import write_count, write_number
from gradleak.report.page.section import JudgedRun, find_exact_score

TOLD = {
    "labels": "the class of every example",
    "lengths": "the length of every text",
    "batch_size": "how many examples a batch holds",
    "defense": "which defense the client uses",
}
NAMED = 3  # settings that are named


@dataclass(frozen=True)
class Story:
    """The run told to who has to decide."""

    happened: str  # one sentence
    means: tuple[str, ...]
    not_tried: tuple[str, ...]
    would_change: tuple[str, ...]


def tell_story(run: JudgedRun) -> Story:
    """Tells of the setting that leaks most, and of the others what they show."""
    worst = run.settings[0]
    return Story(
        happened=_say_what_happened(worst, run),
        means=tuple(_say_what_it_means(worst, run.judgements[worst])),
        not_tried=tuple(_say_what_was_not_tried(run.settings)),
        would_change=tuple(_say_what_would_change_it(run)),
    )


def _name_things(metric: str, count: int = 2) -> str:
    one = "private picture" if metric in OF_PICTURES else "private text"
    return one if count == 1 else f"{one}s"


def _is_rebuilt(judgement: Judgement) -> bool:
    """Whether an attack did it; updates that name their words leak without."""
    return bool(judgement.above_blind or judgement.whole)


def _say_what_happened(setting: Setting, run: JudgedRun) -> str:
    judgement, labels = run.judgements[setting], run.labels
    leaking, metric = _is_rebuilt(judgement), judgement.metric
    score, exact = setting.choose_quote(metric), find_exact_score(setting)
    whole = 0 if exact is None or exact.mean is None else round(exact.mean * exact.n)
    things = _name_things(metric, score.n)
    much, blind = write_number(score.mean, score.unit), write_number(score.blind, score.unit)
    if not leaking:
        sentence = (
            f"no attack is shown to have rebuilt more of the {score.n} {things} than a "
            "blind guess would"
        )
        if judgement.named:
            sentence += (
                f", yet the updates themselves name every word in {judgement.named} of "
                f"{setting.record.data.batches} batches"
            )
    elif exact is not None and whole:
        sentence = (
            f"{whole} of {exact.n} {_name_things(metric, exact.n)} "
            f"{'was' if whole == 1 else 'were'} rebuilt word for word"
        )
    elif score.unit == "fraction" and metric not in OF_PICTURES:
        sentence = (
            f"about {much} % of the words of {score.n} {things} were rebuilt, where a "
            f"blind guess gets {blind} %{'' if exact is None else '; none came out whole'}"
        )
    else:
        sentence = (
            f"{score.n} {things} {'was' if score.n == 1 else 'were'} rebuilt more closely than by a"
            f" blind guess ({metric} {much}, blind {blind})"
        )
    if leaking and len(run.settings) > 1:
        where = labels.setting(setting.record)
        sentence = f"in the setting that leaks most ({where}), {sentence}"
    known = _say_what_was_known(setting, "exact_match" if whole else metric, labels)
    return f"{sentence[0].upper()}{sentence[1:]}; {known}."


def _say_what_was_known(setting: Setting, metric: str, labels: Labels) -> str:
    """Says what the attack knew that got all of it by itself, or else what any of them knew.

    Of several attacks that did, it is the one that knew least.
    """
    worst, who = setting.choose_quote(metric).mean, "the attacker"
    alone = [
        ran
        for ran in setting.attacks
        if (score := ran.attack.scores.get(metric)) is not None and score.mean == worst
    ]
    asked = sorted(alone, key=lambda ran: len(ran.attack.knowledge))[:1] or setting.attacks
    if alone and len(setting.attacks) > 1:
        who += f" ({labels.attack(asked[0].attack.spec)})"
    known = {fact for ran in asked for fact in ran.attack.knowledge}
    facts = sorted(known if setting.record.spec.get("defenses") else known - {"defense"})
    return f"{who} was told {'only ' + list_facts(facts) if facts else 'nothing beyond the update'}"


def list_facts(facts: Sequence[str]) -> str:
    """Lists what an attacker is told, as a person would say it."""
    *first, last = [TOLD.get(fact, fact) for fact in facts] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _say_what_it_means(setting: Setting, judgement: Judgement) -> Iterator[str]:
    exact, things = find_exact_score(setting), _name_things(judgement.metric)
    if _is_rebuilt(judgement) and exact is not None and exact.mean:
        yield (
            f"Whoever receives such updates can read {things} out of them: protect an update as "
            "you protect the data."
        )
        if judgement.proven == 1:
            yield (
                "1 of these guesses is proven: the update itself shows that it is right, without "
                "the data."
            )
        elif judgement.proven:
            yield (
                f"{judgement.proven} of these guesses are proven: the update itself shows that "
                "they are right, without the data."
            )
    elif _is_rebuilt(judgement):
        yield (
            f"Updates give away more of the {things} than could be guessed without them: treat "
            "them as personal data."
        )
        yield "What came out is a lower bound: a stronger attack gets as much or more."
    elif judgement.named:
        yield (
            f"The words of {things} can be read off the updates, though not their order: treat "
            "them as personal data."
        )
    elif judgement.doubts:
        yield (
            "Nothing can be concluded about safety: the attacks, and not a defense, may be why "
            f"little was rebuilt ({', '.join(judgement.doubts)})."
        )
    else:
        yield (
            "These attacks got no further than chance. That bounds these attacks; it does not show "
            "that updates are safe."
        )


def _say_what_was_not_tried(settings: Sequence[Setting]) -> Iterator[str]:
    records = [setting.record for setting in settings]
    sizes = sorted({int(record.spec.get("batch_size", 1)) for record in records})
    attacks = (str(ran.attack.spec.get("name")) for one in settings for ran in one.attacks)
    yield from (
        f"Any attack but {', '.join(dict.fromkeys(attacks))}.",
        "A server that sends a model made to leak: this one is honest and only looks.",
        "Several rounds of one client put together: every update is attacked by itself.",
        f"Other batch sizes than {', '.join(map(str, sizes))}, other data than "
        f"{_list_values(records, 'data')}, another protocol than "
        f"{_list_values(records, 'protocol')}.",
    )
    most = max(record.data.examples for record in records)
    if most < FEWEST_EXAMPLES:
        examples = write_count(most, "example", "examples")
        yield f"More than {examples}: rare bad cases may be missing."


def _say_what_would_change_it(run: JudgedRun) -> list[str]:
    found = []
    quiet = [setting for setting in run.settings if not run.judgements[setting].leaks]
    if run.leaking and quiet:
        believed = (
            "No leak was shown, by attacks that can be believed, under: {}. What that "
            "costs: gradleak tradeoff."
        )
        doubted = "Little came out, for reasons that may be the attacks' own, under: {}."
        for in_doubt, words in ((False, believed), (True, doubted)):
            group = [
                run.labels.setting(setting.record)
                for setting in quiet
                if bool(run.judgements[setting].doubts) == in_doubt
            ]
            more = f" and {len(group) - NAMED} more" if len(group) > NAMED else ""
            found += [words.format("; ".join(group[:NAMED]) + more)] if group else []
    elif run.leaking:
        tried = "None of the settings tried" if len(run.settings) > 1 else "Nothing tried here"
        found.append(
            f"{tried} kept it from leaking. Try defenses: gradleak tradeoff shows what each costs."
        )
    else:
        doubts = run.judgements[run.settings[0]].doubts
        found += [flag.what_to_do for name, flag in FLAGS.items() if name in doubts]
    return found or ["More examples, other data and stronger attacks; each can only add to this."]


def _list_values(records: Sequence[Record], field: str) -> str:
    return " or ".join(dict.fromkeys(write_component(record.spec.get(field)) for record in records))
