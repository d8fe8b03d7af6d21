"""Two runs over the same client batches: did less leak, example by example, or is that chance."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rich.table
from rich.console import Console
from rich.table import Table

from gradleak.records.files import RecordError
from gradleak.records.flags import FEWEST_EXAMPLES
from gradleak.records.judgement import judge_setting
from gradleak.records.schema import Record
from gradleak.records.settings import OF_THE_ATTACKER, Ran, Setting
from gradleak.records.statistics import Interval, paired_difference
from gradleak.records.store import Column
from gradleak.report.naming import Labels, make_key, write_chain, write_component
from gradleak.report.numbers import write_count, write_number
from gradleak.report.shown_guesses import find_hashes
from gradleak.report.terminal.console import build_table, number_columns, text_columns

SCHEMA = "gradleak.comparison/1"
WORST = "worst case"  # over all attacks of a setting
LESS, MORE, SAME = "less leaks", "more leaks", "no difference shown"
IN_TABLE = {LESS: "less", MORE: "more", SAME: "not shown"}
ANSWERS = {
    LESS: "Less leaks in B than in A",
    MORE: "More leaks in B than in A",
    SAME: "No difference is shown",
}
DESCRIBED = (
    "The examples are taken to be the same by their rows and lengths: without the keys nothing more"
    " can be told."
)
# What tells private examples apart, by batch and position
Identities = Mapping[tuple[int, int], Hashable]
# Examples read again, as far as they are the record's; none without its key
ContentsOf = Callable[[Record], Identities | None]


@dataclass(frozen=True)
class Difference:
    """One metric of one attack in both runs, over the examples that have a value in both."""

    attack: str
    metric: str
    unit: str
    direction: str
    first: float
    second: float
    change: Interval  # second minus first, paired; over client batches

    @property
    def reading(self) -> str:
        """What the interval allows to say."""
        rises = self.direction == "higher"
        if self.change.low > 0:
            return MORE if rises else LESS
        if self.change.high < 0:
            return LESS if rises else MORE
        return SAME


@dataclass(frozen=True)
class ChangedChoice:
    """A choice that the two runs made differently."""

    what: str
    first: str
    second: str


@dataclass(frozen=True)
class ComparedSetting:
    """One setting of each run, on the client batches that both have."""

    setting: str
    changes: tuple[ChangedChoice, ...]
    batches: int
    matched_by: str  # hashes, contents or description
    doubts: tuple[str, ...]  # flags of the second run by which less may be the attack's failure
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Comparison:
    """Two runs."""

    metric: str  # the leading one
    settings: tuple[ComparedSetting, ...]
    left_out: tuple[str, ...]  # settings without a partner, each with the reason


def compare(
    first: Sequence[Setting], second: Sequence[Setting], contents: tuple[ContentsOf, ContentsOf]
) -> Comparison:
    """Pairs the settings of two runs; refuses runs that have no client batch in common."""
    labels = Labels([setting.record for setting in (*first, *second)])
    pairs, left_out = pair_settings(first, second, labels)
    compared, reasons = [], []
    for one, other in pairs:
        batches, matched_by = match_batches(
            one.summaries[0].whole(), other.summaries[0].whole(), contents
        )
        if batches:
            compared.append(_compare_settings(one, other, batches, matched_by, labels))
        else:
            reasons.append(
                f"{labels.setting(one.record)}: {_explain_mismatch(one.record, other.record)}"
            )
    if not compared:
        raise RecordError(
            f"These runs share no client batch ({[*reasons, *left_out][0]}), and only the same "
            "examples can be compared pair by pair. "
            "Run both on the same --data, --limit and --batch-size."
        )
    if not any(one.differences for one in compared):
        raise RecordError(
            "These runs share client batches and no metric. Add one to both: gradleak score RUN "
            "--metric rouge1."
        )
    return Comparison(
        metric=judge_setting(pairs[0][0]).metric,
        settings=tuple(compared),
        left_out=(*left_out, *reasons),
    )


def pair_settings(
    first: Sequence[Setting], second: Sequence[Setting], labels: Labels
) -> tuple[list[tuple[Setting, Setting]], list[str]]:
    """Pairs settings that agree in all that varies within the runs.

    A choice that sets the runs apart as wholes may differ.
    """
    sides = (first, second)
    fields = {field for setting in (*first, *second) for field in setting.record.spec}
    values = {
        field: [{make_key(setting.record.spec.get(field)) for setting in side} for side in sides]
        for field in fields.difference(OF_THE_ATTACKER)
    }
    telling = sorted(
        field
        for field, (one, other) in values.items()
        if len(one) > 1 or len(other) > 1 or one == other
    )
    partners = {_make_fields_key(setting, telling): setting for setting in second}
    pairs = [
        (setting, partners[key])
        for setting in first
        if (key := _make_fields_key(setting, telling)) in partners
    ]
    if not pairs and 1 in (len(first), len(second)):  # one setting beside each of several
        pairs = [(one, other) for one in first for other in second]
    paired = {id(setting) for pair in pairs for setting in pair}
    return pairs, [
        f"{labels.setting(setting.record)}: it is in one of the runs only"
        for setting in (*first, *second)
        if id(setting) not in paired
    ]


def match_batches(
    first: Record, second: Record, contents: tuple[ContentsOf, ContentsOf]
) -> tuple[list[tuple[int, int]], str]:
    """Finds the batches that hold the same examples in the same order, and says how that is known.

    Each is given by its number in both runs. Hashes tell it where both runs have one key. Else the
    examples are read again, or, where they are gone, described.
    """
    found = _pair_batches(first, second, find_hashes(first), find_hashes(second))
    if found:
        return found, "hashes"
    one, other = (
        contents_of(record) for record, contents_of in zip((first, second), contents, strict=True)
    )
    if one is None or other is None:
        return (
            _pair_batches(first, second, _describe_examples(first), _describe_examples(second)),
            "description",
        )
    return _pair_batches(first, second, one, other), "contents"


def conclude_comparison(comparison: Comparison) -> Iterator[str]:
    """Says what the leading metric allows to say, setting by setting."""
    for one in comparison.settings:
        found = [line for line in one.differences if line.metric == comparison.metric]
        where = f"{one.setting}: " if len(comparison.settings) > 1 else ""
        if not found:
            yield f"{where}{comparison.metric} was not measured in both."
            continue
        said = next((line for line in found if line.attack == WORST), found[0])
        unit = " points" if said.unit == "fraction" else ""
        yield (
            f"{where}{ANSWERS[said.reading]}: {said.metric} changed by {write_change(said)}{unit}, "
            f"over {write_count(one.batches, 'client batch', 'client batches')} that both have."
        )
        if said.reading == LESS and one.doubts:
            yield (
                f"In doubt: {', '.join(one.doubts)} in B. Its attacks, and not what changed, "
                "may be why less was rebuilt."
            )
        if said.reading == SAME:
            yield (
                "That is not evidence that nothing changed: more batches would narrow the interval."
            )
        if one.batches < FEWEST_EXAMPLES:
            yield f"Fewer than {FEWEST_EXAMPLES} batches: take the interval for a hint."
        if one.matched_by == "description":
            yield DESCRIBED


def print_comparison(console: Console, comparison: Comparison, names: tuple[str, str]) -> None:
    """Prints what differs, a table for each pair of settings, and the answer last."""
    for letter, name in zip("AB", names, strict=True):
        console.print(f"{letter}: {name}", soft_wrap=True)
    for one in comparison.settings:
        console.print(
            f"\n{one.setting}, {write_count(one.batches, 'shared batch', 'shared batches')}",
            style="bold",
        )
        for change in one.changes:
            console.print(f"{change.what}: {change.first} in A, {change.second} in B")
        console.print(_build_setting_table(one))
    console.print(
        "\nFractions in %; B − A with its 95 % interval, paired over client batches.", style="dim"
    )
    for reason in comparison.left_out:
        console.print(f"Not compared: {reason}.")
    for sentence in conclude_comparison(comparison):
        console.print(sentence, style="bold")


def write_change(one: Difference) -> str:
    """Writes `-35.2 [-50.1, -20.3]`."""
    mean, low, high = (
        _write_signed(value, one.unit)
        for value in (one.change.mean, one.change.low, one.change.high)
    )
    return f"{mean} [{low}, {high}]"


def _build_setting_table(one: ComparedSetting) -> Table:
    numbers = number_columns("A", "B", "B − A [95 %]")
    table = build_table(
        *text_columns("attack", "metric"), *numbers, rich.table.Column("B leaks", no_wrap=True)
    )
    attack = None
    for line in one.differences:
        if not line.metric.endswith("_legacy"):
            table.add_row(
                *("" if line.attack == attack else line.attack, line.metric),
                *(write_number(value, line.unit) for value in (line.first, line.second)),
                *(write_change(line), IN_TABLE[line.reading]),
            )
            attack = line.attack
    return table


def _compare_settings(
    one: Setting,
    other: Setting,
    batches: Sequence[tuple[int, int]],
    matched_by: str,
    labels: Labels,
) -> ComparedSetting:
    changes = (*_list_attack_changes(one, other, labels), *_list_changes(one.record, other.record))
    places = _find_places(one, other, batches)
    return ComparedSetting(
        setting=labels.setting(
            one.record, but=[change.what.replace(" ", "_") for change in changes]
        ),
        changes=changes,
        batches=len(batches),
        matched_by=matched_by,
        doubts=tuple(name for name in judge_setting(other).doubts if name != "few_examples"),
        differences=tuple(_measure_differences(one, other, places)),
    )


def _measure_differences(
    one: Setting, other: Setting, places: Sequence[tuple[int, int, int]]
) -> Iterator[Difference]:
    """Measures each difference over the examples that have a value in both."""
    for attack, metric, ours, theirs in _pair_columns(one, other):
        pairs = ((ours[a], theirs[b], batch) for a, b, batch in places)
        kept = [(a, b, batch) for a, b, batch in pairs if a is not None and b is not None]
        if kept:
            first, second, clusters = zip(*kept, strict=True)
            score = one.record.worst_case[metric]
            yield Difference(
                *(attack, metric, score.unit, score.direction),
                *(sum(first) / len(first), sum(second) / len(second)),
                paired_difference(second, first, clusters),
            )


def _pair_columns(one: Setting, other: Setting) -> Iterator[tuple[str, str, Column, Column]]:
    """Pairs what was scored in both runs, by attack and metric.

    The worst case comes first, where there are several attacks, then every attack that both have.
    """
    metrics = [name for name in one.metrics() if name in other.metrics()]
    partners = _pair_attacks(one, other)
    if len(one.attacks) > 1 or len(other.attacks) > 1 or not partners:
        yield from ((WORST, name, one.values(name)[0], other.values(name)[0]) for name in metrics)
    for mine, theirs in partners:
        first, second = mine.columns.values, theirs.columns.values
        both = (name for name in metrics if name in first and name in second)
        yield from ((mine.key, name, first[name], second[name]) for name in both)


def _pair_attacks(one: Setting, other: Setting) -> list[tuple[Ran, Ran]]:
    """Pairs attacks with the same fields, and those of one name where each run has one of it."""
    exactly = {make_key(ran.attack.spec): ran for ran in other.attacks}
    names = [[ran.attack.spec.get("name") for ran in side.attacks] for side in (one, other)]
    alone = {
        name: ran
        for name, ran in zip(names[1], other.attacks, strict=True)
        if all(side.count(name) == 1 for side in names)
    }
    pairs = (
        (ran, exactly.get(make_key(ran.attack.spec)) or alone.get(name))
        for name, ran in zip(names[0], one.attacks, strict=True)
    )
    return [(ran, partner) for ran, partner in pairs if partner is not None]


def _find_places(
    one: Setting, other: Setting, batches: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Finds the place of each example of a shared batch in both columns, with its batch.

    Draws of a batch are paired in order.
    """
    first, second = _find_examples(one), _find_examples(other)
    return [
        (a, b, mine)
        for mine, theirs in batches
        for here, there in zip(
            range(mine, max(first) + 1, one.record.data.batches),
            range(theirs, max(second) + 1, other.record.data.batches),
            strict=False,
        )
        for a, b in zip(first[here], second[there], strict=True)
    ]


