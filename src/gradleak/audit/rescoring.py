"""New metrics on the guesses a record holds: nothing is attacked again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gradleak.attacks.blind import Blind, draw_beside
from gradleak.audit.client import hand_over, observe, private_batches
from gradleak.audit.group import SharedBench, attackers_streams
from gradleak.audit.ready import open_prior, open_target
from gradleak.audit.scoring import (
    Values,
    clusters_of,
    pair_up,
    read_picture,
    score_of,
    sentence,
    values_at,
    values_of,
    worst_case,
)
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack, Reconstruction
from gradleak.core.batch import Example, PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.core.metric import Content, Metric, Pair, Text
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.records.schema import AttackRecord, ExampleRecord, Record


def spec_of(record: Record) -> AuditSpec:
    """The audit a record is of, by the components of this version."""
    return AuditSpec.from_plain(dict(record.spec))


def rescore(
    record: Record,
    examples: Sequence[Example],
    metrics: Sequence[Metric],
    device: str,
    say: Callable[[str], None] = lambda sentence: None,
) -> Record:
    """The record with these metrics added, or put in the place of those it has; its spec and so
    its id stay as they are."""
    spec = spec_of(record)
    target = open_target(spec, device)
    private = private_batches(spec, target, examples) * spec.draws
    attacks = {
        key: _attack(spec, target, private, spec.attack_keys()[key], attack, metrics, say)
        for key, attack in record.attacks.items()
    }
    new = worst_case(replace(spec, metrics=tuple(metrics)), attacks)
    return replace(record, attacks=attacks, worst_case={**record.worst_case, **new})


def _attack(
    spec: AuditSpec,
    target: Target,
    private: Sequence[PrivateBatch],
    attack: Attack,
    found: AttackRecord,
    metrics: Sequence[Metric],
    say: Callable[[str], None],
) -> AttackRecord:
    """Blind guesses are not stored; they are drawn again from the same streams, which takes no
    search."""
    guessed = _blind(spec, target, private, attack, say)
    nothing = [Reconstruction(()) for _ in private]
    blind, drawn = (pair_up(target, private, one) for one in guessed or (nothing, nothing))
    shown = [_guess(target, example) for example in found.examples]
    around: dict[int, list[Text]] = {}
    for example, guess in zip(found.examples, shown, strict=True):
        if isinstance(guess, Text):
            around.setdefault(example.batch, []).append(guess)
    pairs = [
        Pair(pair.secret, guess, pair.marked, tuple(around.get(example.batch, ())))
        for pair, guess, example in zip(blind, shown, found.examples, strict=True)
    ]
    values, clusters = values_of(metrics, pairs), clusters_of(private)
    if guessed is not None:
        chance, draws = values_of(metrics, blind), values_of(metrics, drawn)
    else:
        chance = _read_stored(metrics, [example.blind_values for example in found.examples])
        draws = _read_stored(metrics, [example.draw_values for example in found.examples])
    scores = {
        one.name: score_of(one, values[one.name], chance[one.name], clusters) for one in metrics
    }
    examples = tuple(
        replace(
            example,
            values={**example.values, **values_at(values, place)},
            blind_values={**example.blind_values, **values_at(chance, place)},
            draw_values={**example.draw_values, **values_at(draws, place)},
        )
        for place, example in enumerate(found.examples)
    )
    return replace(found, scores={**found.scores, **scores}, examples=examples)


def _blind(
    spec: AuditSpec,
    target: Target,
    private: Sequence[PrivateBatch],
    attack: Attack,
    say: Callable[[str], None],
) -> tuple[list[Reconstruction], list[Reconstruction]] | None:
    """The blind guess, and the one drawn for this attack.

    None where a generator of pictures is gone since: what it would have guessed is left open.
    """
    try:
        opened = open_prior(spec, target)
    except GradleakError as error:
        if target.medium != "image":
            raise
        say(f"The blind guess is not scored anew. {error}")
        return None
    root = Streams.root("attacker", spec.seed)
    bench = SharedBench(
        root, opened.prior, by_index=attackers_streams([(spec, len(private))], root)
    )
    observations = [
        hand_over(spec, attack, observe(spec, target, batch, index))
        for index, batch in enumerate(private)
    ]
    return Blind().reconstruct(observations, bench), draw_beside(attack, observations, bench)


def _read_stored(metrics: Sequence[Metric], values: Sequence[Mapping[str, float | None]]) -> Values:
    """What the record has of the blind guesses' values, by metric."""
    return {one.name: [example.get(one.name) for example in values] for one in metrics}


def _guess(target: Target, example: ExampleRecord) -> Content:
    """A stored guess as metrics see it; its token ids are those of its text, cut again."""
    if example.guess is not None and target.medium == "image":
        return read_picture(example.guess)
    if example.guess is None or example.guess_legacy is None:
        raise GradleakError(
            "This record does not hold its guesses: there is nothing to score. Run the audit again."
        )
    cut = sentence(target, target.encode([example.guess])[0])
    return Text(example.guess, example.guess_legacy, cut.ids)
