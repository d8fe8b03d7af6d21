"""Curves as a picture, with an interval at every point; places stand at even distances."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from gradleak.report.pictures.svg import (
    LINE,
    Axis,
    draw_picture,
    draw_small_print,
    draw_text,
    wrap_sentence,
)

LEFT, TOP, WIDTH, HEIGHT = 84, 56, 560, 340  # pixels: the frame
PAGE = LEFT + WIDTH + 28
COLOURS = ("#0969da", "#b3261e", "#1a7f37", "#8250df", "#9a6700")
DASHES = ("none", "8 4", "2 4", "8 4 2 4", "12 3")  # for who cannot tell the colours
STYLE = """
.frame { fill: none; stroke: #8c959f; } .grid { stroke: #8c959f; stroke-opacity: 0.25; }
"""


@dataclass(frozen=True)
class CurvePoint:
    """A value with its interval at one place."""

    place: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """Values of one setting at all places, in one order."""

    name: str
    points: tuple[CurvePoint, ...]


def draw_curves(
    title: str, across: str, upwards: str, curves: Sequence[Curve], notes: Sequence[str] = ()
) -> str:
    """Draws the curves; `across` and `upwards` name the axes."""
    places = [point.place for point in curves[0].points]
    axis = Axis(
        [
            0.0,
            *(end for curve in curves for point in curve.points for end in (point.low, point.high)),
        ],
        TOP + HEIGHT,
        -HEIGHT,
    )
    told = [
        f"{curve.name}: "
        + ", ".join(f"{point.place} {point.value:.4g}" for point in curve.points)
        + "."
        for curve in curves
    ]
    below = TOP + HEIGHT + 64
    lines = [line for sentence in notes for line in wrap_sentence(sentence, PAGE)]
    parts = [
        *_draw_frame(places, axis, across, upwards),
        *(part for number, curve in enumerate(curves) for part in _draw_curve(number, curve, axis)),
        *(
            part
            for number, curve in enumerate(curves)
            for part in _draw_legend(number, curve, below)
        ),
        *draw_small_print(lines, below + LINE * len(curves)),
    ]
    return draw_picture(
        title, [*told, *notes], PAGE, below + LINE * (len(curves) + len(lines)), parts, STYLE
    )


def _place_across(place: int, places: int) -> float:
    return LEFT + WIDTH * (place + 0.5) / places


def _draw_frame(places: Sequence[str], axis: Axis, across: str, upwards: str) -> Iterator[str]:
    yield f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>'
    for number, place in enumerate(places):
        yield draw_text(_place_across(number, len(places)), TOP + HEIGHT + 18, place, style="small")
    for value in axis.ticks():
        y = axis.at(value)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:g}" x2="{LEFT + WIDTH}" y2="{y:g}"/>'
        yield draw_text(LEFT - 8, y + 4, f"{round(value, 6):g}", anchor="end", style="small")
    yield draw_text(LEFT + WIDTH / 2, TOP + HEIGHT + 42, across)
    yield draw_text(16, TOP - 10, upwards, anchor="start")


def _draw_curve(number: int, curve: Curve, axis: Axis) -> Iterator[str]:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    spots = [
        (_place_across(place, len(curve.points)), axis.at(point.value), point)
        for place, point in enumerate(curve.points)
    ]
    path = " ".join(f"{x:g},{y:g}" for x, y, _ in spots)
    yield (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
        f'stroke-dasharray="{dash}"/>'
    )
    for x, y, point in spots:
        words = (
            f"{curve.name}, {point.place}: {point.value:.4g} ({point.low:.4g} to {point.high:.4g})"
        )
        yield (
            f'<g role="img"><title>{escape(words)}</title>'
            f'<path stroke="{colour}" d="M{x:g} {axis.at(point.low):g}'
            f'V{axis.at(point.high):g}"/><circle cx="{x:g}" cy="{y:g}" r="4" fill="{colour}"/></g>'
        )


def _draw_legend(number: int, curve: Curve, top: int) -> Iterator[str]:
    y, colour, dash = (
        top + LINE * number,
        COLOURS[number % len(COLOURS)],
        DASHES[number % len(DASHES)],
    )
    yield (
        f'<line x1="16" y1="{y - 4}" x2="52" y2="{y - 4}" stroke="{colour}" stroke-width="2" '
        f'stroke-dasharray="{dash}"/>'
    )
    yield draw_text(60, y, curve.name, anchor="start", style="small")
