"""What was rebuilt, between what no attack could do and nothing: rebuilt ≤ at most ≤ guaranteed."""

from collections.abc import Iterator
from dataclasses import dataclass

from gradleak.records.schema import BoundRecord, Record, Score
from gradleak.records.settings import looks

MEASURES = ("token_accuracy", "exact_match")
ORACLE, GUARANTEE, INFORMATION = "oracle", "guarantee", "information"
SECRETS, CEILING, COUNT = "exposure", "ceiling", "count"
GUARANTEE_OF_RUN = "guarantee if participation is unknown"


@dataclass(frozen=True)
class Bracket:
    """One measure of one setting, from both sides."""

    of: str  # one of MEASURES
    # The first attack that the audit named, not the best of several after the fact; none of a
    # setting on which only the blind guess was run
    attack: str | None
    rebuilt: Score | None
    at_most: BoundRecord  # by an oracle, under the prior
    guaranteed: BoundRecord | None  # by the noise alone; none where nothing is clipped

    @property
    def is_crossed(self) -> bool:
        """Whether the attack did clearly better than the oracle: these texts are not as the prior
        believes, or guesses were aligned."""
        if self.rebuilt is None or self.rebuilt.low is None or self.at_most.high is None:
            return False
        return self.rebuilt.low > self.at_most.high

    @property
    def room(self) -> float | None:
        """How much more than was rebuilt an attack might do, by the upper end of the bound."""
        if self.rebuilt is None or self.rebuilt.mean is None:
            return None
        most = self.at_most.mean if self.at_most.high is None else self.at_most.high
        return max(0.0, most - self.rebuilt.mean)


def list_brackets(record: Record) -> Iterator[Bracket]:
    """Yields a bracket for each measure that was bounded."""
    if record.bounds is None:
        return
    named = next((one for one in record.attacks.items() if looks(one[1])), None)
    for of in MEASURES:
        at_most = find_bound(record, ORACLE, of)
        if at_most is not None:
            rebuilt = None if named is None else named[1].scores.get(of)
            guaranteed = find_bound(record, GUARANTEE, of)
            yield Bracket(of, named and named[0], rebuilt, at_most, guaranteed)


def find_bound(record: Record, bound: str, of: str) -> BoundRecord | None:
    """Returns a bound by its name and what it bounds."""
    bounds = () if record.bounds is None else record.bounds.bounds
    return next((one for one in bounds if (one.bound, one.of) == (bound, of)), None)
