"""Scores of the attacks that an attack is made of, each on the batches that reached it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradleak.audit.outcomes import Outcome
from gradleak.audit.scoring import Chance, clusters_of, pair_up, score_attack, score_of, values_of
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack, Reconstruction, Stage
from gradleak.core.batch import PrivateBatch
from gradleak.core.metric import Metric
from gradleak.core.target import Target
from gradleak.records import flags
from gradleak.records.schema import AttackRecord, FateRecord, StageRecord


def score_with_stages(
    spec: AuditSpec,
    target: Target,
    attack: Attack,
    private: Sequence[PrivateBatch],
    outcomes: Sequence[Outcome],
    chance: Chance,
    peak_memory: int | None,
) -> AttackRecord:
    """Everything one attack did, scored, and the attacks it is made of beside it."""
    whole = score_attack(spec, target, attack, private, outcomes, chance, peak_memory)
    stages = stage_records(spec.metrics, target, private, outcomes, chance.blind)
    raised = flags.member_failed(_fates_of(stages)), flags.member_out_of_time(_fates_of(stages), len(outcomes))
    return replace(whole, stages=stages, flags=(*whole.flags, *(flag for flag in raised if flag is not None)))


def _fates_of(stages: Sequence[StageRecord]) -> list[flags.MemberFate]:
    return [flags.MemberFate(one.attack, fate.fate, len(fate.batches), fate.reason) for one in stages for fate in one.fates]


def stage_records(
    metrics: Sequence[Metric],
    target: Target,
    private: Sequence[PrivateBatch],
    outcomes: Sequence[Outcome],
    blind: Sequence[Outcome],
) -> tuple[StageRecord, ...]:
    """One record an attack, in the order in which they had their turn; none for an attack that is only itself."""
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
    stages = {index: stage for index, outcome in enumerate(outcomes) if (stage := _stage(outcome, name)) is not None}
    reached = {index: stage for index, stage in stages.items() if stage.has_guess}
    secrets = [private[index] for index in reached]
    values = values_of(metrics, pair_up(target, secrets, [Reconstruction(stage.sentences) for stage in reached.values()]))
    chance = values_of(metrics, pair_up(target, secrets, [blind[index].reconstruction for index in reached]))
    clusters = clusters_of(secrets)
    return StageRecord(
        attack=name,
        batches=tuple(reached),
        certified=sum(stage.certified for stage in reached.values()),
        seconds=sum(stage.cost.seconds for stage in stages.values()),
        scores={one.name: score_of(one, values[one.name], chance[one.name], clusters) for one in metrics if reached},
        fates=_fates(stages),
    )


def _fates(stages: Mapping[int, Stage]) -> tuple[FateRecord, ...]:
    """What kept it from guesses, by fate and reason, each with the batches."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, stage in stages.items():
        if stage.fate != "ran":
            found.setdefault((stage.fate, stage.reason), []).append(index)
    return tuple(FateRecord(fate, tuple(batches), reason) for (fate, reason), batches in found.items())


def _stage(outcome: Outcome, name: str) -> Stage | None:
    return next((stage for stage in outcome.reconstruction.stages if stage.attack == name), None)
