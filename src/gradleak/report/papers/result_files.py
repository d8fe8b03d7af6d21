"""The results of a study as they are published: a page, and the same for programs.

They say what was scored, how, and what was not run. Secrets are keyed hashes, and no guess is shown
but those at canaries, which are nobody's messages.
"""

import csv
import io
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gradleak.records.schema import Record
from gradleak.report.naming import Labels
from gradleak.report.numbers import write_duration, write_interval, write_number
from gradleak.report.papers.answers import Answer, Answered, write_command
from gradleak.report.papers.table_files import NOT_RUN, NOT_SCORED
from gradleak.report.privacy import write_guarantees
from gradleak.report.shown_guesses import choose_evenly
from gradleak.report.table_markup import draw_markdown_table

HEADLINES = (
    "rouge1",
    "rouge2",
    "rougeL",
    "exact_match",
    "token_accuracy",
    "secret_recall",
    "mse",
    "psnr",
    "ssim",
    "lpips",
    "lpips_legacy",
)
HEAD = (
    *("attack", "metric", "mean", "low", "high", "blind", "n"),
    *("model", "seed", "machine", "date", "seconds", "record", "command"),
)
HASH = 16  # hex digits: enough to tell secrets apart
CELLS_WITH_STEPS = 4  # of a larger study only the last guess is shown
STEPS = 6
SECRETS = 3
Texts = Mapping[tuple[int, int], str]  # by batch and position
EXPLANATION = (
    "Mean [95 % interval over client batches], fractions in %; blind: the same knowledge without "
    "the update, in the order of "
    "the columns. Seconds are of the attack, all examples together; cells attacked in one call "
    "share them."
)
NOISE_EXPLANATION = (
    "Noise: the expected norm of what defenses add, as a multiple of the norm of what would be "
    "seen without it; tensor by tensor "
    "in the records."
)


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
    missing = [one.cell for one in answered if not one.answers]
    yield from (f"# Results of {study[0]}", "", f"Written by `{command}`.", "")
    yield from _describe_origin(study, answered, [one.record for one in answers], compared)
    noisy = any(one.record.noise is not None for one in answers)
    yield from ("## Cells", "", f"{EXPLANATION} {NOISE_EXPLANATION}" if noisy else EXPLANATION, "")
    axes, metrics = list_axes(answered), list_headlines(answers)
    models = _letter_models([one.record for one in answers])
    head = [
        *axes,
        *(["noise"] if noisy else []),
        "attack",
        "model",
        "n",
        *metrics,
        "blind",
        "seconds",
        "flags",
        "record",
    ]
    yield from draw_markdown_table(
        head,
        [row for one in answered for row in _list_rows(one, axes, metrics, models, noisy=noisy)],
    )
    yield from _list_guarantees([one.record for one in answers])
    if missing:
        yield (
            f"{len(missing)} of {len(answered)} cells were not run. What is missing, and the "
            "first of it alone:"
        )
        yield from (
            "",
            f"    gradleak run {shlex.join(study)}",
            f"    {write_command(study, missing[0])}",
            "",
        )


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
    yield from (f"- `{command}`: {count} of the lines below" for command, count in commands.items())
    ours = {record.id for record in records}
    others = {record.id: record for record in compared if record.id not in ours}
    if others:
        attacks = _join_distinct(name for record in others.values() for name in record.attacks)
        when = _join_distinct(record.created[:10] for record in others.values())
        yield (
            f"- Of no cell of this study, but in the papers' tables below: {len(others)} "
            f"records of {attacks} ({when})"
        )
    yield (
        f"- When: {_join_distinct(record.created[:10] for record in records)}. Where: "
        f"{_join_distinct(map(name_machine, records))}."
    )
    for label, model in _letter_models(records).items():
        yield f"- Model {model}: {label}"
    yield (
        f"- Seed: {_join_distinct(str(record.spec.get('seed')) for record in records)}. Data: "
        f"{_join_distinct(map(_describe_data, records))}."
    )
    yield from (f"- Software: {_join_distinct(map(_describe_software, records))}.", "")


def _list_guarantees(records: Sequence[Record]) -> Iterator[str]:
    """Says what differential privacy proves of each setting, every setting once."""
    labels = Labels(records)
    proven = {
        (labels.defense(record), line): None
        for record in records
        for line in write_guarantees(record)
    }
    if proven:
        yield from (
            "## What is proven",
            "",
            *(f"- {defenses}: {line}" for defenses, line in proven),
            "",
        )


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
        yield [
            *place,
            *([""] if noisy else []),
            one.attack(),
            "",
            "",
            *[NOT_RUN] * len(metrics),
            "",
            "",
            "",
            "",
        ]
    for found in one.answers:
        scores = [found.attack.scores.get(metric) for metric in metrics]
        texts = [
            NOT_SCORED if score is None or not score.n else write_interval(score)
            for score in scores
        ]
        blind = " / ".join(
            "–" if score is None or not score.n else write_number(score.blind, score.unit)
            for score in scores
        )
        flags = ", ".join(flag.name for flag in found.attack.flags)
        cost = write_duration(found.attack.cost.seconds)
        model = models[_describe_model(found.record)]
        noise = (
            [f"{found.record.noise.ratio:.3g}" if found.record.noise is not None else ""]
            if noisy
            else []
        )
        yield [
            *place,
            *noise,
            one.attack(found),
            model,
            str(found.record.data.examples),
            *texts,
            blind,
            cost,
            flags,
            found.record.id,
        ]


