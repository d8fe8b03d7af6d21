"""Records without private contents: what is left can be shown to who may not see the data."""

from collections.abc import Iterator
from dataclasses import replace

from gradleak.records.schema import AttackRecord, Record

PRIVATE_VALUES = ("labels",)  # findings whose values are facts of private examples


def without_texts(record: Record) -> Record:
    """The record without guesses, traces of them, private texts and labels that were read:
    scores, flags and cost stay."""
    return replace(
        record,
        secrets=tuple(replace(secret, text=None) for secret in record.secrets),
        attacks={key: _without_guesses(attack) for key, attack in record.attacks.items()},
        findings=tuple(
            replace(one, values=()) if one.name in PRIVATE_VALUES else one
            for one in record.findings
        ),
    )


def texts_of(record: Record) -> Iterator[str]:
    """Every private text and every guess that a record holds."""
    yield from (secret.text for secret in record.secrets if secret.text is not None)
    for attack in record.attacks.values():
        yield from (
            guess
            for one in attack.examples
            for guess in (one.guess, one.guess_legacy)
            if guess is not None
        )
        yield from (
            text for batch in attack.batches for _, sentences in batch.guesses for text in sentences
        )


def _without_guesses(attack: AttackRecord) -> AttackRecord:
    return replace(
        attack,
        examples=tuple(
            replace(example, guess=None, guess_legacy=None) for example in attack.examples
        ),
        batches=tuple(replace(batch, guesses=()) for batch in attack.batches),
    )
