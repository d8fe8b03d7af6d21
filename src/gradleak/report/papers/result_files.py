"""Results as a page: scores, how they were come by and what was not run; never a guess or a secret."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gradleak.records.schema import Record
from gradleak.report.labels import Labels
from gradleak.report.numbers import duration, mean_and_interval, number
from gradleak.report.page.markdown import table
from gradleak.report.papers.answers import Answer, Answered, run_command
from gradleak.report.papers.table_files import NOT_RUN, NOT_SCORED
from gradleak.report.privacy import guarantee_lines

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
EXPLANATION = (
    "Mean [95 % interval over client batches], fractions in %; blind: the same knowledge without the update, in the order of "
    "the columns. Seconds are of the attack, all examples together; cells attacked in one call share them."
)
NOISE_EXPLANATION = (
    "Noise: the expected norm of what defenses add, as a multiple of the norm of what would be seen without it; tensor by tensor "
    "in the records."
)


def results_markdown(
    study: Sequence[str], answered: Sequence[Answered], command: str, compared: Sequence[Record] = ()
) -> Iterator[str]:
    """What was run and how, every cell, and how to run the rest. Of those `compared` with the papers' some may be of no cell."""
    answers = [one for cell in answered for one in cell.answers]
    missing = [one.cell for one in answered if not one.answers]
    yield from (f"# Results of {study[0]}", "", f"Written by `{command}`.", "")
    yield from _provenance(study, answered, [one.record for one in answers], compared)
    noisy = any(one.record.noise is not None for one in answers)
    yield from ("## Cells", "", f"{EXPLANATION} {NOISE_EXPLANATION}" if noisy else EXPLANATION, "")
    axes, metrics = axes_of(answered), headlines(answers)
    models = _models([one.record for one in answers])
    head = [*axes, *(["noise"] if noisy else []), "attack", "model", "n", *metrics, "blind", "seconds", "flags", "record"]
    yield from table(head, [row for one in answered for row in _rows(one, axes, metrics, models, noisy=noisy)])
    yield from _guarantees([one.record for one in answers])
    if missing:
        yield f"{len(missing)} of {len(answered)} cells were not run. What is missing, and the first of it alone:"
        yield from ("", f"    gradleak run {shlex.join(study)}", f"    {run_command(study, missing[0])}", "")


def _provenance(
    study: Sequence[str], answered: Sequence[Answered], records: Sequence[Record], compared: Sequence[Record]
) -> Iterator[str]:
    commands = Counter(run_command(study, one.cell, found.record) for one in answered for found in one.answers)
    yield from ("## How it was run", "")
    yield from (f"- `{command}`: {count} of the lines below" for command, count in commands.items())
    ours = {record.id for record in records}
    others = {record.id: record for record in compared if record.id not in ours}
    if others:
        attacks = _spread(name for record in others.values() for name in record.attacks)
        when = _spread(record.created[:10] for record in others.values())
        yield f"- Of no cell of this study, but in the papers' tables below: {len(others)} records of {attacks} ({when})"
    yield f"- When: {_spread(record.created[:10] for record in records)}. Where: {_spread(map(machine_of, records))}."
    for label, model in _models(records).items():
        yield f"- Model {model}: {label}"
    yield f"- Seed: {_spread(str(record.spec.get('seed')) for record in records)}. Data: {_spread(map(_data, records))}."
    yield from (f"- Software: {_spread(map(_versions, records))}.", "")


def _guarantees(records: Sequence[Record]) -> Iterator[str]:
    """What differential privacy proves of each setting, every setting once."""
    labels = Labels(records)
    proven = {(labels.defense(record), line): None for record in records for line in guarantee_lines(record)}
    if proven:
        yield from ("## What is proven", "", *(f"- {defenses}: {line}" for defenses, line in proven), "")


def _rows(
    one: Answered, axes: Sequence[str], metrics: Sequence[str], models: dict[str, str], *, noisy: bool
) -> Iterator[list[str]]:
    place = [one.cell.axes.get(axis, "") for axis in axes]
    if not one.answers:
        yield [*place, *([""] if noisy else []), one.attack(), "", "", *[NOT_RUN] * len(metrics), "", "", "", ""]
    for found in one.answers:
        scores = [found.attack.scores.get(metric) for metric in metrics]
        texts = [NOT_SCORED if score is None or not score.n else mean_and_interval(score) for score in scores]
        blind = " / ".join("–" if score is None or not score.n else number(score.blind, score.unit) for score in scores)
        flags = ", ".join(flag.name for flag in found.attack.flags)
        cost = duration(found.attack.cost.seconds)
        model = models[_model(found.record)]
        noise = [f"{found.record.noise.ratio:.3g}" if found.record.noise is not None else ""] if noisy else []
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


def axes_of(answered: Sequence[Answered]) -> list[str]:
    """The axes, but for the attacks': these have a column anyway."""
    return [axis for axis in dict.fromkeys(axis for one in answered for axis in one.cell.axes) if axis != "attacks"]


def headlines(answers: Sequence[Answer]) -> list[str]:
    scored = {metric for one in answers for metric, score in one.attack.scores.items() if score.n}
    return [metric for metric in HEADLINES if metric in scored]


def _models(records: Sequence[Record]) -> dict[str, str]:
    """A letter for each model."""
    return {label: chr(ord("A") + place) for place, label in enumerate(dict.fromkeys(map(_model, records)))}


def _model(record: Record) -> str:
    return f"{name_of(record)}, {record.target.fingerprint}, {record.target.parameters:,} parameters"


def name_of(record: Record) -> str:
    """Of a folder its own name: the rest is a machine's."""
    return str(record.target.name).rstrip("/").rsplit("/", 1)[-1]


def _versions(record: Record) -> str:
    ours = record.versions.get("gradleak", "not installed")
    return f"gradleak {'from source' if ours == 'not installed' else ours}, torch {record.versions.get('torch')}"


def machine_of(record: Record) -> str:
    return str(record.machine.get("name") or record.machine.get("device", "unknown"))


def _data(record: Record) -> str:
    data = record.spec.get("data", {})
    return " ".join(str(data[key]) for key in ("name", "split", "selection") if data.get(key))


def _spread(values: Iterable[str]) -> str:
    return "; ".join(sorted(set(values))) or "nothing was run"
