"""Attacks × defenses: which attack gets how much under which defense, as numbers and as a picture."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from gradleak.records.judgement import LEAKS, judge, leading_metric
from gradleak.records.schema import Score
from gradleak.records.settings import Setting
from gradleak.report.labels import Labels, natural
from gradleak.report.numbers import mean_and_interval, number
from gradleak.report.page.section import AttackHeat, HeatLine
from gradleak.report.pictures.heat_grid import ink, paper

ROOM = 30  # rows and columns
LEFT, TOP, WIDTH, HEIGHT, GAP, LETTER = 8, 16, 74, 36, 2, 7.4
BREAK = 26  # letters


def attack_heat(settings: Sequence[Setting], labels: Labels) -> AttackHeat:
    """Of several settings under one defense (other data, seeds, batch sizes) the one that leaks most."""
    metrics = {leading_metric(ran.attack.scores) for setting in settings for ran in setting.attacks}
    found: dict[tuple[str, str], list[HeatLine]] = {}
    for setting in settings:
        defense = labels.defense(setting.record)
        for ran in setting.attacks:
            judged = judge([(ran.attack, ran.columns)], setting.record.data.batches)
            score = ran.attack.scores.get(judged.metric)
            if score is None or score.mean is None:
                continue
            name = labels.attack(ran.attack.spec) + (f" ({judged.metric})" if len(metrics) > 1 else "")
            line = HeatLine(name, defense, judged.metric, score, judged.verdict, judged.may_be_more, 1, ran.source.id)
            found.setdefault((name, defense), []).append(line)
    cells = [_worst(lines) for lines in found.values()]
    attacks, defenses = (sorted({getattr(cell, side) for cell in cells}, key=natural) for side in ("attack", "defense"))
    shown = [cell for cell in cells if cell.attack in attacks[:ROOM] and cell.defense in defenses[:ROOM]]
    shown.sort(key=lambda cell: (natural(cell.defense), natural(cell.attack)))
    return AttackHeat(tuple(attacks[:ROOM]), tuple(defenses[:ROOM]), tuple(shown), len(cells) - len(shown))


def score_leak(score: Score) -> float:
    """How much a fraction leaks, 0 to 1; an error by how far it lies below blind's; other units count as everything."""
    if score.unit != "fraction" and score.direction == "lower" and score.mean is not None and score.blind:
        return min(max(1 - score.mean / score.blind, 0.0), 1.0)
    if score.unit != "fraction" or score.mean is None:
        return 1.0
    return score.mean if score.direction == "higher" else 1 - score.mean


def _worst(lines: Sequence[HeatLine]) -> HeatLine:
    sign = 1 if lines[0].score.direction == "higher" else -1
    most = max(lines, key=lambda line: (line.verdict == LEAKS, sign * (line.score.mean or 0.0)))
    return replace(most, settings=len(lines))


def svg(heat: AttackHeat) -> str:
    """Defenses down, attacks across; names of attacks are written upwards so that many fit a narrow page."""
    cells = {(cell.attack, cell.defense): cell for cell in heat.cells}
    labels = {defense: _lines(defense) for defense in heat.defenses}
    left = int(max((len(line) for lines in labels.values() for line in lines), default=4) * LETTER) + LEFT + 10
    top = int(min(max((len(name) for name in heat.attacks), default=4), 36) * LETTER * 0.75) + TOP + 12
    width, height = left + len(heat.attacks) * WIDTH + 60, top + len(heat.defenses) * HEIGHT + 10
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="group" '
        f'aria-label="Score of every attack under every defense; the same numbers are in the table below">'
    ]
    for column, attack in enumerate(heat.attacks):
        x = left + column * WIDTH + WIDTH / 2
        parts.append(f'<text transform="translate({x:g} {top - 8}) rotate(-40)">{escape(_cut(attack, 36))}</text>')
    for row, defense in enumerate(heat.defenses):
        y = top + row * HEIGHT
        first = y + 21 - 7 * (len(labels[defense]) - 1)
        for place, line in enumerate(labels[defense]):
            parts.append(f'<text x="{left - 8}" y="{first + 14 * place}" text-anchor="end">{escape(line)}</text>')
        for column, attack in enumerate(heat.attacks):
            parts.append(_box(cells.get((attack, defense)), attack, defense, left + column * WIDTH, y))
    return "".join([*parts, "</svg>"])


def _box(cell: HeatLine | None, attack: str, defense: str, x: float, y: float) -> str:
    size = f'x="{x:g}" y="{y:g}" width="{WIDTH - GAP}" height="{HEIGHT - GAP}" rx="3"'
    if cell is None:
        return f'<g role="img"><title>{escape(f"{attack} under {defense}: not run")}</title><rect class="absent" {size}/></g>'
    leak = score_leak(cell.score)
    shown = number(cell.score.mean, cell.score.unit) + ("?" if cell.in_doubt else "")
    return (
        f'<g role="img" class="cell"><title>{escape(told(cell))}</title><rect {size} fill="{paper(leak)}"/>'
        f'<text x="{x + (WIDTH - GAP) / 2:g}" y="{y + 21:g}" text-anchor="middle" style="fill:{ink(leak)}">{shown}</text></g>'
    )


def told(cell: HeatLine) -> str:
    """A cell in words."""
    doubt = "; may be more: the search failed, could not be checked, or ignored the defense" if cell.in_doubt else ""
    most = f"; the most of {cell.settings} settings" if cell.settings > 1 else ""
    blind = number(cell.score.blind, cell.score.unit)
    told = f"{cell.attack} under {cell.defense}: {cell.metric} {mean_and_interval(cell.score)}, blind {blind}, n = {cell.score.n}"
    return f"{told}; {cell.verdict}{doubt}{most}"


def _lines(label: str) -> list[str]:
    """One line or two, broken after a colon or comma: a phone is narrow."""
    if len(label) <= BREAK:
        return [label]
    cut = max(label.rfind(mark, 0, BREAK) for mark in ":,+ ") + 1 or BREAK
    return [label[:cut], _cut(label[cut:], BREAK)]


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"
