"""One record on a terminal: what was audited, what updates say, guesses, scores, flags, conclusion."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradleak.records.judgement import judge_record, raised_beside
from gradleak.records.png import draw_grid
from gradleak.records.schema import (
    AttackRecord,
    BatchRecord,
    ExampleRecord,
    FateRecord,
    FindingRecord,
    Record,
    StageRecord,
)
from gradleak.report.labels import chain, line
from gradleak.report.numbers import counted, duration, number
from gradleak.report.privacy import guarantee_lines, noise_size
from gradleak.report.shown_guesses import Secrets, coloured, is_picture, printable
from gradleak.report.terminal.score_table import hidden, score_tables
from gradleak.report.verdict import closing_sentence, explain, worst_case_sentence

SHOWN = 3  # the first ones, not the best: chosen examples would flatter the attack
LEFT_OUT = ("special_tokens",)  # [CLS] and [SEP] are in every text
NAMES = {
    "longest_length": "longest length",
    "distinct_tokens": "different inputs",
    "bag_of_words": "bag of words",
}


def print_record(
    console: Console,
    record: Record,
    secrets: Secrets,
    *,
    guesses: bool = True,
    with_trace: bool = False,
    full: bool = False,
) -> None:
    """Draws the record. Without `guesses` none is drawn: a good one is the private text. `full`: legacy metrics too."""
    console.print(
        Text(
            f"Audit {record.id}" + (f" of a {record.target.model}" if record.target.model else ""),
            style="bold",
        )
    )
    console.print(heading(record), style="dim")
    for remark in record.data.remarks:
        console.print(Text(f"Data: {remark}"))
    for line_of_privacy in guarantee_lines(record):
        console.print(line_of_privacy)
    if (of_noise := noise_size(record)) is not None:
        console.print(f"Noise: {of_noise}")
    said = outright(record)
    if said is not None:
        console.print(Text("\nWhat the update says outright", style="bold"))
        console.print(Padding(said, (0, 0, 0, 2)))
    for name, attack in record.attacks.items():
        shown = min(len(attack.examples), SHOWN)
        some = f"first {shown} of " if shown < len(attack.examples) else ""
        console.print(
            Text(
                f"\n{name}: "
                f"{some}{counted(len(attack.examples), 'reconstruction', 'reconstructions')}",
                style="bold",
            )
        )
        if guesses:
            console.print(Padding(reconstructions(record, attack, secrets, shown), (0, 0, 0, 2)))
        else:
            console.print(
                "  hidden, since a good guess is the private text; add --show to see them.",
                style="dim",
            )
        for stage in attack.stages:
            console.print(f"  {stage_sentence(stage)}", style="dim")
        for title, table in trace(attack, secrets) if with_trace and guesses else ():
            console.print(Text(f"\n  {title}", style="bold"))
            console.print(Padding(table, (0, 0, 0, 2)))
    _print_scores(console, record, full)


def _print_scores(console: Console, record: Record, full: bool) -> None:
    console.print()
    for table in score_tables(console, record, full):
        console.print(table)
        console.print()
    left_out = "" if full or not hidden(record) else " Legacy metrics: gradleak show RECORD --full."
    legend = (
        "Fractions in %; intervals over client batches; gain: how much more than the blind "
        "attack gets."
    )
    console.print(legend + left_out, style="dim")
    console.print()
    for name, attack in record.attacks.items():
        if attack.label_accuracy is not None:
            console.print(
                f"{name}: {100 * attack.label_accuracy:.1f} % of the labels guessed right, none "
                f"of them told."
            )
    console.print(worst_case_sentence(record), style="bold")
    judgement = judge_record(record)
    for name, details in raised_beside(judgement, record).items():
        console.print(Text.assemble(("! ", "yellow"), explain(name, details)))
    console.print(closing_sentence(judgement, record), style="bold")


def stage_sentence(stage: StageRecord) -> str:
    """What one attack of several did: `span: 3 batches, 3 proven, 100.0 % word for word, 20 s; refused 1 batch: …`."""
    exact = stage.scores.get("exact_match")
    scored = (
        "" if exact is None or exact.mean is None else f", {100 * exact.mean:.1f} % word for word"
    )
    reached = counted(len(stage.batches), "batch", "batches")
    did = (
        [f"{reached}, {stage.certified} proven{scored}, {duration(stage.seconds)}"]
        if stage.batches
        else []
    )
    return f"{stage.attack}: {'; '.join([*did, *map(fate_words, stage.fates)])}"


def fate_words(fate: FateRecord) -> str:
    """`refused 2 batches: …`, or with what else kept an attack from its guesses."""
    batches = counted(len(fate.batches), "batch", "batches")
    words = {
        "refused": "refused",
        "failed": "failed on",
        "cut": "was cut on",
        "no_time": "was not begun on",
    }
    said = f": {fate.reason}" if fate.reason and fate.fate in ("refused", "failed") else ""
    return (
        f"{words.get(fate.fate, fate.fate)} "
        f"{batches}{said or (' (out of time)' if fate.fate in ('cut', 'no_time') else '')}"
    )


def heading(record: Record) -> str:
    """Everything that was held fixed, and what it took."""
    spec = record.spec
    seconds = sum(attack.cost.seconds for attack in record.attacks.values())
    parts = [
        f"target {record.target.name}",
        f"data {line(spec.get('data'))}",
        f"n = {record.data.examples} in {counted(record.data.batches, 'batch', 'batches')}",
        f"protocol {line(spec.get('protocol'))}",
        f"defense {chain(spec.get('defenses'))}",
        f"view {line(spec.get('view'))}",
        f"knows {chain(spec.get('know'), ', ')}",
        f"seed {spec.get('seed', '-')}",
        f"device {record.machine.get('device', '-')}",
        f"attacks took {duration(seconds)}",
    ]
    return " · ".join(parts)


def outright(record: Record) -> Table | None:
    """One line a kind of finding, over all batches; none where nothing was read."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    shown = [found for found in record.findings if found.name not in LEFT_OUT]
    for name in dict.fromkeys(found.name for found in shown):
        found = [one for one in shown if one.name == name]
        told = Text(_sentence(name, found, record.data.batches))
        told.append(f"  ({', '.join(dict.fromkeys(one.source for one in found))})", style="dim")
        table.add_row(NAMES.get(name, name), told)
    return table if shown else None


