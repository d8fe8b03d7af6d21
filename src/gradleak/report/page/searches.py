"""How searches went: the objective and the likeness of the guess, step by step."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from gradleak.records.schema import AttackRecord
from gradleak.records.settings import Ran, Setting
from gradleak.report.labels import Labels
from gradleak.report.page.gallery import SecretsOf, spread
from gradleak.report.page.section import TraceLine, TracePoint
from gradleak.report.shown_guesses import words_of
from gradleak.report.terminal.reconstructions import Secrets, kept_secrets

LINES = 6
POINTS = 60


def traces(settings: Sequence[Setting], labels: Labels, secrets_of: SecretsOf) -> list[TraceLine]:
    """One an attack, under the setting that comes first; attacks that record no steps have none."""
    firsts: dict[str, tuple[Setting, Ran]] = {}
    for setting in settings:
        for ran in setting.attacks:
            firsts.setdefault(labels.attack(ran.attack.spec), (setting, ran))
    found = []
    for name, (setting, ran) in spread(list(firsts.items()), 2 * LINES):
        record = ran.source.whole()
        key = next(key for key, attack in ran.source.record.attacks.items() if attack is ran.attack)
        secrets = {**secrets_of(record), **kept_secrets(record)}
        objective, similarity = _objective(record.attacks[key]), _similarity(record.attacks[key], secrets)
        if len(objective) > 1 or len(similarity) > 1:
            found.append(TraceLine(name, labels.setting(setting.record), record.id, tuple(objective), tuple(similarity)))
    return found[:LINES]


def likeness(secret: str, guess: str) -> float:
    """The F1 of shared words, each spent once: ROUGE-1 without special tokens."""
    known, guessed = Counter(words_of(secret)), Counter(words_of(guess))
    shared, total = sum((known & guessed).values()), known.total() + guessed.total()
    return 2 * shared / total if total else 0.0


def _objective(attack: AttackRecord) -> list[TracePoint]:
    return _points((step, loss) for batch in attack.batches for step, loss in batch.losses if loss is not None)


def _similarity(attack: AttackRecord, secrets: Secrets) -> list[TracePoint]:
    """Of batches of one example: on the way, guesses are not yet aligned to secrets."""
    return _points(
        (step, likeness(secrets[batch.batch, 0], sentences[0]))
        for batch in attack.batches
        for step, sentences in batch.guesses
        if len(sentences) == 1 and (batch.batch, 0) in secrets
    )


def _points(values: Iterable[tuple[int, float]]) -> list[TracePoint]:
    by_step: dict[int, list[float]] = {}
    for step, value in values:
        by_step.setdefault(step, []).append(value)
    steps = spread(sorted(by_step), POINTS)
    return [
        TracePoint(step, statistics.median(by_step[step]), min(by_step[step]), max(by_step[step]), len(by_step[step]))
        for step in steps
    ]
