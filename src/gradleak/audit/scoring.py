"""Scores of an attack beside the blind one, with intervals, flags and the worst case over
attacks."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from gradleak.audit.objectives import is_right, sentences_of
from gradleak.audit.outcomes import AttackOutcomes, Outcome
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack, Reconstruction, Stage
from gradleak.core.batch import PrivateBatch, picture_of, pixels_of
from gradleak.core.defense import channel_of
from gradleak.core.metric import Content, Metric, Pair, Text
from gradleak.core.observation import Fact
from gradleak.core.picture import Picture
from gradleak.core.specs import to_dict
from gradleak.core.target import Target
from gradleak.metrics.alignment import align, nearest_pictures
from gradleak.records import flags
from gradleak.records.flags import RaisedFlag
from gradleak.records.judgement import LEADING
from gradleak.records.png import Pixels, data_uri, from_data_uri
from gradleak.records.schema import (
    AttackRecord,
    BatchRecord,
    CostRecord,
    ExampleRecord,
    FateRecord,
    Score,
    StageRecord,
)
from gradleak.records.settings import worst_score
from gradleak.records.statistics import beside_blind, paired_difference
from gradleak.records.store import columns_of

Values = dict[str, list[float | None]]  # by metric, one an example


def score_attack(
    spec: AuditSpec,
    target: Target,
    attack: Attack,
    private: Sequence[PrivateBatch],
    attacked: AttackOutcomes,
    peak_memory: int | None,
) -> AttackRecord:
    """Returns everything one attack did, scored, and the attacks it is made of beside it."""
    outcomes, clusters = attacked.found, clusters_of(private)
    pairs, blind_pairs, drawn_pairs = (
        pair_up(target, private, [outcome.reconstruction for outcome in kind])
        for kind in (attacked.found, attacked.blind, attacked.draw)
    )
    values, blind, drawn = (
        values_of(spec.metrics, one) for one in (pairs, blind_pairs, drawn_pairs)
    )
    places = [
        (index, position)
        for index, batch in enumerate(private)
        for position in range(len(batch.examples))
    ]
    examples = tuple(
        ExampleRecord(
            batch=index,
            position=position,
            guess=show_content(pair.guess),
            guess_legacy=pair.guess.legacy if isinstance(pair.guess, Text) else None,
            certified=outcomes[index].reconstruction.certified,
            values=values_at(values, place),
            blind_values=values_at(blind, place),
            draw_values=values_at(drawn, place),
            beyond_luck=_beyond_luck(pair, blind_pairs[place]),
        )
        for place, ((index, position), pair) in enumerate(zip(places, pairs, strict=True))
    )
    stages = stage_records(spec.metrics, target, private, outcomes, attacked.blind)
    rebuilt = any(one.beyond_luck or one.certified for one in examples)
    raised = (
        *_objective_flags(private, outcomes),
        *_result_flags(spec, facts_behind(spec, attack, outcomes), outcomes),
        None if rebuilt else _near_chance(spec, values, blind, clusters),
        *_defense_flags(spec, attack),
        *_member_flags(stages, len(outcomes)),
    )
    told = spec.facts_for(attack)
    return AttackRecord(
        spec=to_dict(attack),
        scores={
            metric.name: score_of(metric, values[metric.name], blind[metric.name], clusters)
            for metric in spec.metrics
        },
        examples=examples,
        batches=tuple(
            _batch_record(target, index, outcome, batch)
            for index, (outcome, batch) in enumerate(zip(outcomes, private, strict=True))
        ),
        knowledge=tuple(sorted(told)),
        flags=tuple(flag for flag in raised if flag is not None),
        cost=CostRecord(
            seconds=sum(outcome.reconstruction.cost.seconds for outcome in outcomes),
            steps=sum(outcome.reconstruction.cost.steps for outcome in outcomes),
            peak_memory_bytes=peak_memory,
        ),
        label_accuracy=None if Fact.LABELS in told else label_accuracy(private, outcomes),
        version=attack.version,
        stages=stages,
    )


def facts_behind(spec: AuditSpec, attack: Attack, outcomes: Sequence[Outcome]) -> frozenset[Fact]:
    """What guesses rest on: where a member proved its guess, what that member was told and not
    what the others were."""
    told = {member.name: spec.facts_for(member) for member in attack.members}
    found = [outcome.reconstruction for outcome in outcomes]
    provers = (
        next((stage.attack for stage in one.stages if stage.certified and one.certified), "")
        for one in found
    )
    return frozenset[Fact]().union(*(told.get(one, spec.facts_for(attack)) for one in provers))


def label_accuracy(private: Sequence[PrivateBatch], outcomes: Sequence[Outcome]) -> float | None:
    """The share of the labels that were guessed right, as a bag within each batch; none where
    none were guessed."""
    right = total = 0
    for batch, outcome in zip(private, outcomes, strict=True):
        guessed = outcome.reconstruction.labels
        if guessed is None or batch.batch.labels.ndim > 1:  # of a language model they are its words
            continue
        right += (Counter(batch.batch.labels.tolist()) & Counter(guessed)).total()
        total += len(batch.examples)
    return right / total if total else None


def worst_case(spec: AuditSpec, attacks: Mapping[str, AttackRecord]) -> dict[str, Score]:
    """For every example the attack that got most of it: that is what a defense has to withstand.

    Beside it stands the best of as many blind guesses: they are picked as attacks are.
    """
    records = list(attacks.values())
    secrets = len({example.batch for example in records[0].examples}) // spec.draws
    clusters = [example.batch % secrets for example in records[0].examples]
    tried = [(record, columns_of(record)) for record in records]
    return {
        one.name: worst_score(tried, one.name, clusters, one.unit, one.direction)
        for one in spec.metrics
    }


def clusters_of(private: Sequence[PrivateBatch]) -> list[int]:
    """For every example its secret batch: several draws of one are no independent ones."""
    firsts: dict[int, int] = {}
    return [
        firsts.setdefault(id(batch), index)
        for index, batch in enumerate(private)
        for _ in batch.examples
    ]


def pair_up(
    target: Target, private: Sequence[PrivateBatch], guesses: Sequence[Reconstruction]
) -> list[Pair]:
    """Secrets with the guesses aligned to them inside each batch."""
    pairs = []
    for batch, guess in zip(private, guesses, strict=True):
        if batch.batch.pixels is not None:
            pairs += picture_pairs(batch, guess)
            continue
        secrets = [sentence(target, row) for row in sentences_of(batch)]
        guessed = [sentence(target, row) for row in guess.sentences]
        for place, chosen in enumerate(align(secrets, guessed) if len(secrets) > 1 else [0]):
            example = batch.examples[place]
            pairs.append(
                Pair(
                    secrets[place],
                    guessed[chosen] if chosen >= 0 else Text("", "", ()),
                    tuple(example.text[start:end] for start, end in example.secrets),
                    tuple(guessed),
                )
            )
    return pairs


def picture_pairs(private: PrivateBatch, guess: Reconstruction) -> list[Pair]:
    """Secrets of one batch with the guesses nearest to them; what was not guessed counts as
    grey."""
    secrets = [one.content for one in private.examples if isinstance(one.content, Picture)]
    grey = [picture_of(torch.full_like(pixels_of(secret), 0.5)) for secret in secrets]
    guesses = [*guess.pictures, *grey][: len(secrets)]
    sides = (torch.stack([pixels_of(one) for one in pictures]) for pictures in (secrets, guesses))
    order = nearest_pictures(*sides)
    return [Pair(secret, guesses[chosen]) for secret, chosen in zip(secrets, order, strict=True)]


def show_content(content: str | Content) -> str:
    """Returns a text as it reads, or a picture as text that browsers draw."""
    if isinstance(content, Picture):
        return data_uri(Pixels(content.shape, content.pixels))
    return content if isinstance(content, str) else content.text


def read_picture(shown: str) -> Picture:
    """Returns the picture that a record holds as such text."""
    found = from_data_uri(shown)
    return Picture(found.shape, found.data)


def sentence(target: Target, ids: Sequence[int]) -> Text:
    """Token ids as metrics see them."""
    around = {*target.vocabulary.prefix, *target.vocabulary.suffix, target.vocabulary.pad}
    inside = tuple(number for number in ids if number not in around)
    return Text(
        text=target.decode(inside), legacy=target.decode(ids, keep_special=True), ids=inside
    )


def values_of(metrics: Sequence[Metric], pairs: Sequence[Pair]) -> Values:
    """The values of all pairs by metric."""
    return {metric.name: metric.values(pairs) for metric in metrics}


def values_at(columns: Mapping[str, Sequence[float | None]], place: int) -> dict[str, float | None]:
    """The values of one example, by metric."""
    return {name: column[place] for name, column in columns.items()}


def score_of(
    metric: Metric,
    values: Sequence[float | None],
    blind: Sequence[float | None],
    clusters: Sequence[int],
) -> Score:
    """One metric with its interval, beside the blind attack's."""
    return beside_blind(values, blind, clusters, metric.unit, metric.direction)


