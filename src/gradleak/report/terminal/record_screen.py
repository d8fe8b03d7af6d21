"""One record on a terminal: what was audited, reconstructions, scores, flags, and what may be concluded."""

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gradleak.records.judgement import judge_record, raised_beside
from gradleak.records.schema import FateRecord, Record, StageRecord
from gradleak.report.numbers import counted, duration
from gradleak.report.privacy import guarantee_lines, noise_size
from gradleak.report.terminal.findings import outright
from gradleak.report.terminal.reconstructions import SHOWN, Secrets, reconstructions, trace
from gradleak.report.terminal.score_table import hidden, score_tables
from gradleak.report.verdict import closing_sentence, explain, worst_case_sentence


def print_record(
    console: Console, record: Record, secrets: Secrets, *, guesses: bool = True, with_trace: bool = False, full: bool = False
) -> None:
    """Draws the record. Without `guesses` none is drawn: a good one is the private text. `full`: legacy metrics too."""
    console.print(Text(f"Audit {record.id}" + (f" of a {record.target.model}" if record.target.model else ""), style="bold"))
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
        console.print(Text(f"\n{name}: {some}{counted(len(attack.examples), 'reconstruction', 'reconstructions')}", style="bold"))
        if guesses:
            console.print(Padding(reconstructions(record, attack, secrets, shown), (0, 0, 0, 2)))
        else:
            console.print("  hidden, since a good guess is the private text; add --show to see them.", style="dim")
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
    legend = "Fractions in %; intervals over client batches; gain: how much more than the blind attack gets."
    console.print(legend + left_out, style="dim")
    console.print()
    for name, attack in record.attacks.items():
        if attack.label_accuracy is not None:
            console.print(f"{name}: {100 * attack.label_accuracy:.1f} % of the labels guessed right, none of them told.")
    console.print(worst_case_sentence(record), style="bold")
    judgement = judge_record(record)
    for name, details in raised_beside(judgement, record).items():
        console.print(Text.assemble(("! ", "yellow"), explain(name, details)))
    console.print(closing_sentence(judgement, record), style="bold")


def stage_sentence(stage: StageRecord) -> str:
    """What one attack of several did: `span: 3 batches, 3 proven, 100.0 % word for word, 20 s; refused 1 batch: …`."""
    exact = stage.scores.get("exact_match")
    scored = "" if exact is None or exact.mean is None else f", {100 * exact.mean:.1f} % word for word"
    reached = counted(len(stage.batches), "batch", "batches")
    did = [f"{reached}, {stage.certified} proven{scored}, {duration(stage.seconds)}"] if stage.batches else []
    return f"{stage.attack}: {'; '.join([*did, *map(fate_words, stage.fates)])}"


def fate_words(fate: FateRecord) -> str:
    """`refused 2 batches: …`, or with what else kept an attack from its guesses."""
    batches = counted(len(fate.batches), "batch", "batches")
    words = {"refused": "refused", "failed": "failed on", "cut": "was cut on", "no_time": "was not begun on"}
    said = f": {fate.reason}" if fate.reason and fate.fate in ("refused", "failed") else ""
    return f"{words.get(fate.fate, fate.fate)} {batches}{said or (' (out of time)' if fate.fate in ('cut', 'no_time') else '')}"


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


def line(component: Any) -> str:
    """A component of a spec as it is written on the command line; fields that are off are left out."""
    if not isinstance(component, dict):
        return _written(component if component is not None else "-")
    fields = [f"{key}={_written(value)}" for key, value in component.items() if key != "name" and not _off(value)]
    return str(component.get("name", "-")) + (":" + ",".join(fields) if fields else "")


def _written(value: Any) -> str:
    """A value of a field: `[query,key]`, `true`, or a component within a component."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, dict):
        return line(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _off(value: Any) -> bool:
    """Whether a field is left out; a number never is: noise of 0 must not read as the usual noise."""
    return value is None or value is False or value == [] or value == ""


def chain(components: Any, between: str = " + ") -> str:
    """Several components on one line."""
    return between.join(line(one) for one in components or ()) or "none"
