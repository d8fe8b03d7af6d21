"""A report as Markdown, for a pull request or a wiki."""

from collections.abc import Iterator, Sequence

from gradleak.report.numbers import duration, gain, mean_and_interval, number
from gradleak.report.page.section import FlagLine, GalleryItem, Report
from gradleak.report.pictures import heat_map, tradeoff_chart

BLOCK = "▇▇▇"
MARKED = {"pair": "**{}**", "word": "_{}_", "wrong": "{}", "unknown": "{}"}


def markdown(report: Report) -> str:
    """The sections of the page that words and tables can hold."""
    return "\n".join(line for part in (_verdict, _tables, _guesses, _facts) for line in part(report)) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, and an empty line."""
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines), ""]


def _verdict(report: Report) -> Iterator[str]:
    verdict = report.verdict
    yield from (f"# What leaks: {report.title}", "", f"**{report.story.happened}**", "", verdict.headline, "")
    yield from (f"- {sentence}" for sentence in verdict.sentences)
    yield ""
    if report.coverage.gaps:
        yield from ("## Not in these numbers", "", report.coverage.sentence(), "")
        yield from (f"- {gap.kind}: {gap.cell}. {gap.why}" for gap in report.coverage.gaps)
        yield ""
    story = report.story
    for title, told in (
        ("What it means", story.means),
        ("What was not tried", story.not_tried),
        ("What would change it", story.would_change),
    ):
        yield from (f"## {title}", "", *(f"- {sentence}" for sentence in told), "")
    if verdict.flags:
        yield from ("## Reasons to doubt", "")
        yield from (
            f"- `{flag.name}`{_where(flag, report)}: {flag.detail} {flag.meaning} {flag.what_to_do}" for flag in verdict.flags
        )
        yield ""


def _where(flag: FlagLine, report: Report) -> str:
    """In how many settings a flag was raised, where there are several."""
    return f" ({flag.settings} of {report.settings_run} settings)" if report.settings_run > 1 else ""


def _tables(report: Report) -> Iterator[str]:
    yield from ("## Settings, most leaking first", "", "Fractions in %; intervals over client batches.", "")
    measured = list(dict.fromkeys(row.metric for row in report.settings))
    metrics, mixed = " or ".join(measured), len(measured) > 1
    yield from table(
        ["setting", f"{metrics} [95 %]", "blind", "gain", "word for word", "verdict", "flags"],
        [
            [
                row.label,
                (f"{row.metric} " if mixed else "") + mean_and_interval(row.score),
                number(row.score.blind, row.score.unit),
                gain(row.score),
                mean_and_interval(row.exact) if row.exact else "–",
                row.verdict,
                ", ".join(row.flags),
            ]
            for row in report.settings
        ],
    )
    yield from ("## Attacks × defenses", "")
    cells = {(cell.attack, cell.defense): cell for cell in report.heat.cells}
    rows = []
    for defense in report.heat.defenses:
        found = [cells.get((attack, defense)) for attack in report.heat.attacks]
        texts = [mean_and_interval(cell.score) + ("?" if cell.in_doubt else "") if cell else "not run" for cell in found]
        rows.append([defense, *texts])
    yield from table(["defense", *report.heat.attacks], rows)
    if report.tradeoff:
        yield from ("## Leakage against utility", "", *(f"- {line}" for line in tradeoff_chart.conclusions(report.tradeoff)), "")
    if report.leak_map:
        yield from ("## Leak map over layers", "", *(f"- {line}" for line in heat_map.conclusions(report.leak_map)), "")


def _guesses(report: Report) -> Iterator[str]:
    yield from ("## Secrets beside guesses", "")
    yield "**Right beside its right neighbour**, _right word elsewhere_, wrong." + (
        " Texts are withheld." if report.redacted else " These are private texts."
    )
    yield ""
    rows = [
        [item.attack, item.defense, item.secret or f"hash {item.secret_hash}", _words(item), number(item.score, item.unit)]
        for item in report.gallery
    ]
    yield from table(["attack", "defense", "secret", "guess", report.metric], rows)


def _words(item: GalleryItem) -> str:
    return " ".join(MARKED[word.mark].format(BLOCK if word.text is None else word.text) for word in item.words)


def _facts(report: Report) -> Iterator[str]:
    yield from ("## Cost", "")
    yield from table(
        ["attack", "cells", "examples", "time", "steps"],
        [[cost.attack, str(cost.records), str(cost.examples), duration(cost.seconds), str(cost.steps)] for cost in report.costs],
    )
    yield from ("## Threat model", "", *(f"- {entry.name}: {entry.value}" for entry in report.threat_model), "")
    yield from ("## Provenance", "", *(f"- {entry.name}: {entry.value}" for entry in report.provenance), "")
    yield from ("## How to reproduce", "", "`gradleak run again.yaml`, with again.yaml:", "", "```yaml", report.reproduce, "```")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