def _find_examples(setting: Setting) -> dict[int, list[int]]:
    """Finds the places of a batch's examples in every column."""
    found: dict[int, list[int]] = {}
    for place, batch in enumerate(setting.attacks[0].columns.batches):
        found.setdefault(batch, []).append(place)
    return found


def _list_attack_changes(
    first: Setting, second: Setting, labels: Labels
) -> Iterator[ChangedChoice]:
    """Says which attacks were run on the two settings, each in all of its records, where these
    are not the same ones: what both have by its name and the fields that differ, others whole."""
    sides = [
        {make_key(one): one for summary in setting.summaries for one in _attacks_of(summary.record)}
        for setting in (first, second)
    ]
    if sides[0].keys() == sides[1].keys():
        return
    names = [{_name_attack(one) for one in side.values()} for side in sides]

    def write(attack: Any) -> str:
        shared = isinstance(attack, dict) and all(_name_attack(attack) in side for side in names)
        return labels.attack(attack) if shared else write_component(attack)

    written = ("; ".join(map(write, sorted(one.values(), key=_name_attack))) for one in sides)
    yield ChangedChoice("attacks", *(attacks or "none" for attacks in written))


def _name_attack(attack: Any) -> str:
    return str(attack.get("name") if isinstance(attack, dict) else attack)


