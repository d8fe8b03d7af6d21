"""Secrets beside guesses, word by word; withheld unless asked for, and then nothing of them is in the page."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from gradleak.records.judgement import leading_metric
from gradleak.records.schema import ExampleRecord, Record
from gradleak.records.settings import Ran, Setting
from gradleak.report.labels import Labels
from gradleak.report.page.section import GalleryItem, Word
from gradleak.report.shown_guesses import WORD, Mark, mark_words, printable
from gradleak.report.terminal.reconstructions import Secrets, kept_secrets

ITEMS = 200
PICTURE = "data:image/png;base64,"  # how a record holds a picture
PAIRS = 40  # attacks on settings, of which guesses are shown
NAMES = {Mark.PAIR: "pair", Mark.WORD: "word", Mark.WRONG: "wrong"}
Item = TypeVar("Item")
SecretsOf = Callable[[Record], Secrets]  # the private texts of a record, where they are at hand


def gallery(settings: Sequence[Setting], labels: Labels, secrets_of: SecretsOf, show: bool) -> list[GalleryItem]:
    """The first examples of every attack, not the best: chosen ones would flatter it."""
    chosen = spread([(setting, ran) for setting in settings for ran in setting.attacks], PAIRS)
    each = max(3, ITEMS // max(1, len(chosen)))
    found: list[GalleryItem] = []
    for setting, ran in chosen:
        record = ran.source.whole()
        key = next(key for key, attack in ran.source.record.attacks.items() if attack is ran.attack)
        secrets = {**secrets_of(record), **kept_secrets(record)}
        hashes = {(secret.batch, secret.position): secret.hash for secret in record.secrets}
        found += [_item(example, ran, setting, labels, secrets, hashes, show) for example in record.attacks[key].examples[:each]]
    return found


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """So many of them, evenly taken."""
    if len(items) <= most:
        return list(items)
    return [items[place * len(items) // most] for place in range(most)]


def _item(
    example: ExampleRecord,
    ran: Ran,
    setting: Setting,
    labels: Labels,
    secrets: Secrets,
    hashes: Mapping[tuple[int, int], str],
    show: bool,
) -> GalleryItem:
    place = (example.batch, example.position)
    secret = secrets.get(place)
    metric = leading_metric(ran.attack.scores)
    return GalleryItem(
        attack=labels.attack(ran.attack.spec),
        defense=labels.defense(setting.record),
        setting=labels.setting(setting.record),
        batch=example.batch,
        position=example.position,
        record=ran.source.id,
        secret_hash=hashes.get(place, "")[:12],
        secret=printable(secret) if show and secret is not None else None,
        words=() if _is_picture(example.guess) else tuple(_words(secret, example.guess, show)),
        picture=example.guess if show and _is_picture(example.guess) else None,
        metric=metric,
        unit=ran.attack.scores[metric].unit if metric in ran.attack.scores else "",
        score=example.values.get(metric),
        exact=example.values.get("exact_match") == 1,
        certified=example.certified,
    )


def _is_picture(guess: str | None) -> bool:
    return guess is not None and guess.startswith(PICTURE)


def _words(secret: str | None, guess: str | None, show: bool) -> list[Word]:
    if guess is None:
        return []
    if secret is None:
        marked = [(word, "unknown") for word in WORD.findall(guess)]
    else:
        marked = [(word, NAMES[mark]) for word, mark in mark_words(secret, guess)]
    written = WORD.findall(guess)  # marks are of lower-cased words
    return [Word(mark, printable(text) if show else None) for (_, mark), text in zip(marked, written, strict=True)]