def _sentence(name: str, found: Sequence[FindingRecord], batches: int) -> str:
    where = (
        f"read in {len(found)} of {batches} batches"
        if len(found) < batches
        else "read in every batch"
    )
    certain = sum(one.exact for one in found)
    how = {len(found): "exact", 0: "an estimate"}.get(
        certain, f"exact in {certain}, elsewhere an estimate"
    )
    return ", ".join(
        part for part in (_amount(name, found), _rightness(name, found), where, how) if part
    )


def _amount(name: str, found: Sequence[FindingRecord]) -> str:
    """How much was read; the numbers themselves where these are what was counted."""
    if name == "bag_of_words":
        return f"{number(_mean([one.count for one in found]), 'words')} words a batch"
    if name == "distinct_tokens":
        return (
            f"{number(_mean([value for one in found for value in one.values]), 'inputs')} a batch"
        )
    return ""


def _rightness(name: str, found: Sequence[FindingRecord]) -> str:
    recall, precision = (
        _mean([share for one in found if (share := getattr(one, kind)) is not None])
        for kind in ("recall", "precision")
    )
    if recall is None or precision is None:
        return ""
    if name == "bag_of_words":
        if recall == precision == 1:
            return "all of them and no others"
        return (
            f"{number(recall, 'fraction')} % of the true ones among them, "
            f"{number(precision, 'fraction')} % of them true"
        )
    return f"{number(recall, 'fraction')} % right"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def reconstructions(
    record: Record, attack: AttackRecord, secrets: Secrets, shown: int = SHOWN
) -> Table:
    """The first examples and what the attack made of them."""
    hashes = {(secret.batch, secret.position): secret.hash for secret in record.secrets}
    table = _grid()
    for number_shown, example in enumerate(attack.examples[:shown], start=1):
        place = (example.batch, example.position)
        secret = secrets.get(place)
        hidden = Text(f"not kept (hash {hashes.get(place, '?')[:12]})", style="dim")
        table.add_row(f"{number_shown} secret", hidden if secret is None else _secret(secret))
        table.add_row("  guess", _guess(example, secret))
    return table


def trace(attack: AttackRecord, secrets: Secrets) -> Iterator[tuple[str, Table]]:
    """The guesses of every batch as the search went on."""
    for batch in attack.batches:
        table = _grid()
        for step, sentences in batch.guesses:
            for position, sentence in enumerate(sentences):
                label = f"step {step}" if position == 0 else ""
                table.add_row(label, _traced(sentence, batch, len(sentences), secrets))
        yield f"batch {batch.batch}{_losses(batch)}", table


def _secret(secret: str) -> Text:
    return Text("a picture", style="dim") if is_picture(secret) else Text(printable(secret))


def _guess(example: ExampleRecord, secret: str | None) -> Text:
    if example.guess is None:
        return Text("not kept", style="dim")
    if is_picture(example.guess):
        return picture_line(example)
    text = Text(printable(example.guess)) if secret is None else coloured(secret, example.guess)
    if example.values.get("rouge1") is not None:
        text.append(f"  (rouge1 {number(example.values['rouge1'], 'fraction')})", style="dim")
    if example.certified:
        text.append("  (proven by the update)", style="bold not dim")
    return text


def _traced(sentence: str, batch: BatchRecord, sentences: int, secrets: Secrets) -> Text:
    """Coloured where the batch has one example: on the way, guesses are not yet aligned to secrets."""
    secret = secrets.get((batch.batch, 0)) if sentences == 1 else None
    return Text(printable(sentence)) if secret is None else coloured(secret, sentence)


def _losses(batch: BatchRecord) -> str:
    if len(batch.losses) < 2:
        return ""
    (_, first), (step, last) = batch.losses[0], batch.losses[-1]
    return (
        f": objective {number(first, 'objective')} at the start, {number(last, 'objective')} "
        f"at step {step}"
    )


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def has_pictures(attack: AttackRecord) -> bool:
    """Whether its guesses are pictures."""
    return any(is_picture(example.guess) for example in attack.examples)


def picture_line(example: ExampleRecord) -> Text:
    """What a picture's guess scored."""
    values = [f"{name} {value:.3g}" for name, value in example.values.items() if value is not None]
    return Text("a picture: " + ", ".join(values), style="dim")


def picture_grid(attack: AttackRecord, secrets: Mapping[tuple[int, int], str]) -> bytes:
    """A PNG file of all guesses, each below its secret where that may be shown."""
    return draw_grid(
        [
            (secrets.get((one.batch, one.position)), one.guess)
            for one in attack.examples
            if one.guess is not None
        ]
    )