def _batch_record(
    target: Target, index: int, outcome: Outcome, private: PrivateBatch
) -> BatchRecord:
    found = outcome.reconstruction
    return BatchRecord(
        batch=index,
        loss=found.loss,
        objective_at_guess=outcome.objective_at_guess,
        objective_at_truth=outcome.objective_at_truth,
        objective_unit=outcome.scale.unit,
        objective_rounding=None if outcome.objective_at_truth is None else outcome.scale.rounding,
        update_norm=outcome.update_norm,
        losses=found.trace.losses,
        guesses=tuple(
            (step, tuple(target.decode(ids) for ids in guess))
            for step, guess in found.trace.guesses
        ),
        seconds=found.cost.seconds,
        steps=found.cost.steps,
        right=None if private.batch.pixels is not None else is_right(found, private),
    )


def _result_flags(
    spec: AuditSpec, told: Iterable[Fact], outcomes: Sequence[Outcome]
) -> Iterator[RaisedFlag | None]:
    yield flags.few_examples(len(outcomes) * spec.batch_size // spec.draws)
    yield flags.generous_knowledge(told)
    yield flags.dead_gradient([outcome.update_norm for outcome in outcomes])
    has_objective = any(outcome.objective_at_truth is not None for outcome in outcomes)
    is_proven = all(outcome.reconstruction.certified for outcome in outcomes)
    yield flags.no_objective(has_objective or is_proven)
    yield flags.unmodelled_dropout(spec.protocol.dropout)


def _near_chance(
    spec: AuditSpec, values: Values, blind: Values, clusters: Sequence[int]
) -> RaisedFlag | None:
    leading = next((metric for metric in spec.metrics if metric.name in LEADING), None)
    if leading is None:
        return None
    ours, theirs = ([value or 0.0 for value in column[leading.name]] for column in (values, blind))
    better, worse = (ours, theirs) if leading.direction == "higher" else (theirs, ours)
    return flags.near_chance(paired_difference(better, worse, clusters).low, leading.name)


def _objective_flags(
    private: Sequence[PrivateBatch], outcomes: Sequence[Outcome]
) -> Iterator[RaisedFlag | None]:
    """A wrong guess is the search's fault or the objective's; of pictures, never right to the
    last bit, only one is told."""
    at_guess = [outcome.objective_at_guess for outcome in outcomes]
    at_truth = [outcome.objective_at_truth for outcome in outcomes]
    scales = [(outcome.scale.unit, outcome.scale.rounding) for outcome in outcomes]
    right = [
        batch.batch.pixels is not None or is_right(outcome.reconstruction, batch)
        for batch, outcome in zip(private, outcomes, strict=True)
    ]
    yield flags.search_failed(at_guess, at_truth, scales)
    yield flags.other_answer_fits(at_guess, at_truth, right, scales)


def _defense_flags(spec: AuditSpec, attack: Attack) -> Iterator[RaisedFlag | None]:
    channel = channel_of(spec.defenses)
    adapts = Fact.DEFENSE in spec.granted and attack.adapts_to(channel)
    yield flags.not_adaptive(not channel.clear, adapts)
    yield flags.one_draw(channel.randomised, spec.draws)
    yield flags.seen_before_defense(channel.after_server)


def _member_flags(stages: Sequence[StageRecord], batches: int) -> Iterator[RaisedFlag | None]:
    fates = [
        flags.MemberFate(one.attack, fate.fate, len(fate.batches), fate.reason)
        for one in stages
        for fate in one.fates
    ]
    yield flags.member_failed(fates)
    yield flags.member_out_of_time(fates, batches)


def _beyond_luck(ours: Pair, blind: Pair) -> bool:
    """Whether a text too long to be hit by chance was rebuilt to the last token, and not by the
    blind guess."""
    if isinstance(ours.secret, Picture):
        return False
    (secret, guess), (_, chance) = ours.texts, blind.texts
    return len(secret.ids) >= flags.BEYOND_LUCK and guess.ids == secret.ids != chance.ids


def stage_records(
    metrics: Sequence[Metric],
    target: Target,
    private: Sequence[PrivateBatch],
    outcomes: Sequence[Outcome],
    blind: Sequence[Outcome],
) -> tuple[StageRecord, ...]:
    """One record an attack, in the order in which they had their turn; none for an attack that
    is only itself."""
    names = dict.fromkeys(
        stage.attack for outcome in outcomes for stage in outcome.reconstruction.stages
    )
    return tuple(_stage_record(name, metrics, target, private, outcomes, blind) for name in names)


def _stage_record(
    name: str,
    metrics: Sequence[Metric],
    target: Target,
    private: Sequence[PrivateBatch],
    outcomes: Sequence[Outcome],
    blind: Sequence[Outcome],
) -> StageRecord:
    stages = {
        index: stage
        for index, outcome in enumerate(outcomes)
        for stage in outcome.reconstruction.stages
        if stage.attack == name
    }
    reached = {index: stage for index, stage in stages.items() if stage.has_guess}
    secrets = [private[index] for index in reached]
    guesses = [Reconstruction(stage.sentences) for stage in reached.values()]
    chances = [blind[index].reconstruction for index in reached]
    values, chance = (
        values_of(metrics, pair_up(target, secrets, one)) for one in (guesses, chances)
    )
    clusters = clusters_of(secrets)
    return StageRecord(
        attack=name,
        batches=tuple(reached),
        certified=sum(stage.certified for stage in reached.values()),
        seconds=sum(stage.cost.seconds for stage in stages.values()),
        scores={
            one.name: score_of(one, values[one.name], chance[one.name], clusters)
            for one in metrics
            if reached
        },
        fates=_fates(stages),
    )


def _fates(stages: Mapping[int, Stage]) -> tuple[FateRecord, ...]:
    """What kept it from guesses, by fate and reason, each with the batches."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, stage in stages.items():
        if stage.fate != "ran":
            found.setdefault((stage.fate, stage.reason), []).append(index)
    return tuple(
        FateRecord(fate, tuple(batches), reason) for (fate, reason), batches in found.items()
    )
