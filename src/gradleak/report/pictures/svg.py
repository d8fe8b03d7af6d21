"""What our pictures share: one SVG that needs nothing else, for light and dark pages, with words for those who cannot see it."""

import textwrap
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

LINE = 18  # pixels from one line of text to the next
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 12px; fill: #59636e; } .title { font-size: 16px; font-weight: 600; }
.page { fill: #ffffff; } .absent { fill: none; stroke: #8c959f; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9198a1; } .page { fill: #0d1117; }
}
"""


def picture(title: str, sentences: Sequence[str], width: int, height: int, parts: Iterable[str], style: str = "") -> str:
    """The parts on a page with its title; the sentences are read out by a screen reader."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="group" aria-labelledby="title description">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(" ".join(sentences))}</desc>',
            f"<style>{STYLE}{style}</style>",
            f'<rect class="page" width="{width}" height="{height}"/>',
            text(16, 26, title, style="title", anchor="start"),
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, *, anchor: str = "middle", style: str = "") -> str:
    """Words at a place."""
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def small_lines(lines: Sequence[str], top: int) -> list[str]:
    """Small print, one line below the other."""
    return [text(16, top + LINE * place, line, style="small", anchor="start") for place, line in enumerate(lines)]


def wrapped(sentence: str, width: int) -> list[str]:
    """Lines that fit the width, at seven pixels a letter: SVG breaks none itself."""
    return textwrap.wrap(sentence, max(40, (width - 32) // 7))


def inline(drawn: str, name: str) -> str:
    """A picture for the inside of a page: its ids and its style are its own, and do not reach the rest."""
    for own in ("title", "description", "scale"):
        drawn = drawn.replace(f'id="{own}"', f'id="{name}-{own}"').replace(f"url(#{own})", f"url(#{name}-{own})")
    drawn = drawn.replace('aria-labelledby="title description"', f'aria-labelledby="{name}-title {name}-description"')
    drawn = drawn.replace("<style>", f"<style>#{name} {{", 1).replace("</style>", "}</style>", 1)
    return drawn.replace('<svg xmlns="http://www.w3.org/2000/svg" ', f'<svg id="{name}" ', 1)
