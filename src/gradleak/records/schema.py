"""The shape of a record: one audit, everything needed to redraw and to doubt its numbers."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from gradleak.records.files import RecordError
from gradleak.records.flags import RaisedFlag
from gradleak.records.plain import from_plain, to_plain

SCHEMA = "gradleak.record/1"


@dataclass(frozen=True)
class Score:
    """One metric over all examples, beside what the blind attack scores on the same ones."""

    mean: float | None
    low: float | None
    high: float | None
    blind: float | None
    blind_low: float | None
    blind_high: float | None
    unit: str
    direction: str  # "higher" or "lower" leaks more
    n: int  # examples the metric applies to
    # Of which the best counts: as many as attacks, in a worst case over them
    blind_guesses: int = 1


@dataclass(frozen=True)
class SecretRecord:
    """One private example, by keyed hash; its text only where the user asked to keep it."""

    batch: int
    position: int
    hash: str
    tokens: int
    text: str | None = None
    row: int | None = None  # its number in the split it comes from, from 0


@dataclass(frozen=True)
class ExampleRecord:
    """The guess aligned to one private example and its values by metric; a guess may be the secret,
    so it can be left out.

    Beside them stand the values of the blind guess, and of one more that was drawn for this attack:
    the worst case over attacks is held against as many.
    """

    batch: int
    position: int
    guess: str | None = None
    guess_legacy: str | None = None
    certified: bool = False
    values: dict[str, float | None] = field(default_factory=dict)
    blind_values: dict[str, float | None] = field(default_factory=dict)
    # Rebuilt whole, too long to be hit by chance, and not by the blind guess
    beyond_luck: bool = False
    draw_values: dict[str, float | None] = field(default_factory=dict)  # of a draw for this attack


@dataclass(frozen=True)
class BatchRecord:
    """How the attack on one client's batch went."""

    batch: int
    loss: float | None = None
    objective_at_guess: float | None = None
    objective_at_truth: float | None = None
    update_norm: float | None = None
    losses: tuple[tuple[int, float | None], ...] = ()  # (step, objective)
    guesses: tuple[tuple[int, tuple[str, ...]], ...] = ()  # (step, text of each example)
    seconds: float = 0.0
    steps: int = 0
    # "nats" of a likelihood, "log" of a distance; a distance itself has none
    objective_unit: str = ""
    objective_rounding: float | None = None  # by how much objectives may differ for no other reason
    right: bool | None = None  # whether the guess is the secret; none of pictures


@dataclass(frozen=True)
class FindingRecord:
    """What one client's update says outright, without any attack. Words are counted and never
    kept: they are the secret."""

    batch: int
    name: str  # labels, longest_length, distinct_tokens, bag_of_words, special_tokens
    exact: bool  # certain, or an estimate
    source: str
    count: int  # how many values were read
    values: tuple[int, ...] = ()  # what was read, unless that is words
    # The share of the truth that was read; none where there is nothing to compare with
    recall: float | None = None
    precision: float | None = None  # the share of what was read that is true


@dataclass(frozen=True)
class GuaranteeRecord:
    """One reading of one defense as (ε, δ)-differential privacy; ε is none where it is infinite
    or could not be computed."""

    defense: str
    reading: str  # "one release" or "whole run"
    protects: str  # "example" or "client"
    accountant: str
    epsilon: float | None
    delta: float
    against_server: bool = True  # whether it holds towards who sees the update
    epsilon_in_words: str = ""  # where it is none: what it is instead, a colon, and why


@dataclass(frozen=True)
class NoiseRecord:
    """The expected norm of a defense's noise over the norm of what would have been seen without
    it."""

    ratio: float  # the median over the batches
    least: float
    most: float
    by_tensor: dict[str, float | None]  # medians; none where a tensor has no gradient at all
    by_batch: tuple[float, ...] = ()  # nothing where it was published


@dataclass(frozen=True)
class BoundRecord:
    """One thing that no attack could do better on this setting, and what that rests on."""

    bound: str  # oracle, information, guarantee or exposure
    of: str  # what it bounds: token_accuracy, exact_match, bits
    mean: float  # of what holds for certain, the number itself
    low: float | None  # ends of the 95 % interval over client batches
    high: float | None
    without_update: float | None  # the same for who is told as much, but not the update
    unit: str  # fraction or bits
    kind: str  # "theorem" or "estimate"
    n: int  # secrets it was measured on
    assumes: str  # in sentences
    protects: str = "example"  # or client


@dataclass(frozen=True)
class BoundsRecord:
    """What no attack could do, however it searches."""

    prior: str
    words: int | None  # on each of the oracle's lists; none: the whole vocabulary
    rounds: int  # updates of the same batch that are seen while the model stands still
    bounds: tuple[BoundRecord, ...]
    seconds: float = 0.0
    remarks: tuple[str, ...] = ()  # what is not bounded, and why, in sentences


@dataclass(frozen=True)
class CostRecord:
    """What an attack took over all batches."""

    seconds: float = 0.0
    steps: int = 0
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class FateRecord:
    """What kept one attack of several from a guess of its own, or from its last word."""

    fate: str  # refused, failed, cut or no_time
    batches: tuple[int, ...]
    reason: str = ""  # in a sentence


@dataclass(frozen=True)
class StageRecord:
    """One attack of several in turn: what it scored on the batches that reached it."""

    attack: str
    batches: tuple[int, ...]
    certified: int  # batches whose guess it proved
    seconds: float
    scores: dict[str, Score]
    # Of batches on which it did not end by itself with a guess
    fates: tuple[FateRecord, ...] = ()


