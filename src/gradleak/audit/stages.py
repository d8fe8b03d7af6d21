"""Scores of the attacks that an attack is made of, each on the batches that reached it."""

from collections.abc import Sequence
from dataclasses import replace

from gradleak.audit.outcomes import Outcome
from gradleak.audit.scoring import clusters_of, pair_up, score_attack, score_of, values_of
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack, Reconstruction, Stage
from gradleak.core.batch import PrivateBatch
from gradleak.core.metric import Metric
from gradleak.core.target import Target
from gradleak.records.schema import AttackRecord, StageRecord


def score_with_stages(
    spec: AuditSpec,
    target: Target,
    attack: Attack,
    private: Sequence[PrivateBatch],
    outcomes: Sequence[Outcome],
    blind: Sequence[Outcome],
    peak_memory: int | None,
) -> AttackRecord:
    """Everything one attack did, scored, and the attacks it is made of beside it."""
    whole = score_attack(spec, target, attack, private, outcomes, blind, peak_memory)
    return replace(whole, stages=stage_records(spec.metrics, target, private, outcomes, blind))


def stage_records(
    metrics: Sequence[Metric],
    target: Target,
    private: Sequence[PrivateBatch],
    outcomes: Sequence[Outcome],
    blind: Sequence[Outcome],
) -> tuple[StageRecord, ...]:
    """One record an attack, in the order in which they ran; none for an attack that is only itself."""
    names = dict.fromkeys(stage.attack for outcome in outcomes for stage in outcome.reconstruction.stages)
    return tuple(_record(name, metrics, target, private, outcomes, blind) for name in names)


def _record(
    name: str,
    metrics: Sequence[Metric],
    target: Target,
    private: Sequence[PrivateBatch],
    outcomes: Sequence[Outcome],
    blind: Sequence[Outcome],
) -> StageRecord:
    reached = {index: stage for index, outcome in enumerate(outcomes) if (stage := _stage(outcome, name)) is not None}
    secrets = [private[index] for index in reached]
    values = values_of(metrics, pair_up(target, secrets, [Reconstruction(stage.sentences) for stage in reached.values()]))
    chance = values_of(metrics, pair_up(target, secrets, [blind[index].reconstruction for index in reached]))
    clusters = clusters_of(secrets)
    return StageRecord(
        attack=name,
        batches=tuple(reached),
        certified=sum(stage.certified for stage in reached.values()),
        seconds=sum(stage.cost.seconds for stage in reached.values()),
        scores={one.name: score_of(one, values[one.name], chance[one.name], clusters) for one in metrics},
    )


def _stage(outcome: Outcome, name: str) -> Stage | None:
    return next((stage for stage in outcome.reconstruction.stages if stage.attack == name), None)