def _attacks_of(record: Record) -> list[Any]:
    written = record.spec.get("attacks")
    return written if isinstance(written, list) else [written]


def _list_changes(first: Record, second: Record) -> Iterator[ChangedChoice]:
    """Lists what the two audits chose differently, attacks and scores aside."""
    for field in dict.fromkeys([*first.spec, *second.spec]):
        one, other = first.spec.get(field), second.spec.get(field)
        if field not in ("attacks", "metrics") and make_key(one) != make_key(other):
            yield ChangedChoice(field.replace("_", " "), _write_value(one), _write_value(other))
    old, new = first.target, second.target
    if old.name == new.name and old.fingerprint != new.fingerprint:
        yield ChangedChoice("weights of the target", old.fingerprint[:12], new.fingerprint[:12])
    versions = [record.versions.get("gradleak", "-") for record in (first, second)]
    if versions[0] != versions[1]:
        yield ChangedChoice("gradleak", *versions)


def _explain_mismatch(first: Record, second: Record) -> str:
    sizes = [record.spec.get("batch_size", 1) for record in (first, second)]
    if sizes[0] != sizes[1]:
        return f"A has {sizes[0]} and B {sizes[1]} examples a batch"
    data = [write_component(record.spec.get("data")) for record in (first, second)]
    if data[0] != data[1]:
        return f"the data of A is {data[0]}, of B {data[1]}"
    return f"{data[0]} held other examples for B than for A, or has changed since"