@dataclass(frozen=True)
class AttackRecord:
    """Everything one attack did in this audit."""

    spec: dict[str, Any]
    scores: dict[str, Score]
    examples: tuple[ExampleRecord, ...] = ()
    batches: tuple[BatchRecord, ...] = ()
    knowledge: tuple[str, ...] = ()
    flags: tuple[RaisedFlag, ...] = ()
    cost: CostRecord = CostRecord()
    stages: tuple[StageRecord, ...] = ()  # where it is several attacks in turn
    # Of an attack that guesses labels it was not told; in any order within a batch
    label_accuracy: float | None = None
    version: int = 1  # of the attack's answers


@dataclass(frozen=True)
class DataRecord:
    """Which private data, without saying what is in it."""

    hash: str
    batches: int
    examples: int
    truncated: int = 0  # texts longer than the model reads
    # How it was read, where that is not plain, in sentences
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class TargetRecord:
    """Which model, and how much of its update was seen."""

    name: str
    fingerprint: str
    parameters: int
    visible_parameters: int
    model: str = ""  # what kind of model it is, in words


@dataclass(frozen=True)
class Record:
    """One audit. Its id is the hash of its spec, so the same setting always lands in the same
    file."""

    created: str  # ISO 8601, UTC
    spec: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    data: DataRecord
    target: TargetRecord
    secrets: tuple[SecretRecord, ...]
    attacks: dict[str, AttackRecord]
    worst_case: dict[str, Score]
    flags: tuple[RaisedFlag, ...] = ()
    findings: tuple[FindingRecord, ...] = ()  # of every batch
    guarantees: tuple[GuaranteeRecord, ...] = ()  # of the defenses that are differential privacy
    noise: NoiseRecord | None = None  # how large the defenses' noise was; none where they add none
    bounds: BoundsRecord | None = None  # what no attack could do, where that was computed

    @property
    def id(self) -> str:
        return spec_id(self.spec)

    @property
    def details(self) -> "Details":
        """What is said of single examples and batches."""
        return Details(
            self.secrets,
            {key: attack.examples for key, attack in self.attacks.items()},
            {key: attack.batches for key, attack in self.attacks.items()},
        )

    def with_details(self, details: "Details") -> "Record":
        """Returns the record with other details; with none it holds no text and no guess."""
        return replace(
            self,
            secrets=details.secrets,
            attacks={
                key: replace(
                    attack,
                    examples=details.examples.get(key, ()),
                    batches=details.batches.get(key, ()),
                )
                for key, attack in self.attacks.items()
            },
        )

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {"schema": SCHEMA, "id": self.id, **_without_absent_texts(to_plain(self))}

    @staticmethod
    def from_json(plain: dict[str, Any]) -> "Record":
        """The record plain JSON values describe; another schema, a missing field or an edited
        spec is refused by name."""
        schema = plain.get("schema") if isinstance(plain, dict) else None
        if schema != SCHEMA:
            raise RecordError(
                f"This is not a {SCHEMA} but has schema {schema!r}; read it with the gradleak that"
                " wrote it."
            )
        record: Record = from_plain(Record, plain, "record")
        if plain.get("id") != (right := plain_id(record.spec)):
            raise RecordError(
                f"The id {plain.get('id')!r} does not belong to this spec ({right}); run the audit"
                " again."
            )
        return record


@dataclass(frozen=True)
class Details:
    """What a record says of single examples and batches: nearly all of its bytes, and every text
    and guess."""

    secrets: tuple[SecretRecord, ...] = ()
    examples: dict[str, tuple[ExampleRecord, ...]] = field(default_factory=dict)  # by attack
    batches: dict[str, tuple[BatchRecord, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return _without_absent_texts(to_plain(self))


def _without_absent_texts(plain: dict[str, Any]) -> dict[str, Any]:
    """A reader looking for private text need only search for the key."""
    for secret in plain["secrets"]:
        if secret["text"] is None:
            del secret["text"]
    return plain


def spec_id(spec: dict[str, Any]) -> str:
    """The first 16 hex digits of the SHA-256 of the spec as canonical JSON."""
    return plain_id(to_plain(spec))


def plain_id(spec: dict[str, Any]) -> str:
    """The same of a spec that was read from JSON: quicker."""
    canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def now() -> str:
    """The time for `created`: ISO 8601, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


PRIVATE_VALUES = ("labels",)  # findings whose values are facts of private examples


def without_texts(record: Record) -> Record:
    """The record without guesses, traces of them, private texts and labels that were read:
    scores, flags and cost stay."""
    return replace(
        record,
        secrets=tuple(replace(secret, text=None) for secret in record.secrets),
        attacks={
            key: replace(
                attack,
                examples=tuple(
                    replace(one, guess=None, guess_legacy=None) for one in attack.examples
                ),
                batches=tuple(replace(batch, guesses=()) for batch in attack.batches),
            )
            for key, attack in record.attacks.items()
        },
        findings=tuple(
            replace(one, values=()) if one.name in PRIVATE_VALUES else one
            for one in record.findings
        ),
    )


def texts_of(record: Record) -> Iterator[str]:
    """Every private text and every guess that a record holds."""
    texts = [secret.text for secret in record.secrets]
    for attack in record.attacks.values():
        texts += [text for one in attack.examples for text in (one.guess, one.guess_legacy)]
        texts += [text for batch in attack.batches for _, said in batch.guesses for text in said]
    return (text for text in texts if text is not None)
