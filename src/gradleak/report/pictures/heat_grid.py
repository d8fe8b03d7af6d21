"""A grid of boxes coloured by how much leaks, as SVG; a leak map and attacks × defenses are two.

The colours go from pale (little) to dark red (much). A terminal uses the same ones.
"""

from dataclasses import dataclass
from xml.sax.saxutils import escape

GAP = 2  # pixels between boxes
BASELINE = 21  # pixels from the top of a box to the foot of its number

# At 0, ¼, ½, ¾ and 1.
STOPS = ((255, 247, 214), (254, 204, 122), (247, 138, 78), (214, 61, 47), (128, 12, 38))
# The darkest and the lightest: one of them always has a contrast of 4.5 or more.
DARK, LIGHT = "#000000", "#ffffff"


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
        size = f'width="{self.width - GAP}" height="{self.height - GAP}" rx="3"'
        look, colour = 'class="absent"', ""
        if box.leak is not None:
            look = f'fill="{mix_paper(box.leak)}"'
            colour = f' style="fill:{choose_ink(box.leak)}"'
        place = f'x="{self.middle(column):g}" y="{self.baseline(row) + lower:g}"'
        number = f'<text {place} text-anchor="middle"{colour}>{escape(box.shown)}</text>'
        return (
            f'<g role="img"><title>{escape(box.words)}</title>'
            f'<rect x="{x}" y="{y}" {size} {look}/>{number if box.shown else ""}</g>'
        )


def mix_paper(leak: float) -> str:
    """Returns the colour of a leak between 0 and 1, as #rrggbb."""
    place = min(max(leak, 0.0), 1.0) * (len(STOPS) - 1)
    first = min(int(place), len(STOPS) - 2)
    ends = zip(STOPS[first], STOPS[first + 1], strict=True)
    mixed = [round(low + (high - low) * (place - first)) for low, high in ends]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def choose_ink(leak: float) -> str:
    """Returns black or white, whichever stands out from the paper."""
    return (
        DARK
        if measure_contrast(mix_paper(leak), DARK) >= measure_contrast(mix_paper(leak), LIGHT)
        else LIGHT
    )


def measure_contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of two colours, 1 to 21 (relative luminance as in WCAG 2)."""
    darker, lighter = sorted((_measure_luminance(one), _measure_luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _measure_luminance(colour: str) -> float:
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
