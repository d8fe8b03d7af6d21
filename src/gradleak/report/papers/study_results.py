"""The results of a study as they are published: a page, and the same for programs.

Cells are answered by the records that fit them. What is published says what was scored, how, and
what was not run. Secrets are keyed hashes, and no guess is shown but those at canaries, which are
nobody's messages.
"""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradleak.records.schema import AttackRecord, Record
from gradleak.records.store import Summary
from gradleak.report.naming import Labels
from gradleak.report.numbers import write_duration, write_interval
from gradleak.report.papers.paper_tables import NOT_RUN, NOT_SCORED, list_blind
from gradleak.report.shown_guesses import Secrets, choose_evenly
from gradleak.report.table_markup import draw_markdown_table, write_csv_table
from gradleak.report.verdict import write_guarantees

# A record may differ from the cell it answers in the number of examples and in the weights, since
# these stand beside every number.
WEIGHTS = ("path", "revision", "weights")
MUST_AGREE = (
    *("data", "batch_size", "protocol", "defenses", "view", "know", "prior", "draws", "seed"),
    *("dtype", "time_limit"),
)
HEADLINES = (
    *("rouge1", "rouge2", "rougeL", "exact_match", "token_accuracy", "secret_recall"),
    *("mse", "psnr", "ssim", "lpips", "lpips_legacy"),
)
HEAD = (
    *("attack", "metric", "mean", "low", "high", "blind", "n"),
    *("model", "seed", "machine", "date", "seconds", "record", "command"),
)
HASH = 16  # hex digits: enough to tell secrets apart
CELLS_WITH_STEPS = 4  # of a larger study only the last guess is shown
STEPS = 6
SECRETS = 3
EXPLANATION = (
    "Mean [95 % interval over client batches], fractions in %; blind: the same knowledge without "
    "the update, in the order of the columns. Seconds are of the attack, all examples together; "
    "cells attacked in one call share them."
)
NOISE_EXPLANATION = (
    "Noise: the expected norm of what defenses add, as a multiple of the norm of what would be "
    "seen without it; tensor by tensor in the records."
)


@dataclass(frozen=True)
class StudyCell:
    """A cell of a study: where it lies on the axes, and its spec as plain values."""

    axes: Mapping[str, str]
    spec: Mapping[str, Any]
    # By name: of the target and the attacks, and of the attacks as they are now
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """One attack of a record that answers a cell."""

    source: Summary
    key: str
    is_older: bool = False  # there is a newer version of the attack

    @property
    def record(self) -> Record:
        return self.source.record

    @property
    def attack(self) -> AttackRecord:
        return self.record.attacks[self.key]


@dataclass(frozen=True)
class Answered:
    """A cell with its answers, one an attack and model; none where it was not run."""

    cell: StudyCell
    answers: Sequence[Answer]

    def attack(self, found: Answer | None = None) -> str:
        """Names the attack as the study does, or as the record where a cell has several.

        An older version says so.
        """
        names = [str(attack["name"]) for attack in self.cell.spec["attacks"]]
        written = " + ".join(names) if found is None else found.key
        if len(names) == 1:
            written = self.cell.axes.get("attacks", names[0])
        older = found is not None and found.is_older
        return f"{written} (version {found.attack.version})" if found and older else written


def find_answers(cells: Sequence[StudyCell], summaries: Sequence[Summary]) -> list[Answered]:
    """Finds the records that answer each cell of a study.

    Of several records for one model and version the one with most examples is taken.
    """
    exact: dict[str, list[Summary]] = {}
    for summary in summaries:
        exact.setdefault(_make_key(summary.record.spec), []).append(summary)
    planned = {_make_key(cell.spec) for cell in cells}
    # What fits no cell to the letter may be of an earlier version. Few are, so that all of them are
    # compared with every cell.
    rest = [summary for key, found in exact.items() if key not in planned for summary in found]
    return [
        Answered(cell, list(_choose_best(cell, [*exact.get(_make_key(cell.spec), ()), *rest])))
        for cell in cells
    ]


def write_command(study: Sequence[str], cell: StudyCell, record: Record | None = None) -> str:
    """Writes the command that runs this one cell.

    For a record it has the number of batches and the model, where these are not the study's own.
    `study` is the path of the YAML and the options that change it.
    """
    words = ["gradleak", "run", *study]
    if record is None:
        return shlex.join(
            words + [word for axis in cell.axes.items() for word in ("--only", "=".join(axis))]
        )
    planned, ran = cell.spec, record.spec
    if ran["limit"] != planned["limit"]:
        words += ["--set", f"limit={ran['limit']}"]
    if not values_agree(planned["target"], ran["target"]):
        words += ["--set", f"target={_describe_change(planned['target'], ran['target'])}"]
    return shlex.join(words)


