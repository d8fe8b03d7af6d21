"""A search over time, as a small picture: the median of the batches, and between which values they all lie."""

import math
from collections.abc import Sequence
from html import escape

from gradleak.report.page.section import TracePoint

LEFT, TOP, WIDTH, HEIGHT = 56, 14, 300, 150
DECADES = 100  # a range this wide is drawn on a logarithmic scale


def svg(points: Sequence[TracePoint], title: str, *, percent: bool = False) -> str:
    """Steps across; a fraction is drawn from 0 to 100 %."""
    low, high = (0.0, 1.0) if percent else (min(point.low for point in points), max(point.high for point in points))
    logarithmic = not percent and low > 0 and high / low >= DECADES
    scale = math.log10 if logarithmic else float
    bottom, top = scale(low), scale(high)
    last = max(point.step for point in points) or 1

    def across(step: int) -> float:
        return LEFT + WIDTH * step / last

    def upwards(value: float) -> float:
        height = (scale(value) - bottom) / (top - bottom) if top > bottom else 0.5
        return TOP + HEIGHT * (1 - height)

    band = [f"{across(point.step):.1f},{upwards(point.high):.1f}" for point in points]
    band += [f"{across(point.step):.1f},{upwards(point.low):.1f}" for point in reversed(points)]
    line = " ".join(f"{across(point.step):.1f},{upwards(point.median):.1f}" for point in points)
    ends = [(high, TOP), (low, TOP + HEIGHT)]
    note = ", logarithmic" if logarithmic else ""
    return "".join(
        [
            f'<svg class="chart" viewBox="0 0 380 208" width="380" height="208" role="img" aria-label="{escape(title)}">',
            f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>',
            f'<polygon class="band" points="{" ".join(band)}"/><polyline class="line" points="{line}"/>',
            *(
                f'<text class="small" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{_tick(value, percent)}</text>'
                for value, y in ends
            ),
            f'<text class="small" x="{LEFT}" y="{TOP + HEIGHT + 18}">step 0</text>',
            f'<text class="small" x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 18}" text-anchor="end">step {last}</text>',
            f'<text class="small" x="{LEFT}" y="{TOP + HEIGHT + 36}">{escape(title)}{note}</text></svg>',
        ]
    )


def _tick(value: float, percent: bool) -> str:
    return f"{100 * value:.0f} %" if percent else f"{value:.2g}"