def _pair_batches(
    first: Record, second: Record, one: Identities, other: Identities
) -> list[tuple[int, int]]:
    """Pairs the batches that hold the same; those that hold it twice are paired in order."""
    places: dict[Hashable, list[int]] = {}
    for batch, held in _group_by_batch(second, other).items():
        places.setdefault(held, []).append(batch)
    return [
        (batch, places[held].pop(0))
        for batch, held in _group_by_batch(first, one).items()
        if places.get(held)
    ]


def _group_by_batch(record: Record, identities: Identities) -> dict[int, Hashable]:
    """Lists what each batch holds, and leaves out those of which some example is not known."""
    held: dict[int, list[Hashable]] = {}
    for secret in record.secrets:
        if secret.batch < record.data.batches:  # later ones are further draws of these
            held.setdefault(secret.batch, []).append(
                identities.get((secret.batch, secret.position))
            )
    return {batch: tuple(examples) for batch, examples in held.items() if None not in examples}


def _describe_examples(record: Record) -> Identities:
    """Describes each example by data set, row and length, where its row is known."""
    data = record.spec.get("data")
    if isinstance(data, dict):
        data = {name: value for name, value in data.items() if name != "rows"}
    return {
        (one.batch, one.position): (make_key(data), one.row, one.tokens)
        for one in record.secrets
        if one.row is not None
    }


def _make_fields_key(setting: Setting, fields: Sequence[str]) -> str:
    return make_key([setting.record.spec.get(field) for field in fields])


def _write_value(value: Any) -> str:
    return write_chain(value) if isinstance(value, list) else write_component(value)


def _write_signed(value: float, unit: str) -> str:
    text = write_number(value, unit)
    return text if value <= 0 or float(text) == 0 else f"+{text}"