def values_agree(one: Any, other: Any) -> bool:
    """Whether two values agree in all that both have.

    A field that came later is at its default in older records.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.get("name") == other.get("name") and all(
            values_agree(one[key], other[key]) for key in one.keys() & other.keys()
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(values_agree, one, other))
    return bool(one == other)


def _choose_best(cell: StudyCell, summaries: Sequence[Summary]) -> Iterator[Answer]:
    fit = [summary for summary in summaries if _fits(cell, summary.record.spec)]
    for wanted in cell.spec["attacks"]:
        by_model: dict[str, dict[int, list[Answer]]] = {}
        for summary in fit:
            for key, attack in summary.record.attacks.items():
                if _components_agree(cell, wanted, attack.spec):
                    versions = by_model.setdefault(summary.record.target.fingerprint, {})
                    versions.setdefault(attack.version, []).append(Answer(summary, key))
        for versions in by_model.values():
            newest = max(*versions, cell.versions.get(str(wanted["name"]), 0))
            for version in sorted(versions, reverse=True):
                best = max(
                    versions[version],
                    key=lambda one: (one.record.data.examples, one.record.created),
                )
                yield replace(best, is_older=version < newest)


def _make_key(spec: Mapping[str, Any]) -> str:
    return json.dumps([spec.get(field) for field in (*MUST_AGREE, "attacks")], sort_keys=True)


def _fits(cell: StudyCell, spec: Mapping[str, Any]) -> bool:
    target = {key: value for key, value in cell.spec["target"].items() if key not in WEIGHTS}
    return _components_agree(cell, target, spec["target"]) and all(
        values_agree(cell.spec[name], spec[name])
        for name in MUST_AGREE
        if name in cell.spec and name in spec
    )


def _components_agree(cell: StudyCell, planned: Mapping[str, Any], ran: Mapping[str, Any]) -> bool:
    """Whether they agree, and what the older one lacks is at its default in the newer."""
    usual = cell.defaults.get(str(planned["name"]), {})
    return values_agree(planned, ran) and all(
        planned[key] == usual.get(key) for key in planned.keys() - ran.keys()
    )


def _describe_change(planned: Mapping[str, Any], ran: Mapping[str, Any]) -> str:
    """Writes the model on one line: what differs from the study's, or all that is set.

    Of a path its end is written: the rest is a machine's.
    """
    alike = planned["name"] == ran["name"]
    fields = {
        key: value
        for key, value in ran.items()
        if key != "name" and not (alike and values_agree(planned.get(key), value))
    }
    if "path" in fields:
        path = str(fields["path"])
        return "…/" + path.rsplit("/", 1)[-1] if path.startswith("/") else path
    written = ",".join(f"{key}={value}" for key, value in fields.items())
    return ":".join(filter(None, (str(ran["name"]), written)))


def write_results_markdown(
    study: Sequence[str],
    answered: Sequence[Answered],
    command: str,
    compared: Sequence[Record] = (),
) -> Iterator[str]:
    """Writes what was run and how, every cell, and how to run the rest.

    Of the records `compared` with the papers' some may be of no cell.
    """
    answers = [one for cell in answered for one in cell.answers]
    records = [one.record for one in answers]
    missing = [one.cell for one in answered if not one.answers]
    yield from (f"# Results of {study[0]}", "", f"Written by `{command}`.", "")
    yield from _describe_origin(study, answered, records, compared)
    noisy = any(record.noise is not None for record in records)
    yield from ("## Cells", "", f"{EXPLANATION} {NOISE_EXPLANATION}" if noisy else EXPLANATION, "")
    axes, metrics, models = list_axes(answered), list_headlines(answers), _letter_models(records)
    yield from draw_markdown_table(
        [
            *(*axes, *(["noise"] if noisy else []), "attack", "model", "n", *metrics),
            *("blind", "seconds", "flags", "record"),
        ],
        [row for one in answered for row in _list_rows(one, axes, metrics, models, noisy=noisy)],
    )
    yield from _list_guarantees(records)
    if missing:
        yield (
            f"{len(missing)} of {len(answered)} cells were not run. What is missing, and the "
            "first of it alone:"
        )
        yield from ("", f"    gradleak run {shlex.join(study)}")
        yield from (f"    {write_command(study, missing[0])}", "")


def _describe_origin(
    study: Sequence[str],
    answered: Sequence[Answered],
    records: Sequence[Record],
    compared: Sequence[Record],
) -> Iterator[str]:
    commands = Counter(
        write_command(study, one.cell, found.record) for one in answered for found in one.answers
    )
    yield from ("## How it was run", "")
    yield from (f"- `{command}`: {times} of the lines below" for command, times in commands.items())
    ours = {record.id for record in records}
    others = {record.id: record for record in compared if record.id not in ours}
    if others:
        yield (
            f"- Of no cell of this study, but in the papers' tables below: {len(others)} records of"
            f" {_join_distinct(name for record in others.values() for name in record.attacks)}"
            f" ({_join_distinct(record.created[:10] for record in others.values())})"
        )
    yield (
        f"- When: {_join_distinct(record.created[:10] for record in records)}. Where: "
        f"{_join_distinct(map(name_machine, records))}."
    )
    yield from (f"- Model {letter}: {name}" for name, letter in _letter_models(records).items())
    yield (
        f"- Seed: {_join_distinct(str(record.spec.get('seed')) for record in records)}. Data: "
        f"{_join_distinct(map(_describe_data, records))}."
    )
    yield from (f"- Software: {_join_distinct(map(_describe_software, records))}.", "")


def _list_guarantees(records: Sequence[Record]) -> Iterator[str]:
    """Says what differential privacy proves of each setting, every setting once."""
    labels = Labels(records)
    proven = dict.fromkeys(
        f"- {labels.defense(record)}: {line}"
        for record in records
        for line in write_guarantees(record)
    )
    if proven:
        yield from ("## What is proven", "", *proven, "")


def _list_rows(
    one: Answered,
    axes: Sequence[str],
    metrics: Sequence[str],
    models: dict[str, str],
    *,
    noisy: bool,
) -> Iterator[list[str]]:
    place = [one.cell.axes.get(axis, "") for axis in axes]
    if not one.answers:
        blank = [""] if noisy else []
        yield [*place, *blank, one.attack(), "", "", *[NOT_RUN] * len(metrics), "", "", "", ""]
    for found in one.answers:
        record, attack = found.record, found.attack
        scores = (attack.scores.get(metric) for metric in metrics)
        there = [score if score is not None and score.n else None for score in scores]
        noise = "" if record.noise is None else f"{record.noise.ratio:.3g}"
        yield [
            *(*place, *([noise] if noisy else []), one.attack(found)),
            *(models[_describe_model(record)], str(record.data.examples)),
            *(NOT_SCORED if score is None else write_interval(score) for score in there),
            *(list_blind(there), write_duration(attack.cost.seconds)),
            *(", ".join(flag.name for flag in attack.flags), record.id),
        ]


def list_axes(answered: Sequence[Answered]) -> list[str]:
    """Lists the axes but for the attacks', which have a column anyway."""
    axes = dict.fromkeys(axis for one in answered for axis in one.cell.axes)
    return [axis for axis in axes if axis != "attacks"]


