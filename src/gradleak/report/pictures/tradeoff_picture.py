"""A trade-off as a picture: utility to the right, leak upwards, a cross of intervals a setting; good is low and right."""

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from gradleak.report.numbers import number
from gradleak.report.pictures.svg import LINE, picture, small_lines, text, wrapped
from gradleak.report.pictures.tradeoff_chart import Point, Tradeoff, conclusions, epsilon_text, gain_text, heading, utility_text

LEFT, TOP, WIDTH, HEIGHT = 84, 56, 560, 360  # pixels: the frame
PAGE = LEFT + WIDTH + 28
RADIUS = 10
TICKS = 5  # about so many an axis
STYLE = """
.frame { fill: none; stroke: #8c959f; } .grid { stroke: #8c959f; stroke-opacity: 0.25; }
.met { fill: #1a7f37; stroke: #1a7f37; } .leaks { fill: #b3261e; stroke: #b3261e; }
.doubt { fill: #6e7781; stroke: #6e7781; } .point text { fill: #ffffff; stroke: none; }
.cross { fill: none; stroke-width: 1.5; stroke-opacity: 0.7; } .limit { stroke: #1a7f37; stroke-dasharray: 6 4; }
.allowed { fill: #1a7f37; fill-opacity: 0.08; }
@media (prefers-color-scheme: dark) { .met { stroke: #3fb950; } .leaks { stroke: #ff7b72; } .limit { stroke: #3fb950; } }
"""


class Axis:
    """Values from `low` to `high` along so many pixels, beginning at a whole number of steps."""

    def __init__(self, values: list[float], start: int, pixels: int) -> None:
        values = values if max(values) > min(values) else [*values, values[0] + 1.0]
        span = max(values) - min(values)
        rough: float = 10.0 ** math.floor(math.log10(span / TICKS))
        self.step: float = next(step for step in (rough, 2 * rough, 5 * rough, 10 * rough) if span / step <= TICKS + 1)
        self.low = math.floor(min(values) / self.step + 1e-9) * self.step
        self.high = math.ceil(max(values) / self.step - 1e-9) * self.step
        self.start, self.pixels = start, pixels

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * self.pixels

    def ticks(self) -> list[float]:
        count = round((self.high - self.low) / self.step)
        return [self.low + place * self.step for place in range(count + 1)]


def svg(tradeoff: Tradeoff, *, alone: bool = True) -> str:
    """The picture as text; where it does not stand alone, what may be concluded stands beside it and not in it."""
    title = f"Trade-off: what leaks ({tradeoff.metric} above blind) against {tradeoff.utility}"
    gains = [end for point in tradeoff.points for end in (point.gain.low, point.gain.high)]
    utilities = [end for point in tradeoff.points for end in _ends(tradeoff, point)]
    across = Axis([0.0, *utilities], LEFT, WIDTH)
    upwards = Axis([0.0, tradeoff.max_leak, *gains], TOP + HEIGHT, -HEIGHT)
    sentences = [*conclusions(tradeoff), *heading(tradeoff)]
    written = [*_legend(tradeoff), *(sentences if alone else heading(tradeoff))]
    lines = [line for sentence in written for line in wrapped(sentence, PAGE)]
    below = TOP + HEIGHT + 72
    parts = [
        *_limit(tradeoff, upwards),
        *_axes(tradeoff, across, upwards),
        *_points(tradeoff, across, upwards),
        *small_lines(lines, below),
    ]
    return picture(title, [*_legend(tradeoff), *sentences], PAGE, below + LINE * len(lines), parts, STYLE)


def _limit(tradeoff: Tradeoff, upwards: Axis) -> Iterator[str]:
    """What the target allows, shaded."""
    y = upwards.at(tradeoff.max_leak)
    yield f'<rect class="allowed" x="{LEFT}" y="{y:g}" width="{WIDTH}" height="{TOP + HEIGHT - y:g}"/>'
    yield f'<line class="limit" x1="{LEFT}" y1="{y:g}" x2="{LEFT + WIDTH}" y2="{y:g}"/>'


