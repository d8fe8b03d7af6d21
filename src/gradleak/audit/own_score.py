"""Guesses of updates of one's own beside the truth, where its owner lets it be known: a record like
any other."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradleak.attacks.blind import Blind, draw_beside
from gradleak.audit.client import AuditInput, update_norm
from gradleak.audit.objectives import objectives
from gradleak.audit.outcomes import AttackOutcomes, AuditResult, Outcome
from gradleak.audit.own_guesses import Reconstructions, choose_facts
from gradleak.audit.record import finding_records, record_of
from gradleak.audit.spec import EVERY_FACT, AuditSpec, read
from gradleak.core.attack import Bench, Scale
from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.prior import Prior, PriorSpec
from gradleak.core.streams import Streams
from gradleak.core.target import TargetSpec
from gradleak.datasets.file import OwnTexts
from gradleak.records.schema import Record
from gradleak.records.store import KEY_BYTES, SecretKey, open_key, write_record
from gradleak.targets.in_memory import InMemory
from gradleak.targets.token_classifier import TokenClassifier
from gradleak.views import Everything, TensorsView

HASH = 16  # digits that tell two models, or two updates, apart


def score(
    found: Reconstructions,
    truth: Sequence[Any],
    *,
    labels: Sequence[Any] | None = None,
    out: str | Path | None = None,
    keep_secrets: bool = False,
    target: TargetSpec | None = None,
    data: Dataset | None = None,
) -> Record:
    """Compares guesses with the texts that the clients really had, in a record like any other.

    `truth` has the texts of the one update, or a list of texts for each of several; `labels` goes
    with it, where the texts had some and they were not granted. With `out` the record is written
    into that folder. `target` says how the model can be opened again, where it can, and `data` what
    the texts are called.
    """
    observations = found.observations
    refuse_unlike(observations)
    model = observations[0].target
    nested = bool(truth) and all(isinstance(one, (list, tuple)) for one in truth)
    batches, given = _split(truth, len(observations), nested), [None] * len(observations)
    if labels is not None:
        given = _split(labels, len(observations), nested)
    truths = zip(observations, range(len(batches)), batches, given, strict=True)
    private = [model.private_batch(_as_examples(*one)) for one in truths]
    spec = _spec_of(found, target, data, max(len(one) for one in batches))
    member = AuditInput(spec, private, spec.data.remarks())
    result = AuditResult({name: AttackOutcomes() for name in spec.attack_keys()})
    prior = spec.prior.open(model)
    assert isinstance(prior, Prior)
    bench = Bench(Streams.root("attacker", found.seed), prior)
    norms = [update_norm(observation) for observation in observations]
    keys = spec.attack_keys().items()
    for (name, attack), one in zip(keys, found.attacked.values(), strict=True):
        told = [seen.limit_to(choose_facts(attack, seen)) for seen in observations]
        blind, drawn = Blind().reconstruct(told, bench), draw_beside(attack, told, bench)
        at_guess, at_truth = objectives(attack, told, private, one.found, prior)
        for place, observation in enumerate(told):
            value = at_truth[place]
            scale = Scale() if value is None else attack.objective_scale(observation)
            result.attacks[name].add(
                Outcome(one.found[place], norms[place], at_guess[place], value, scale),
                Outcome(blind[place], norms[place]),
                Outcome(drawn[place], norms[place]),
            )
    result.findings += finding_records(observations, private)
    key = SecretKey(os.urandom(KEY_BYTES)) if out is None else open_key(Path(out))
    record = record_of(
        member, result, model, key, str(model.device), found.peak_memory, keep_secrets
    )
    if out is not None:
        write_record(Path(out), record)
    return record


def refuse_unlike(observations: Sequence[Observation]) -> None:
    """Refuses updates that one record cannot be of: it states one setting."""
    for what, stated in (
        ("protocol", [one.protocol for one in observations]),
        ("defenses", [one.knows.defenses for one in observations]),
        ("tensors that were sent", [set(one.update.tensors) for one in observations]),
    ):
        if unlike := [place for place, one in enumerate(stated) if one != stated[0]]:
            raise GradleakError(
                f"Updates 0 and {unlike[0]} differ in their {what}, and a record is of one setting:"
                " attack and score them one by one."
            )


def _spec_of(
    found: Reconstructions, target: TargetSpec | None, data: Dataset | None, batch_size: int
) -> AuditSpec:
    first = found.observations[0]
    facts = frozenset(Fact).intersection(*(one.knows.facts for one in found.observations))
    seen, parts = tuple(first.update.tensors), {part.name for part in first.target.parts}
    return AuditSpec(
        target=target or InMemory(found.model, found.weights[:HASH]),
        data=data or OwnTexts(hash_updates(found.observations)),
        attacks=tuple(one.attack for one in found.attacked.values()),
        protocol=first.protocol,
        view=Everything() if set(seen) == parts else TensorsView(seen),
        prior=read("prior", found.prior, PriorSpec),
        limit=len(found.observations),
        batch_size=batch_size,
        defenses=first.knows.defenses or (),
        know=tuple(fact for fact in EVERY_FACT if fact in facts),
        seed=found.seed,
    )


def _as_examples(
    observation: Observation,
    update: int,
    texts: Sequence[str],
    labels: Sequence[Any] | None,
) -> list[Example]:
    """Returns the truth of one update with its labels: given, granted, or as the guess has them."""
    size = observation.knows.batch_size
    if size is not None and len(texts) != size:
        raise GradleakError(f"Update {update} is of {size} texts, and the truth has {len(texts)}.")
    known = observation.knows.labels
    if labels is not None and len(labels) != len(texts):
        raise GradleakError(
            f"There are {len(texts)} texts and {len(labels)} labels for update {update}."
        )
    if labels is None and known is not None:
        labels = known.tolist()
    target = observation.target
    told = target.labels_are_tokens or isinstance(target, TokenClassifier)
    if labels is None and not told:
        raise GradleakError(
            "The model is a classifier, and the labels of these texts were not granted: pass"
            " labels= to score()."
        )
    beside = [None] * len(texts) if labels is None else list(labels)
    return [
        Example(
            text,
            tuple(label) if isinstance(label, list) else label,
            where=f"text {place + 1} of update {update}",
        )
        for place, (text, label) in enumerate(zip(texts, beside, strict=True))
    ]


def _split(given: Sequence[Any], updates: int, nested: bool) -> list[Any]:
    """Returns one list for each update; of a single one, its texts may stand by themselves."""
    every = list(given) if nested else [list(given)]
    if len(every) != updates or not all(every):
        raise GradleakError(
            f"The truth is of {len(every)} updates, and {updates} were attacked: pass a list of"
            " lists, one an update, in their order."
        )
    return every


def hash_updates(observations: Sequence[Observation]) -> str:
    """Tells records of different updates apart."""
    digest = hashlib.sha256()
    for observation in observations:
        for name, tensor in sorted(observation.update.tensors.items()):
            digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:HASH]
