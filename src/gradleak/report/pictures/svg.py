"""What our pictures share: SVG for light and dark pages, with words for who cannot see it.

A grid of boxes is coloured by how much leaks, from pale (little) to dark red (much); a leak map and
attacks × defenses are two. A terminal uses the same colours.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

TICKS = 5  # about so many an axis
LINE = 18  # pixels from one line of text to the next
GAP = 2  # pixels between boxes
BASELINE = 21  # pixels from the top of a box to the foot of its number

# At 0, ¼, ½, ¾ and 1.
STOPS = ((255, 247, 214), (254, 204, 122), (247, 138, 78), (214, 61, 47), (128, 12, 38))
# The darkest and the lightest: one of them always has a contrast of 4.5 or more.
DARK, LIGHT = "#000000", "#ffffff"
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 12px; fill: #59636e; } .title { font-size: 16px; font-weight: 600; }
.page { fill: #ffffff; } .absent { fill: none; stroke: #8c959f; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9198a1; } .page { fill: #0d1117; }
}
"""


def draw_picture(
    title: str,
    sentences: Sequence[str],
    width: int,
    height: int,
    parts: Iterable[str],
    style: str = "",
) -> str:
    """Puts the parts below a title; a screen reader reads the sentences out."""
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" '
                'role="group" aria-labelledby="title description">'
            ),
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(" ".join(sentences))}</desc>',
            f"<style>{STYLE}{style}</style>",
            f'<rect class="page" width="{width}" height="{height}"/>',
            draw_text(16, 26, title, style="title", anchor="start"),
            *parts,
            "</svg>\n",
        ]
    )


def draw_text(x: float, y: float, words: str, *, anchor: str = "middle", style: str = "") -> str:
    """Writes words at a place."""
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def draw_small_print(lines: Sequence[str], top: int) -> list[str]:
    """Writes lines in small letters, one below the other."""
    return [
        draw_text(16, top + LINE * place, line, style="small", anchor="start")
        for place, line in enumerate(lines)
    ]


def wrap_sentence(sentence: str, width: int) -> list[str]:
    """Breaks a sentence into lines of seven pixels a letter: SVG breaks none itself."""
    return textwrap.wrap(sentence, max(40, (width - 32) // 7))


def embed(drawn: str, name: str) -> str:
    """Makes a picture fit for a page: its ids and its style no longer reach the rest of it."""
    for own in ("title", "description", "scale"):
        drawn = drawn.replace(f'id="{own}"', f'id="{name}-{own}"')
        drawn = drawn.replace(f"url(#{own})", f"url(#{name}-{own})")
    drawn = drawn.replace(
        'aria-labelledby="title description"', f'aria-labelledby="{name}-title {name}-description"'
    )
    drawn = drawn.replace("<style>", f"<style>#{name} {{", 1).replace("</style>", "}</style>", 1)
    return drawn.replace('<svg xmlns="http://www.w3.org/2000/svg" ', f'<svg id="{name}" ', 1)


class Axis:
    """Places values along so many pixels, from one whole number of steps to another."""

    def __init__(self, values: list[float], start: int, pixels: int) -> None:
        least, most = min(values), max(values)
        most = most if most > least else least + 1.0
        span = most - least
        rough: float = 10.0 ** math.floor(math.log10(span / TICKS))
        steps = (rough, 2 * rough, 5 * rough, 10 * rough)
        self.step: float = next(step for step in steps if span / step <= TICKS + 1)
        # An end that lies on a step but for rounding begins no further one
        self.low = math.floor(least / self.step + 1e-9) * self.step
        self.high = math.ceil(most / self.step - 1e-9) * self.step
        self.start, self.pixels = start, pixels

    def at(self, value: float) -> float:
        """Returns the pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * self.pixels

    def ticks(self) -> list[float]:
        """Returns the values that are written beside the axis."""
        count = round((self.high - self.low) / self.step)
        return [self.low + place * self.step for place in range(count + 1)]


@dataclass(frozen=True)
class HeatBox:
    """One box of a grid: the number in it, how much leaks, and the box in words."""

    shown: str  # nothing is written where it is empty
    leak: float | None  # 0 nothing, 1 everything; none draws an empty frame
    words: str


@dataclass(frozen=True)
class HeatGrid:
    """Where the boxes of a heat map stand, in pixels."""

    left: int
    top: int
    width: int  # from one column to the next
    height: int  # from one row to the next

    def middle(self, column: int) -> float:
        """Returns the middle of a column."""
        return self.left + column * self.width + (self.width - GAP) / 2

    def baseline(self, row: int) -> int:
        """Returns the line on which the number of a box in that row stands."""
        return self.top + row * self.height + BASELINE

    def draw_box(self, row: int, column: int, box: HeatBox, lower: int = 0) -> str:
        """Draws a box, a few pixels lower where asked."""
        x, y = self.left + column * self.width, self.top + row * self.height + lower
        look, colour = 'class="absent"', ""
        if box.leak is not None:
            look = f'fill="{mix_paper(box.leak)}"'
            colour = f' style="fill:{choose_ink(box.leak)}"'
        place = f'x="{self.middle(column):g}" y="{self.baseline(row) + lower:g}"'
        number = f'<text {place} text-anchor="middle"{colour}>{escape(box.shown)}</text>'
        return (
            f'<g role="img"><title>{escape(box.words)}</title><rect x="{x}" y="{y}" '
            f'width="{self.width - GAP}" height="{self.height - GAP}" rx="3" {look}/>'
            f"{number if box.shown else ''}</g>"
        )


def mix_paper(leak: float) -> str:
    """Returns the colour of a leak between 0 and 1, as #rrggbb."""
    place = min(max(leak, 0.0), 1.0) * (len(STOPS) - 1)
    first = min(int(place), len(STOPS) - 2)
    ends = zip(STOPS[first], STOPS[first + 1], strict=True)
    mixed = (round(low + (high - low) * (place - first)) for low, high in ends)
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def choose_ink(leak: float) -> str:
    """Returns black or white, whichever stands out from the paper."""
    return max((DARK, LIGHT), key=lambda ink: measure_contrast(mix_paper(leak), ink))


def measure_contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of two colours, 1 to 21 (relative luminance as in WCAG 2)."""
    darker, lighter = sorted((_measure_luminance(one), _measure_luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _measure_luminance(colour: str) -> float:
    channels = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
