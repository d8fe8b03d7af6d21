"""What the defenses of an audit prove, for its record."""

from collections.abc import Sequence

from gradleak.core.defense import Defense
from gradleak.records.schema import GuaranteeRecord


def guarantee_records(defenses: Sequence[Defense]) -> tuple[GuaranteeRecord, ...]:
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