def list_headlines(answers: Sequence[Answer]) -> list[str]:
    """Lists the metrics that were measured, of those a page has room for."""
    scored = {metric for one in answers for metric, score in one.attack.scores.items() if score.n}
    return [metric for metric in HEADLINES if metric in scored]


def _letter_models(records: Sequence[Record]) -> dict[str, str]:
    """Gives each model a letter."""
    models = dict.fromkeys(map(_describe_model, records))
    return {label: chr(ord("A") + place) for place, label in enumerate(models)}


def _describe_model(record: Record) -> str:
    target = record.target
    return f"{name_model(record)}, {target.fingerprint}, {target.parameters:,} parameters"


def name_model(record: Record) -> str:
    """Names a model; of a folder by its last part, since the rest is a machine's."""
    return str(record.target.name).rstrip("/").rsplit("/", 1)[-1]


def _describe_software(record: Record) -> str:
    ours = record.versions.get("gradleak", "not installed")
    source = "from source" if ours == "not installed" else ours
    return f"gradleak {source}, torch {record.versions.get('torch')}"


def name_machine(record: Record) -> str:
    """Names the machine that a record was made on."""
    return str(record.machine.get("name") or record.machine.get("device", "unknown"))


def _describe_data(record: Record) -> str:
    data = record.spec.get("data", {})
    return " ".join(str(data[key]) for key in ("name", "split", "selection") if data.get(key))