def list_axes(answered: Sequence[Answered]) -> list[str]:
    """Lists the axes but for the attacks', which have a column anyway."""
    return [
        axis
        for axis in dict.fromkeys(axis for one in answered for axis in one.cell.axes)
        if axis != "attacks"
    ]


def list_headlines(answers: Sequence[Answer]) -> list[str]:
    """Lists the metrics that were measured, of those a page has room for."""
    scored = {metric for one in answers for metric, score in one.attack.scores.items() if score.n}
    return [metric for metric in HEADLINES if metric in scored]


def _letter_models(records: Sequence[Record]) -> dict[str, str]:
    """Gives each model a letter."""
    return {
        label: chr(ord("A") + place)
        for place, label in enumerate(dict.fromkeys(map(_describe_model, records)))
    }


def _describe_model(record: Record) -> str:
    size = f"{record.target.parameters:,} parameters"
    return f"{name_model(record)}, {record.target.fingerprint}, {size}"


def name_model(record: Record) -> str:
    """Names a model; of a folder by its last part, since the rest is a machine's."""
    return str(record.target.name).rstrip("/").rsplit("/", 1)[-1]


def _describe_software(record: Record) -> str:
    ours = record.versions.get("gradleak", "not installed")
    return (
        f"gradleak {'from source' if ours == 'not installed' else ours}, torch "
        f"{record.versions.get('torch')}"
    )


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
    axes = list_axes(answered)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*axes, *HEAD])
    for one in answered:
        place = [one.cell.axes.get(axis, "") for axis in axes]
        if not one.answers:
            writer.writerow(
                [*place, one.attack(), "", NOT_RUN, *[""] * 10, write_command(study, one.cell)]
            )
        writer.writerows(
            [*place, one.attack(found), *line]
            for found in one.answers
            for line in _list_numbers(found)
        )
    return file.getvalue()


def _list_numbers(found: Answer) -> Iterator[list[object]]:
    record, attack = found.record, found.attack
    model = f"{name_model(record)} {record.target.fingerprint[:15]}"
    cost = round(attack.cost.seconds, 1)
    ran = [
        model,
        record.spec.get("seed"),
        name_machine(record),
        record.created[:10],
        cost,
        record.id,
        "",
    ]
    for metric, score in attack.scores.items():
        if score.n:
            numbers = (score.mean, score.low, score.high, score.blind)
            values = ["" if value is None else f"{value:.4g}" for value in numbers]
            yield [metric, *values, score.n, *ran]


def write_examples_csv(answered: Sequence[Answered]) -> str:
    """Writes a line for each example: its keyed hash and what the attack scored on it."""
    answers = [one for cell in answered for one in cell.answers]
    metrics = list_headlines(answers)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["record", "attack", "batch", "position", "secret", "tokens", *metrics])
    for one in answers:
        whole = one.source.whole()
        secrets = {(secret.batch, secret.position): secret for secret in whole.secrets}
        for example in whole.attacks[one.key].examples:
            secret = secrets[example.batch, example.position]
            values = [example.values.get(metric) for metric in metrics]
            place = [
                whole.id,
                one.key,
                example.batch,
                example.position,
                secret.hash[:HASH],
                secret.tokens,
            ]
            writer.writerow(
                [*place, *("" if value is None else f"{value:.3g}" for value in values)]
            )
    return file.getvalue()


def write_guesses(
    answered: Sequence[Answered], texts_of: Callable[[Record], Texts]
) -> Iterator[str]:
    """Writes a table for each of the first secrets; nothing for data that is not our own."""
    shown = [(one, found) for one in answered for found in one.answers if is_canaries(found.record)]
    known = [
        found for _, found in shown if found.source.has_details
    ]  # published files hold no guesses
    if not known or len(known) < sum(len(one.answers) for one in answered):
        return
    steps = STEPS if len(shown) <= CELLS_WITH_STEPS else 1
    yield from (
        "## Guesses",
        "",
        "The data is made up for this purpose, so that guesses can be shown.",
        "",
    )
    wholes = [(one, found, found.source.whole()) for one, found in shown]
    places = [(secret.batch, secret.position) for secret in wholes[0][2].secrets][:SECRETS]
    for count, place in enumerate(places, start=1):
        secret = next(
            (text for _, _, whole in wholes if (text := texts_of(whole).get(place)) is not None),
            None,
        )
        yield from (
            f"Secret {count}: {secret}" if secret is not None else f"Secret {count}: not at hand",
            "",
        )
        rows = [
            [_name_answer(one, found), step, guess]
            for one, found, whole in wholes
            for step, guess in _list_guesses(whole, found, place, steps)
        ]
        yield from draw_markdown_table(["cell", "step", "guess"], rows)


def is_canaries(record: Record) -> bool:
    """Whether a record is of the canaries, which are nobody's messages."""
    data = record.spec.get("data")
    return isinstance(data, Mapping) and data.get("name") == "canaries"


def _name_answer(one: Answered, found: Answer) -> str:
    return ", ".join(
        [*(value for axis, value in one.cell.axes.items() if axis != "attacks"), one.attack(found)]
    )


def _list_guesses(
    whole: Record, found: Answer, place: tuple[int, int], steps: int
) -> Iterator[tuple[str, str]]:
    """Lists some of the guesses on the way, and the answer.

    On the way a batch's are in no order: only single ones are shown.
    """
    attack = whole.attacks[found.key]
    if steps > 1:
        way = next(batch.guesses for batch in attack.batches if batch.batch == place[0])
        for step, sentences in choose_evenly([one for one in way if len(one[1]) == 1], steps):
            yield str(step), sentences[0]
    last = next(
        example.guess for example in attack.examples if (example.batch, example.position) == place
    )
    yield "answer", last or "–"
