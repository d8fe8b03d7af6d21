"""What updates say outright, held against the secrets. Of words only counts and shares are kept: a bag is like a guess."""

from collections import Counter
from collections.abc import Sequence

from gradleak.attacks.evidence import Evidence, findings
from gradleak.core.batch import PrivateBatch
from gradleak.core.observation import Observation
from gradleak.records.schema import FindingRecord

WITHOUT_WORDS = ("labels", "longest_length", "distinct_tokens")  # findings whose values are no tokens


def finding_records(observations: Sequence[Observation], private: Sequence[PrivateBatch]) -> list[FindingRecord]:
    """Everything that can be read off the updates, each with how much of it is true."""
    return [_record(seen, private[seen.index], found) for seen in observations for found in findings(seen)]


def _record(observation: Observation, private: PrivateBatch, found: Evidence) -> FindingRecord:
    truth = _truth(observation, private).get(found.name)
    right = None if truth is None else (truth & Counter(found.values)).total()
    return FindingRecord(
        batch=observation.index,
        name=found.name,
        exact=found.exact,
        source=found.source,
        count=len(found.values),
        values=found.values if found.name in WITHOUT_WORDS else (),
        recall=_share(right, truth.total() if truth is not None else 0),
        precision=_share(right, len(found.values)),
    )


def _truth(observation: Observation, private: PrivateBatch) -> dict[str, Counter[int]]:
    """What would have been right to say, by name of the finding; a set of tokens has each once."""
    if private.batch.ids is None:
        return {"labels": Counter(private.batch.labels.tolist())}
    tokens = {token for row, length in zip(private.batch.ids.tolist(), private.lengths, strict=True) for token in row[:length]}
    vocabulary = observation.target.vocabulary
    special = tokens & {*vocabulary.specials, *vocabulary.prefix, *vocabulary.suffix, vocabulary.pad}
    labels = () if observation.target.labels_are_tokens else private.batch.labels.tolist()
    return {
        "labels": Counter(labels),
        "longest_length": Counter([max(private.lengths)]),
        "bag_of_words": Counter(tokens - special),
        "special_tokens": Counter(special),
    }


def _share(right: int | None, total: int) -> float | None:
    return None if right is None or not total else right / total