def _join_distinct(values: Iterable[str]) -> str:
    return "; ".join(sorted(set(values))) or "nothing was run"


def write_results_csv(study: Sequence[str], answered: Sequence[Answered]) -> str:
    """Writes a line for each number, and of a cell that was not run the command that runs it."""
    axes, rows = list_axes(answered), list[list[object]]()
    for one in answered:
        place = [one.cell.axes.get(axis, "") for axis in axes]
        if not one.answers:
            command = write_command(study, one.cell)
            rows.append([*place, one.attack(), "", NOT_RUN, *[""] * 10, command])
        rows += [
            [*place, one.attack(found), *line]
            for found in one.answers
            for line in _list_numbers(found)
        ]
    return write_csv_table([*axes, *HEAD], rows)


def _list_numbers(found: Answer) -> Iterator[list[object]]:
    record, attack = found.record, found.attack
    model = f"{name_model(record)} {record.target.fingerprint[:15]}"
    for metric, score in attack.scores.items():
        if score.n:
            numbers = (score.mean, score.low, score.high, score.blind)
            yield [
                *(metric, *("" if value is None else f"{value:.4g}" for value in numbers), score.n),
                *(model, record.spec.get("seed"), name_machine(record), record.created[:10]),
                *(round(attack.cost.seconds, 1), record.id, ""),
            ]


def write_examples_csv(answered: Sequence[Answered]) -> str:
    """Writes a line for each example: its keyed hash and what the attack scored on it."""
    answers = [one for cell in answered for one in cell.answers]
    metrics = list_headlines(answers)
    rows: list[list[object]] = []
    for one in answers:
        whole = one.source.whole()
        secrets = {(secret.batch, secret.position): secret for secret in whole.secrets}
        for example in whole.attacks[one.key].examples:
            place = (example.batch, example.position)
            values = (example.values.get(metric) for metric in metrics)
            rows.append(
                [
                    *(whole.id, one.key, *place, secrets[place].hash[:HASH], secrets[place].tokens),
                    *("" if value is None else f"{value:.3g}" for value in values),
                ]
            )
    head = ["record", "attack", "batch", "position", "secret", "tokens", *metrics]
    return write_csv_table(head, rows)


def write_guesses(
    answered: Sequence[Answered], texts_of: Callable[[Record], Secrets]
) -> Iterator[str]:
    """Writes a table for each of the first secrets; nothing for data that is not our own."""
    answers = [(one, found) for one in answered for found in one.answers]
    shown = [(one, found) for one, found in answers if is_canaries(found.record)]
    # Published files hold no guesses
    known = sum(found.source.has_details for _, found in shown)
    if not known or known < len(answers):
        return
    steps = STEPS if len(shown) <= CELLS_WITH_STEPS else 1
    yield from ("## Guesses", "")
    yield from ("The data is made up for this purpose, so that guesses can be shown.", "")
    wholes = [(one, found, found.source.whole()) for one, found in shown]
    places = [(secret.batch, secret.position) for secret in wholes[0][2].secrets][:SECRETS]
    for number, place in enumerate(places, start=1):
        texts = (texts_of(whole).get(place) for _, _, whole in wholes)
        secret = next((text for text in texts if text is not None), "not at hand")
        yield from (f"Secret {number}: {secret}", "")
        yield from draw_markdown_table(
            ["cell", "step", "guess"],
            [
                [_name_answer(one, found), step, guess]
                for one, found, whole in wholes
                for step, guess in _list_guesses(whole.attacks[found.key], place, steps)
            ],
        )


def is_canaries(record: Record) -> bool:
    """Whether a record is of the canaries, which are nobody's messages."""
    data = record.spec.get("data")
    return isinstance(data, Mapping) and data.get("name") == "canaries"


def _name_answer(one: Answered, found: Answer) -> str:
    axes = (value for axis, value in one.cell.axes.items() if axis != "attacks")
    return ", ".join([*axes, one.attack(found)])


def _list_guesses(
    attack: AttackRecord, place: tuple[int, int], steps: int
) -> Iterator[tuple[str, str]]:
    """Lists some of the guesses on the way, and the answer.

    On the way a batch's are in no order: only single ones are shown.
    """
    if steps > 1:
        way = next(batch.guesses for batch in attack.batches if batch.batch == place[0])
        for step, sentences in choose_evenly([one for one in way if len(one[1]) == 1], steps):
            yield str(step), sentences[0]
    last = (one.guess for one in attack.examples if (one.batch, one.position) == place)
    yield "answer", next(last) or "–"
