"""What our pictures share: SVG for light and dark pages, with words for who cannot see it."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

TICKS = 5  # about so many an axis
LINE = 18  # pixels from one line of text to the next
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
        values = values if max(values) > min(values) else [*values, values[0] + 1.0]
        span = max(values) - min(values)
        rough: float = 10.0 ** math.floor(math.log10(span / TICKS))
        steps = (rough, 2 * rough, 5 * rough, 10 * rough)
        self.step: float = next(step for step in steps if span / step <= TICKS + 1)
        self.low = math.floor(min(values) / self.step + 1e-9) * self.step
        self.high = math.ceil(max(values) / self.step - 1e-9) * self.step
        self.start, self.pixels = start, pixels

    def at(self, value: float) -> float:
        """Returns the pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * self.pixels

    def ticks(self) -> list[float]:
        """Returns the values that are written beside the axis."""
        count = round((self.high - self.low) / self.step)
        return [self.low + place * self.step for place in range(count + 1)]
