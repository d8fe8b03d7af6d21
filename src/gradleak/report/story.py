"""A run told to who has to decide: what happened, what it means, what was not tried, what would change it."""

from collections.abc import Sequence

from gradleak.records.flags import FEWEST_EXAMPLES, FLAGS
from gradleak.records.judgement import OF_PICTURES, Judgement
from gradleak.records.schema import Record, Score
from gradleak.records.settings import Ran, Setting
from gradleak.report.labels import Labels
from gradleak.report.model import Story
from gradleak.report.numbers import counted, number
from gradleak.report.run_verdict import Judgements
from gradleak.report.terminal import line

TOLD = {
    "labels": "the class of every example",
    "lengths": "the length of every text",
    "batch_size": "how many examples a batch holds",
    "defense": "which defense the client uses",
}
NAMED = 3  # settings that are named


def tell(settings: Sequence[Setting], judged: Judgements, labels: Labels) -> Story:
    """Of settings in the order of what they leak: the first is told of."""
    told = settings[0]
    return Story(
        happened=_happened(told, judged[told], labels, is_one_of_several=len(settings) > 1),
        means=tuple(_means(told, judged[told])),
        not_tried=tuple(_not_tried(settings)),
        would_change=tuple(_would_change(settings, judged, labels)),
    )


def is_of_pictures(metric: str) -> bool:
    """Whether a metric compares pictures."""
    return metric in OF_PICTURES


def _things(metric: str, count: int = 2) -> str:
    one = "private picture" if is_of_pictures(metric) else "private text"
    return one if count == 1 else f"{one}s"


def _is_rebuilt(judgement: Judgement) -> bool:
    """Whether an attack did it; updates that name their words leak without."""
    return bool(judgement.above_blind or judgement.whole)


def _happened(
    setting: Setting,
    judgement: Judgement,
    labels: Labels,
    *,
    is_one_of_several: bool,
) -> str:
    where = labels.setting(setting.record) if is_one_of_several else ""
    leaking, metric = _is_rebuilt(judgement), judgement.metric
    score, exact = setting.quoted(metric), _exact(setting)
    whole = 0 if exact is None or exact.mean is None else round(exact.mean * exact.n)
    things, place = _things(metric, score.n), f"In the setting that leaks most ({where}), " if where and leaking else ""
    if not leaking:
        named = judgement.named
        outright = f", yet the updates themselves name every word in {named} of {setting.record.data.batches} batches"
        sentence = f"no attack is shown to have rebuilt more of the {score.n} {things} than a blind guess would"
        sentence += outright if named else ""
    elif exact is not None and whole:
        sentence = f"{whole} of {exact.n} {_things(metric, exact.n)} {'was' if whole == 1 else 'were'} rebuilt word for word"
    elif score.unit == "fraction" and not is_of_pictures(metric):
        much, blind = number(score.mean, score.unit), number(score.blind, score.unit)
        sentence = f"about {much} % of the words of {score.n} {things} were rebuilt, where a blind guess gets {blind} %"
        sentence += "; none came out whole" if exact is not None else ""
    else:
        much, blind = number(score.mean, score.unit), number(score.blind, score.unit)
        came = f"{score.n} {things} {'was' if score.n == 1 else 'were'} rebuilt"
        sentence = f"{came} more closely than by a blind guess ({metric} {much}, blind {blind})"
    sentence = f"{place}{sentence}; {_told(setting, 'exact_match' if whole else metric, labels)}."
    return sentence[0].upper() + sentence[1:]


def _told(setting: Setting, metric: str, labels: Labels) -> str:
    """What the attack knew that got all of it by itself, of several the one that knew least; else what any of them knew."""
    worst = setting.quoted(metric).mean
    alone = [ran for ran in setting.attacks if (score := ran.attack.scores.get(metric)) is not None and score.mean == worst]
    asked: Sequence[Ran] = [min(alone, key=lambda ran: len(ran.attack.knowledge))] if alone else setting.attacks
    known = sorted({fact for ran in asked for fact in ran.attack.knowledge})
    facts = [fact for fact in known if fact != "defense" or setting.record.spec.get("defenses")]
    who = f"the attacker ({labels.attack(asked[0].attack.spec)})" if alone and len(setting.attacks) > 1 else "the attacker"
    return f"{who} was told {'only ' + in_words(facts) if facts else 'nothing beyond the update'}"


