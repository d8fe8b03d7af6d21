"""What the defenses of an audit prove, for its record."""

import functools

from gradleak.core.defense import Defense
from gradleak.core.errors import GradleakError
from gradleak.records.schema import GuaranteeRecord


def accounting_refusal(defenses: tuple[Defense, ...]) -> GradleakError | None:
    """Why the guarantees cannot be told here, such as a library that is missing: known before anything is attacked."""
    try:
        guarantee_records(defenses)
    except GradleakError as error:
        return error
    return None


@functools.lru_cache(maxsize=256)
def guarantee_records(defenses: tuple[Defense, ...]) -> tuple[GuaranteeRecord, ...]:
    """Every reading of every defense, by its accountant's name."""
    return tuple(
        GuaranteeRecord(
            defense=defense.name,
            reading=one.reading,
            protects=one.protects,
            accountant=one.accountant,
            epsilon=one.epsilon,
            delta=one.delta,
            against_server=not defense.channel().after_server,
            epsilon_in_words=one.epsilon_in_words,
        )
        for defense in defenses
        for one in defense.guarantees()
    )
