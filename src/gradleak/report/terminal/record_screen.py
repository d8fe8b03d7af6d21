"""One record on a terminal: what was audited, what updates say, guesses, scores, conclusion."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from gradleak.records.judgement import judge_record, list_brackets, list_flags_beside
from gradleak.records.png import draw_grid
from gradleak.records.schema import (
    AttackRecord,
    BatchRecord,
    ExampleRecord,
    FateRecord,
    FindingRecord,
    Record,
    Score,
    StageRecord,
)
from gradleak.report.naming import write_chain, write_component
from gradleak.report.numbers import (
    MISSING,
    write_count,
    write_duration,
    write_gain,
    write_interval,
    write_number,
)
from gradleak.report.shown_guesses import (
    Secrets,
    colour_words,
    find_hashes,
    is_picture,
    make_printable,
)
from gradleak.report.terminal.console import build_table, indent, split_to_fit
from gradleak.report.verdict import (
    describe_bounds,
    describe_noise,
    explain,
    write_bracket,
    write_conclusion,
    write_guarantees,
    write_worst_case,
)

ScoreColumn = tuple[str, Mapping[str, Score]]
INDENTED = (0, 0, 0, 2)
WORST = "worst case"
LEGACY = "_legacy"
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
    """Prints the record; without `guesses` none of them, since a good one is the private text.

    `full` adds legacy metrics.
    """
    model = f" of a {record.target.model}" if record.target.model else ""
    console.print(Text(f"Audit {record.id}{model}", style="bold"))
    console.print(describe_audit(record), style="dim")
    for line in (*(f"Data: {one}" for one in record.data.remarks), *write_guarantees(record)):
        console.print(Text(line))
    if (of_noise := describe_noise(record)) is not None:
        console.print(f"Noise: {of_noise}")
    if (said := build_findings_table(record)) is not None:
        console.print(Text("\nWhat the update says outright", style="bold"))
        console.print(Padding(said, INDENTED))
    for name, attack in record.attacks.items():
        shown, count = min(len(attack.examples), SHOWN), len(attack.examples)
        some = f"first {shown} of " if shown < count else ""
        title = f"\n{name}: {some}{write_count(count, 'reconstruction', 'reconstructions')}"
        console.print(Text(title, style="bold"))
        if guesses:
            console.print(Padding(build_guess_table(record, attack, secrets, shown), INDENTED))
        else:
            console.print(
                "  hidden, since a good guess is the private text; add --show to see them.",
                style="dim",
            )
        for stage in attack.stages:
            console.print(f"  {describe_stage(stage)}", style="dim")
        for title, table in build_trace_tables(attack, secrets) if with_trace and guesses else ():
            console.print(Text(f"\n  {title}", style="bold"))
            console.print(Padding(table, INDENTED))
    _print_scores(console, record, full)


def _print_scores(console: Console, record: Record, full: bool) -> None:
    console.print()
    for table in build_score_tables(console, record, full):
        console.print(table)
        console.print()
    console.print(_write_legend(record, full), style="dim")
    console.print()
    for name, attack in record.attacks.items():
        if attack.label_accuracy is not None:
            console.print(
                f"{name}: {100 * attack.label_accuracy:.1f} % of the labels found right; this "
                "attack was told none."
            )
    console.print(write_worst_case(record), style="bold")
    if record.bounds is not None:
        console.print(Text("\nWhat no attack could do", style="bold"))
        print_bracket(console, record)
        console.print()
    judgement = judge_record(record)
    for name, details in list_flags_beside(judgement, record).items():
        console.print(indent(Text("! ", "yellow"), explain(name, details)))
    console.print(write_conclusion(judgement, record), style="bold")


def _write_legend(record: Record, full: bool) -> str:
    guesses = max((one.blind_guesses for one in record.worst_case.values()), default=1)
    sentences = {
        "Fractions in %; intervals over client batches; gain: how much more than the blind attack"
        " gets.": True,
        f"Beside the worst case: the best of {guesses} blind guesses.": guesses > 1,
        "Legacy metrics: gradleak show RECORD --full.": find_hidden(record) and not full,
    }
    legend = " ".join(sentence for sentence, holds in sentences.items() if holds)
    fractions = any(one.unit == "fraction" for one in record.worst_case.values())
    return legend if fractions else legend.replace("Fractions in %; i", "I", 1)


def print_bracket(console: Console, record: Record) -> None:
    """Prints what no attack could do on a setting; nothing where that was not computed."""
    if record.bounds is None:
        return
    titles = ("rebuilt", "at most", "guaranteed", "without the update")
    table = build_table("", *(Column(title, justify="right") for title in titles))
    for bracket in list_brackets(record):
        table.add_row(bracket.of, *write_bracket(bracket))
    console.print(Padding(table, INDENTED))
    for sentence in describe_bounds(record):
        console.print(f"  {sentence}", style="dim", soft_wrap=False)


def build_score_tables(console: Console, record: Record, full: bool = False) -> Iterator[Table]:
    """Builds as many tables as attacks need to fit side by side; the worst case is last."""
    columns: list[ScoreColumn] = [(name, attack.scores) for name, attack in record.attacks.items()]
    if len(columns) > 1:
        columns.append((WORST, record.worst_case))
    left_out = set() if full else find_hidden(record)
    shown = [
        (name, {metric: score for metric, score in scores.items() if metric not in left_out})
        for name, scores in columns
    ]
    return split_to_fit(console, shown, _build_score_table)


def find_hidden(record: Record) -> set[str]:
    """Finds legacy metrics that stand beside the honest ones they repeat.

    They are for comparison with published tables, and shown on request.
    """
    metrics = {metric for attack in record.attacks.values() for metric in attack.scores}
    return {
        metric
        for metric in metrics
        if metric.endswith(LEGACY) and metric.removesuffix(LEGACY) in metrics
    }


def _build_score_table(columns: Sequence[ScoreColumn]) -> Table:
    table = build_table("\nmetric")
    for name, _ in columns:
        table.add_column(f"{name}\nmean [95 %]", justify="right")
        table.add_column("\nblind", justify="right", style="dim")
        table.add_column("\ngain", justify="right")
    for metric in dict.fromkeys(metric for _, scores in columns for metric in scores):
        table.add_row(
            metric, *(text for _, scores in columns for text in _write_score(scores.get(metric)))
        )
    return table


def _write_score(score: Score | None) -> tuple[str, str, str]:
    if score is None:
        return MISSING, MISSING, MISSING
    return write_interval(score), write_number(score.blind, score.unit), write_gain(score)


def describe_stage(stage: StageRecord) -> str:
    """Says what one attack of several did.

    `span: 3 batches, 3 proven, 100.0 % word for word, 20 s; refused 1 batch: …`
    """
    exact = stage.scores.get("exact_match")
    parts = [
        write_count(len(stage.batches), "batch", "batches"),
        f"{stage.certified} proven",
        *([f"{100 * exact.mean:.1f} % word for word"] if exact and exact.mean is not None else []),
        write_duration(stage.seconds),
    ]
    did = [", ".join(parts)] if stage.batches else []
    return f"{stage.attack}: {'; '.join([*did, *map(describe_fate, stage.fates)])}"


def describe_fate(fate: FateRecord) -> str:
    """Says `refused 2 batches: …`, or what else kept an attack from its guesses."""
    did, why = {
        "refused": ("refused", fate.reason and f": {fate.reason}"),
        "failed": ("failed on", fate.reason and f": {fate.reason}"),
        "cut": ("was cut on", " (out of time)"),
        "no_time": ("was not begun on", " (out of time)"),
    }.get(fate.fate, (fate.fate, ""))
    return f"{did} {write_count(len(fate.batches), 'batch', 'batches')}{why}"


def describe_audit(record: Record) -> str:
    """Lists everything that was held fixed, and what it took."""
    spec = record.spec
    return " · ".join(
        [
            f"target {record.target.name}",
            f"data {write_component(spec.get('data'))}",
            f"n = {record.data.examples} in {write_count(record.data.batches, 'batch', 'batches')}",
            f"protocol {write_component(spec.get('protocol'))}",
            f"defense {write_chain(spec.get('defenses'))}",
            f"view {write_component(spec.get('view'))}",
            f"knows {write_chain(spec.get('know'), ', ')}",
            f"seed {spec.get('seed', '-')}",
            f"device {record.machine.get('device', '-')}",
            "attacks took "
            + write_duration(sum(attack.cost.seconds for attack in record.attacks.values())),
        ]
    )


def build_findings_table(record: Record) -> Table | None:
    """Builds a line for each kind of finding, over all batches; none where nothing was read."""
    groups: dict[str, list[FindingRecord]] = {}
    for found in record.findings:
        if found.name not in LEFT_OUT:
            groups.setdefault(found.name, []).append(found)
    table = _build_grid()
    for name, group in groups.items():
        told = Text(_describe_findings(name, group, record.data.batches))
        told.append(f"  ({', '.join(dict.fromkeys(one.source for one in group))})", style="dim")
        table.add_row(NAMES.get(name, name), told)
    return table if groups else None


def _describe_findings(name: str, found: Sequence[FindingRecord], batches: int) -> str:
    all_read = "read in every batch"
    certain = sum(one.exact for one in found)
    parts = (
        _describe_amount(name, found),
        _describe_rightness(name, found),
        f"read in {len(found)} of {batches} batches" if len(found) < batches else all_read,
        {len(found): "exact", 0: "an estimate"}.get(
            certain, f"exact in {certain}, elsewhere an estimate"
        ),
    )
    return ", ".join(filter(None, parts))


def _describe_amount(name: str, found: Sequence[FindingRecord]) -> str:
    """Says how much was read, or the numbers themselves where these are what was counted."""
    if name == "bag_of_words":
        return f"{write_number(_average([one.count for one in found]), 'words')} words a batch"
    if name == "distinct_tokens":
        values = [value for one in found for value in one.values]
        return f"{write_number(_average(values), 'inputs')} a batch"
    return ""


def _describe_rightness(name: str, found: Sequence[FindingRecord]) -> str:
    recall, precision = (
        _average([share for one in found if (share := getattr(one, kind)) is not None])
        for kind in ("recall", "precision")
    )
    if recall is None or precision is None:
        return ""
    if name == "bag_of_words":
        if recall == precision == 1:
            return "all of them and no others"
        return (
            f"{write_number(recall, 'fraction')} % of the true ones among them, "
            f"{write_number(precision, 'fraction')} % of them true"
        )
    return f"{write_number(recall, 'fraction')} % right"


def _average(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def build_guess_table(
    record: Record, attack: AttackRecord, secrets: Secrets, shown: int = SHOWN
) -> Table:
    """Builds a table of the first examples and what the attack made of them."""
    hashes = find_hashes(record)
    table = _build_grid()
    for number_shown, example in enumerate(attack.examples[:shown], start=1):
        place = (example.batch, example.position)
        secret = secrets.get(place)
        hidden = Text(f"not kept (hash {hashes.get(place, '?')[:12]})", style="dim")
        table.add_row(f"{number_shown} secret", hidden if secret is None else _draw_secret(secret))
        table.add_row("  guess", _draw_guess(example, secret))
    return table


def build_trace_tables(attack: AttackRecord, secrets: Secrets) -> Iterator[tuple[str, Table]]:
    """Builds a table for each batch of its guesses as the search went on."""
    for batch in attack.batches:
        table = _build_grid()
        for step, sentences in batch.guesses:
            # Guesses of several examples are not yet aligned to secrets
            secret = secrets.get((batch.batch, 0)) if len(sentences) == 1 else None
            for position, sentence in enumerate(sentences):
                table.add_row("" if position else f"step {step}", _draw_words(sentence, secret))
        yield f"batch {batch.batch}{_describe_losses(batch)}", table


def _draw_secret(secret: str) -> Text:
    return Text("a picture", style="dim") if is_picture(secret) else Text(make_printable(secret))


def _draw_guess(example: ExampleRecord, secret: str | None) -> Text:
    if example.guess is None:
        return Text("not kept", style="dim")
    if is_picture(example.guess):
        return describe_picture(example)
    text = _draw_words(example.guess, secret)
    if example.values.get("rouge1") is not None:
        text.append(f"  (rouge1 {write_number(example.values['rouge1'], 'fraction')})", style="dim")
    if example.certified:
        text.append("  (proven by the update)", style="bold not dim")
    return text


def _draw_words(guess: str, secret: str | None) -> Text:
    """Colours a guess where the secret is at hand."""
    return Text(make_printable(guess)) if secret is None else colour_words(secret, guess)


def _describe_losses(batch: BatchRecord) -> str:
    if len(batch.losses) < 2:
        return ""
    (_, first), (step, last) = batch.losses[0], batch.losses[-1]
    return (
        f": objective {write_number(first, 'objective')} at the start, "
        f"{write_number(last, 'objective')} "
        f"at step {step}"
    )


def _build_grid() -> Table:
    return Table.grid(Column(style="dim", no_wrap=True), Column(overflow="fold"), padding=(0, 2))


def has_pictures(attack: AttackRecord) -> bool:
    """Whether an attack's guesses are pictures."""
    return any(is_picture(example.guess) for example in attack.examples)


def describe_picture(example: ExampleRecord) -> Text:
    """Says what a picture's guess scored."""
    values = [f"{name} {value:.3g}" for name, value in example.values.items() if value is not None]
    return Text("a picture: " + ", ".join(values), style="dim")


def draw_picture_grid(attack: AttackRecord, secrets: Mapping[tuple[int, int], str]) -> bytes:
    """Draws a PNG file of all guesses, each below its secret where that may be shown."""
    return draw_grid(
        [
            (secrets.get((one.batch, one.position)), one.guess)
            for one in attack.examples
            if one.guess is not None
        ]
    )