def in_words(facts: Sequence[str]) -> str:
    """What an attacker is told, as a person would say it."""
    *first, last = [TOLD.get(fact, fact) for fact in facts] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _means(setting: Setting, judgement: Judgement) -> list[str]:
    exact, leaking, metric = _exact(setting), _is_rebuilt(judgement), judgement.metric
    things = _things(metric)
    if leaking and exact is not None and exact.mean:
        found = [f"Whoever receives such updates can read {things} out of them: protect an update as you protect the data."]
        if judgement.proven:
            found.append(
                f"{judgement.proven} of these guesses are proven: the update itself shows that they are right, without the data."
            )
        return found
    if leaking:
        return [
            f"Updates give away more of the {things} than could be guessed without them: treat them as personal data.",
            "What came out is a lower bound: a stronger attack gets as much or more.",
        ]
    if judgement.named:
        return [f"The words of {things} can be read off the updates, though not their order: treat them as personal data."]
    if judgement.doubts:
        return [
            "Nothing can be concluded about safety: the attacks, and not a defense, may be why little was rebuilt "
            f"({', '.join(judgement.doubts)})."
        ]
    return ["These attacks got no further than chance. That bounds these attacks; it does not show that updates are safe."]


def _not_tried(settings: Sequence[Setting]) -> list[str]:
    records = [setting.record for setting in settings]
    sizes = sorted({int(record.spec.get("batch_size", 1)) for record in records})
    attacks = list(dict.fromkeys(str(ran.attack.spec.get("name")) for setting in settings for ran in setting.attacks))
    most = max(record.data.examples for record in records)
    found = [
        f"Any attack but {', '.join(attacks)}.",
        "A server that sends a model made to leak: this one is honest and only looks.",
        "Several rounds of one client put together: every update is attacked by itself.",
        f"Other batch sizes than {', '.join(map(str, sizes))}, other data than {_one_of(records, 'data')}, "
        f"another protocol than {_one_of(records, 'protocol')}.",
    ]
    if most < FEWEST_EXAMPLES:
        found.append(f"More than {counted(most, 'example', 'examples')}: rare bad cases may be missing.")
    return found


def _would_change(settings: Sequence[Setting], judged: Judgements, labels: Labels) -> list[str]:
    found = []
    leaking = [setting for setting in settings if judged[setting].leaks]
    quiet = [(setting, bool(judged[setting].doubts)) for setting in settings if not judged[setting].leaks]
    if leaking and quiet:
        believed = "No leak was shown, by attacks that can be believed, under: {}. What that costs: gradleak tradeoff."
        doubted = "Little came out, for reasons that may be the attacks' own, under: {}."
        for in_doubt, words in ((False, believed), (True, doubted)):
            group = [labels.setting(setting.record) for setting, unsure in quiet if unsure == in_doubt]
            more = f" and {len(group) - NAMED} more" if len(group) > NAMED else ""
            found += [words.format("; ".join(group[:NAMED]) + more)] if group else []
    elif leaking:
        tried = "None of the settings tried" if len(settings) > 1 else "Nothing tried here"
        found.append(f"{tried} kept it from leaking. Try defenses: gradleak tradeoff shows what each costs.")
    advice = [flag.what_to_do for name, flag in FLAGS.items() if name in judged[settings[0]].doubts]
    return found + ([] if leaking else advice) or ["More examples, other data and stronger attacks; each can only add to this."]


def _one_of(records: Sequence[Record], field: str) -> str:
    return " or ".join(dict.fromkeys(line(record.spec.get(field)) for record in records))


def _exact(setting: Setting) -> Score | None:
    return setting.worst("exact_match") if "exact_match" in setting.metrics() else None