def _axes(tradeoff: Tradeoff, across: Axis, upwards: Axis) -> Iterator[str]:
    unit = tradeoff.points[0].leak.unit
    yield f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>'
    for value in across.ticks():
        x = across.at(value)
        yield f'<line class="grid" x1="{x:g}" y1="{TOP}" x2="{x:g}" y2="{TOP + HEIGHT}"/>'
        yield text(x, TOP + HEIGHT + 18, f"{round(value, 6):g}", style="small")
    for value in upwards.ticks():
        y = upwards.at(value)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:g}" x2="{LEFT + WIDTH}" y2="{y:g}"/>'
        yield text(
            LEFT - 8, y + 4, f"{round(100 * value, 6):g} %" if unit == "fraction" else f"{value:g}", anchor="end", style="small"
        )
    yield text(LEFT + WIDTH / 2, TOP + HEIGHT + 42, f"{tradeoff.utility} after training (more is better)")
    yield text(16, TOP - 10, f"gain over blind, {tradeoff.metric} (less is better)", anchor="start")


def _points(tradeoff: Tradeoff, across: Axis, upwards: Axis) -> Iterator[str]:
    for place, point in enumerate(tradeoff.points, start=1):
        label = f"{place}?" if point.in_doubt else str(place)
        look = _look(tradeoff, point)
        x, y = across.at(point.utility[tradeoff.utility].mean), upwards.at(point.gain.mean)
        left, right = (across.at(end) for end in _ends(tradeoff, point))
        bottom, top = upwards.at(point.gain.low), upwards.at(point.gain.high)
        yield (
            f'<g class="point" role="img"><title>{escape(_told(tradeoff, place, point))}</title>'
            f'<path class="cross {look}" d="M{left:g} {y:g}H{right:g}M{x:g} {bottom:g}V{top:g}"/>'
            f"{_mark(tradeoff, point, x, y, look)}{text(x, y + 4.5, label)}</g>"
        )


def _look(tradeoff: Tradeoff, point: Point) -> str:
    """Green is kept for what is shown: a target that is met because the attack failed is grey."""
    if not tradeoff.meets(point):
        return "leaks"
    return "doubt" if point.in_doubt else "met"


def _mark(tradeoff: Tradeoff, point: Point, x: float, y: float, look: str) -> str:
    """A disc where the target is met and a square where not, for who cannot tell the colours."""
    if tradeoff.meets(point):
        return f'<circle class="{look}" cx="{x:g}" cy="{y:g}" r="{RADIUS}"/>'
    return f'<rect class="{look}" x="{x - RADIUS:g}" y="{y - RADIUS:g}" width="{2 * RADIUS}" height="{2 * RADIUS}"/>'


def _legend(tradeoff: Tradeoff) -> list[str]:
    percent = " %" if tradeoff.points[0].leak.unit == "fraction" else ""
    limit = f"{number(tradeoff.max_leak, tradeoff.points[0].leak.unit)}{percent}"
    rows = [_told(tradeoff, place, point) for place, point in enumerate(tradeoff.points, start=1)]
    shapes = f"Round: the interval of the gain ends at {limit} (dashed) or below; square and red: it does not."
    return [*rows, f"{shapes} Green: no doubt is known; grey: more may leak."]


def _told(tradeoff: Tradeoff, place: int, point: Point) -> str:
    """A setting in words."""
    proven = "" if not point.guarantees else f", {epsilon_text(point)} over the run"
    utility = f"{tradeoff.utility} {utility_text(point.utility[tradeoff.utility])}"
    return f"{place}  {point.defense}: gain {gain_text(point)}, {point.verdict}, {utility}{proven}"


def _ends(tradeoff: Tradeoff, point: Point) -> tuple[float, float]:
    found = point.utility[tradeoff.utility]
    return found.low, found.high
