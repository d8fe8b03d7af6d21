"""Results for programs: scores and keyed hashes, never a guess or a secret."""

import csv
import io
from collections.abc import Iterator, Sequence

from gradleak.report.papers.answers import Answer, Answered, run_command
from gradleak.report.papers.result_files import axes_of, headlines, machine_of, name_of
from gradleak.report.papers.table_files import NOT_RUN

HEAD = (
    *("attack", "metric", "mean", "low", "high", "blind", "n"),
    *("model", "seed", "machine", "date", "seconds", "record", "command"),
)
HASH = 16  # hex digits: enough to tell secrets apart


def results_csv(study: Sequence[str], answered: Sequence[Answered]) -> str:
    """One line a number; of a cell that was not run the command that runs it."""
    axes = axes_of(answered)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*axes, *HEAD])
    for one in answered:
        place = [one.cell.axes.get(axis, "") for axis in axes]
        if not one.answers:
            writer.writerow([*place, one.attack(), "", NOT_RUN, *[""] * 10, run_command(study, one.cell)])
        writer.writerows([*place, one.attack(found), *line] for found in one.answers for line in _numbers(found))
    return file.getvalue()


def _numbers(found: Answer) -> Iterator[list[object]]:
    record, attack = found.record, found.attack
    model = f"{name_of(record)} {record.target.fingerprint[:15]}"
    cost = round(attack.cost.seconds, 1)
    ran = [model, record.spec.get("seed"), machine_of(record), record.created[:10], cost, record.id, ""]
    for metric, score in attack.scores.items():
        if score.n:
            numbers = (score.mean, score.low, score.high, score.blind)
            values = ["" if value is None else f"{value:.4g}" for value in numbers]
            yield [metric, *values, score.n, *ran]


def examples_csv(answered: Sequence[Answered]) -> str:
    """One line an example: its keyed hash and what the attack scored on it."""
    answers = [one for cell in answered for one in cell.answers]
    metrics = headlines(answers)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["record", "attack", "batch", "position", "secret", "tokens", *metrics])
    for one in answers:
        whole = one.source.whole()
        secrets = {(secret.batch, secret.position): secret for secret in whole.secrets}
        for example in whole.attacks[one.key].examples:
            secret = secrets[example.batch, example.position]
            values = [example.values.get(metric) for metric in metrics]
            place = [whole.id, one.key, example.batch, example.position, secret.hash[:HASH], secret.tokens]
            writer.writerow([*place, *("" if value is None else f"{value:.3g}" for value in values)])
    return file.getvalue()
