"""Attacks × defenses: which attack gets how much under which defense, as numbers and as a picture."""

from collections.abc import Sequence
from html import escape

from gradleak.records.schema import Score
from gradleak.records.settings import Setting
from gradleak.report.heat_colours import ink, paper
from gradleak.report.labels import Labels, natural
from gradleak.report.model import AttackHeat, HeatLine
from gradleak.report.numbers import mean_and_interval, number

ROOM = 30  # rows and columns
LOW = 0.5  # below it a failed search puts a leak in doubt
DOUBTS = ("search_failed", "no_objective", "not_adaptive")  # of one attack: its low score proves nothing
LEFT, TOP, WIDTH, HEIGHT, GAP, LETTER = 8, 16, 74, 36, 2, 7.4
BREAK = 26  # letters


def attack_heat(settings: Sequence[Setting], labels: Labels, metric: str) -> AttackHeat:
    """Of several settings under one defense (other data, seeds, batch sizes) the one that leaks most."""
    found: dict[tuple[str, str], list[HeatLine]] = {}
    for setting in settings:
        defense = labels.defense(setting.record)
        for ran in setting.attacks:
            score = ran.attack.scores.get(metric)
            if score is None or score.mean is None:
                continue
            name = labels.attack(ran.attack.spec)
            doubt = score_leak(score) < LOW and any(flag.name in DOUBTS for flag in ran.attack.flags)
            found.setdefault((name, defense), []).append(HeatLine(name, defense, score, doubt, 1, ran.source.id))
    cells = [_worst(lines) for lines in found.values()]
    attacks, defenses = (sorted({getattr(cell, side) for cell in cells}, key=natural) for side in ("attack", "defense"))
    shown = [cell for cell in cells if cell.attack in attacks[:ROOM] and cell.defense in defenses[:ROOM]]
    shown.sort(key=lambda cell: (natural(cell.defense), natural(cell.attack)))
    return AttackHeat(tuple(attacks[:ROOM]), tuple(defenses[:ROOM]), tuple(shown), len(cells) - len(shown))


def score_leak(score: Score) -> float:
    """How much a fraction leaks, 0 to 1; other units have no such scale and count as everything."""
    if score.unit != "fraction" or score.mean is None:
        return 1.0
    return score.mean if score.direction == "higher" else 1 - score.mean


def _worst(lines: Sequence[HeatLine]) -> HeatLine:
    sign = 1 if lines[0].score.direction == "higher" else -1
    most = max(lines, key=lambda line: sign * (line.score.mean or 0.0))
    return HeatLine(most.attack, most.defense, most.score, most.in_doubt, len(lines), most.record)


def svg(heat: AttackHeat, metric: str) -> str:
    """Defenses down, attacks across; names of attacks are written upwards so that many fit a narrow page."""
    cells = {(cell.attack, cell.defense): cell for cell in heat.cells}
    labels = {defense: _lines(defense) for defense in heat.defenses}
    left = int(max((len(line) for lines in labels.values() for line in lines), default=4) * LETTER) + LEFT + 10
    top = int(min(max((len(name) for name in heat.attacks), default=4), 36) * LETTER * 0.75) + TOP + 12
    width, height = left + len(heat.attacks) * WIDTH + 60, top + len(heat.defenses) * HEIGHT + 10
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="group" '
        f'aria-label="{escape(metric)} of every attack under every defense; the same numbers are in the table below">'
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
            parts.append(_box(cells.get((attack, defense)), attack, defense, left + column * WIDTH, y, metric))
    return "".join([*parts, "</svg>"])


def _box(cell: HeatLine | None, attack: str, defense: str, x: float, y: float, metric: str) -> str:
    size = f'x="{x:g}" y="{y:g}" width="{WIDTH - GAP}" height="{HEIGHT - GAP}" rx="3"'
    if cell is None:
        return f'<g role="img"><title>{escape(f"{attack} under {defense}: not run")}</title><rect class="absent" {size}/></g>'
    leak = score_leak(cell.score)
    shown = number(cell.score.mean, cell.score.unit) + ("?" if cell.in_doubt else "")
    return (
        f'<g role="img" class="cell"><title>{escape(told(cell, metric))}</title><rect {size} fill="{paper(leak)}"/>'
        f'<text x="{x + (WIDTH - GAP) / 2:g}" y="{y + 21:g}" text-anchor="middle" style="fill:{ink(leak)}">{shown}</text></g>'
    )


def told(cell: HeatLine, metric: str) -> str:
    """A cell in words."""
    doubt = "; the search failed, cannot be judged, or ignored the defense: not shown to be safe" if cell.in_doubt else ""
    most = f"; the most of {cell.settings} settings" if cell.settings > 1 else ""
    blind = number(cell.score.blind, cell.score.unit)
    told = f"{cell.attack} under {cell.defense}: {metric} {mean_and_interval(cell.score)}, blind {blind}, n = {cell.score.n}"
    return f"{told}{most}{doubt}"


def _lines(label: str) -> list[str]:
    """One line or two, broken after a colon or comma: a phone is narrow."""
    if len(label) <= BREAK:
        return [label]
    cut = max(label.rfind(mark, 0, BREAK) for mark in ":,+ ") + 1 or BREAK
    return [label[:cut], _cut(label[cut:], BREAK)]


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"
