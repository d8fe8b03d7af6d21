"""A trade-off of leak against utility: what it holds, the setting it recommends, and its picture.

In the picture utility grows to the right and leak upwards, so that good is low and right; each
setting is a cross of two intervals.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from gradleak.records.flags import few_examples
from gradleak.records.judgement import LEAKS, NOT_JUDGED, Judgement
from gradleak.records.schema import GuaranteeRecord, Score
from gradleak.records.statistics import Interval
from gradleak.report.numbers import write_difference, write_number
from gradleak.report.pictures.svg import (
    LINE,
    Axis,
    draw_picture,
    draw_small_print,
    draw_text,
    wrap_sentence,
)
from gradleak.report.verdict import is_finite, write_epsilon, write_epsilons

NONE = "–"
WHY = {"search_failed": "the search failed there", "not_adaptive": "no attack was adapted to it"}
UNDEFENDED = "none"  # the setting without a defense
LEFT, TOP, WIDTH, HEIGHT = 84, 56, 560, 360  # pixels: the frame
PAGE = LEFT + WIDTH + 28
RADIUS = 10
STYLE = """
.frame { fill: none; stroke: #8c959f; } .grid { stroke: #8c959f; stroke-opacity: 0.25; }
.met { fill: #1a7f37; stroke: #1a7f37; } .leaks { fill: #b3261e; stroke: #b3261e; }
.doubt { fill: #6e7781; stroke: #6e7781; } .point text { fill: #ffffff; stroke: none; }
.cross { fill: none; stroke-width: 1.5; stroke-opacity: 0.7; }
.limit { stroke: #1a7f37; stroke-dasharray: 6 4; }
.allowed { fill: #1a7f37; fill-opacity: 0.08; }
@media (prefers-color-scheme: dark) {
  .met { stroke: #3fb950; } .leaks { stroke: #ff7b72; } .limit { stroke: #3fb950; }
}
"""


@dataclass(frozen=True)
class Point:
    """One setting: what leaked under it, and what training under it gave."""

    defense: str
    leak: Score  # the worst case over attacks, blind beside it
    # Of the worst case over blind, paired by example; more leaks more, whatever the metric.
    gain: Interval
    utility: dict[str, Interval]  # mcc, f1, accuracy
    guarantees: tuple[GuaranteeRecord, ...]  # of the whole training run
    one_draw: bool
    audit: str  # id of its record
    training: str  # id of its training
    judgement: Judgement | None = (
        None  # of its audit; none in a result of before there were any, whose record is not at hand
    )

    @property
    def verdict(self) -> str:
        return NOT_JUDGED if self.judgement is None else self.judgement.verdict

    @property
    def in_doubt(self) -> bool:
        """Whether the attacks rather than the defense may be why no more leaked."""
        return self.judgement is None or self.judgement.may_be_more

    @property
    def why_in_doubt(self) -> str:
        if self.judgement is None:
            return "its audit is not at hand"
        return WHY.get(
            self.judgement.doubts[0], f"{self.judgement.doubts[0]} stands against its audit"
        )


@dataclass(frozen=True)
class Missing:
    """A setting without an audit or without a training."""

    defense: str
    reason: str


@dataclass(frozen=True)
class Tradeoff:
    """A whole trade-off, as tradeoff.json keeps it."""

    created: str
    target: str
    data: str
    attacks: tuple[str, ...]
    metric: str
    utility: str
    max_leak: float
    batches: int
    batch_size: int
    draws: int
    knows: tuple[str, ...]
    train_data: str
    eval_data: str
    training_examples: int
    test_examples: int
    training: dict[str, float]  # epochs, batch_size, learning_rate, seed
    points: tuple[Point, ...]
    missing: tuple[Missing, ...] = ()

    def meets(self, point: Point) -> bool:
        """Whether the upper end of the gain's interval lies within the target."""
        return point.gain.high <= self.max_leak

    @property
    def weakest(self) -> Point | None:
        """The setting with the best utility of those that meet the target; the first of equals."""
        fit = [point for point in self.points if self.meets(point)]
        return max(fit, key=lambda point: point.utility[self.utility].mean, default=None)


def describe_setup(tradeoff: Tradeoff) -> list[str]:
    """Describes all that was held fixed: of the audits, then of the trainings."""
    told = ", ".join(tradeoff.knows) or "nothing"
    schedule = tradeoff.training
    draws = f", {tradeoff.draws} draws each" if tradeoff.draws > 1 else ""
    return [
        (
            f"Leak: target {tradeoff.target} · data {tradeoff.data} · {tradeoff.batches} client "
            f"batches of {tradeoff.batch_size}"
            f"{draws} · worst case over {', '.join(tradeoff.attacks)} · told {told}"
        ),
        (
            f"Utility: trained on {tradeoff.training_examples} examples of {tradeoff.train_data} in"
            f" steps of {schedule['batch_size']:g}, learning rate {schedule['learning_rate']:g},"
            f" epochs: {schedule['epochs']:g}, each step's gradient defended; tested on"
            f" {tradeoff.test_examples} ({tradeoff.eval_data}) · seed {schedule['seed']:g}"
        ),
    ]


def write_point_gain(point: Point) -> str:
    """Writes `+45.2 [30.1, 60.3]`, with a question mark where that is in doubt."""
    return write_difference(point.gain, point.leak.unit) + ("?" if point.in_doubt else "")


def write_utility(found: Interval) -> str:
    """Writes `0.59 [0.41, 0.75]`."""
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"


def write_point_epsilon(point: Point) -> str:
    """Writes `ε 12.3 (PRV)`, by the first accountant that gives one, or `ε not known`.

    All accountants are in tradeoff.json.
    """
    if not point.guarantees:
        return NONE
    found = next((one for one in point.guarantees if is_finite(one.epsilon)), point.guarantees[0])
    said, why, _ = write_epsilon(found.epsilon, found.epsilon_in_words).partition(":")
    return f"ε {said}" if why else f"ε {said} ({found.accountant})"


def conclude(tradeoff: Tradeoff) -> Iterator[str]:
    """Says which setting to take, how sure that is, and what the intervals are over."""
    yield _recommend(tradeoff)
    yield from _name_doubts(tradeoff)
    few = few_examples(tradeoff.batches * tradeoff.batch_size)
    if few is not None:
        yield few.detail
    if any(point.one_draw for point in tradeoff.points):
        yield (
            "Randomised defenses were attacked on one draw of each update: raise --draws to "
            "see how far it matters."
        )
    yield (
        "95 % intervals: gain over client batches, paired with blind; utility over the "
        f"{tradeoff.test_examples} test examples "
        "of one training (mcc and f1 bootstrapped, accuracy exact): another seed may move it."
    )
    yield from _name_unbounded(tradeoff)
    for one in tradeoff.missing:
        yield f"{NONE} {one.defense}: {one.reason}"


def _name_unbounded(tradeoff: Tradeoff) -> Iterator[str]:
    """Says why a setting that is meant to be differentially private has no ε."""
    for point in tradeoff.points:
        if point.guarantees and not any(is_finite(one.epsilon) for one in point.guarantees):
            said = ", ".join(write_epsilons(point.guarantees))
            yield f"Over the whole run, {point.defense}: {said}."


def _recommend(tradeoff: Tradeoff) -> str:
    limit = write_number(tradeoff.max_leak, tradeoff.points[0].leak.unit)
    target = f"a gain over blind ({tradeoff.metric}) whose interval ends at {limit} or below"
    chosen = tradeoff.weakest
    if chosen is None:
        nearest = min(tradeoff.points, key=lambda point: point.gain.high)
        more = (
            "; its mean lies below, so that more examples (--limit) may show it"
            if nearest.gain.mean <= tradeoff.max_leak
            else ""
        )
        near = f"{_name_setting(nearest)}, gain {write_point_gain(nearest)}{more}"
        return f"None of these settings meets the target, {target}. The nearest setting: {near}."
    found = (
        f"{_name_setting(chosen)}, gain {write_point_gain(chosen)}, "
        f"{_describe_cost(tradeoff, chosen)}"
    )
    leaks = (
        " It leaks all the same: more than a blind guess, within the target."
        if chosen.verdict == LEAKS
        else ""
    )
    return f"Weakest setting that meets the target, {target}: {found}.{leaks}"


def _describe_cost(tradeoff: Tradeoff, chosen: Point) -> str:
    """Describes the utility of a setting beside that of no defense, or else of the best.

    It says too whether anything was learnt at all.
    """
    found = chosen.utility[tradeoff.utility]
    best = max(tradeoff.points, key=lambda point: point.utility[tradeoff.utility].mean)
    beside = next((point for point in tradeoff.points if point.defense == UNDEFENDED), best)
    against = (
        ""
        if beside is chosen
        else f" ({_name_setting(beside)}: {write_utility(beside.utility[tradeoff.utility])})"
    )
    unlearnt = (
        ", which may be no better than chance"
        if tradeoff.utility == "mcc" and found.low <= 0
        else ""
    )
    return f"{tradeoff.utility} {write_utility(found)}{against}{unlearnt}"


def _name_setting(point: Point) -> str:
    return "no defense" if point.defense == UNDEFENDED else point.defense


def _name_doubts(tradeoff: Tradeoff) -> Iterator[str]:
    chosen = tradeoff.weakest
    if chosen is not None and chosen.in_doubt:
        sure = [point for point in tradeoff.points if tradeoff.meets(point) and not point.in_doubt]
        best = max(sure, key=lambda point: point.utility[tradeoff.utility].mean, default=None)
        instead = "No setting meets the target without this doubt."
        if best is not None:
            instead = f"The weakest without this doubt is {_name_setting(best)}."
        yield (
            f"But {chosen.why_in_doubt}: more may leak. {instead} Try a stronger --attack, "
            "such as portfolio."
        )
    elif chosen is not None:
        yield "That bounds these attacks on these examples, not what a stronger one could do."
    if any(point.in_doubt for point in tradeoff.points):
        yield (
            "? may be more: the search failed, no attack was adapted to the defense, or else; "
            "its record says what."
        )


def draw_tradeoff(tradeoff: Tradeoff, *, alone: bool = True) -> str:
    """Draws the trade-off.

    Where it does not stand alone, what may be concluded stands beside it, not in it.
    """
    title = f"Trade-off: what leaks ({tradeoff.metric} above blind) against {tradeoff.utility}"
    gains = [end for point in tradeoff.points for end in (point.gain.low, point.gain.high)]
    utilities = [end for point in tradeoff.points for end in _find_utility_ends(tradeoff, point)]
    across = Axis([0.0, *utilities], LEFT, WIDTH)
    upwards = Axis([0.0, tradeoff.max_leak, *gains], TOP + HEIGHT, -HEIGHT)
    sentences = [*conclude(tradeoff), *describe_setup(tradeoff)]
    written = [*_list_settings(tradeoff), *(sentences if alone else describe_setup(tradeoff))]
    lines = [line for sentence in written for line in wrap_sentence(sentence, PAGE)]
    below = TOP + HEIGHT + 72
    parts = [
        *_draw_limit(tradeoff, upwards),
        *_draw_axes(tradeoff, across, upwards),
        *_draw_points(tradeoff, across, upwards),
        *draw_small_print(lines, below),
    ]
    return draw_picture(
        title,
        [*_list_settings(tradeoff), *sentences],
        PAGE,
        below + LINE * len(lines),
        parts,
        STYLE,
    )


def _draw_limit(tradeoff: Tradeoff, upwards: Axis) -> Iterator[str]:
    """Draws what the target allows, shaded."""
    y = upwards.at(tradeoff.max_leak)
    height = TOP + HEIGHT - y
    yield f'<rect class="allowed" x="{LEFT}" y="{y:g}" width="{WIDTH}" height="{height:g}"/>'
    yield f'<line class="limit" x1="{LEFT}" y1="{y:g}" x2="{LEFT + WIDTH}" y2="{y:g}"/>'


def _draw_axes(tradeoff: Tradeoff, across: Axis, upwards: Axis) -> Iterator[str]:
    unit = tradeoff.points[0].leak.unit
    yield f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>'
    for value in across.ticks():
        x = across.at(value)
        yield f'<line class="grid" x1="{x:g}" y1="{TOP}" x2="{x:g}" y2="{TOP + HEIGHT}"/>'
        yield draw_text(x, TOP + HEIGHT + 18, f"{round(value, 6):g}", style="small")
    for value in upwards.ticks():
        y = upwards.at(value)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:g}" x2="{LEFT + WIDTH}" y2="{y:g}"/>'
        yield draw_text(
            LEFT - 8,
            y + 4,
            f"{round(100 * value, 6):g} %" if unit == "fraction" else f"{value:g}",
            anchor="end",
            style="small",
        )
    yield draw_text(
        LEFT + WIDTH / 2, TOP + HEIGHT + 42, f"{tradeoff.utility} after training (more is better)"
    )
    yield draw_text(
        16, TOP - 10, f"gain over blind, {tradeoff.metric} (less is better)", anchor="start"
    )


def _draw_points(tradeoff: Tradeoff, across: Axis, upwards: Axis) -> Iterator[str]:
    for place, point in enumerate(tradeoff.points, start=1):
        label = f"{place}?" if point.in_doubt else str(place)
        look = _choose_look(tradeoff, point)
        x, y = across.at(point.utility[tradeoff.utility].mean), upwards.at(point.gain.mean)
        left, right = (across.at(end) for end in _find_utility_ends(tradeoff, point))
        bottom, top = upwards.at(point.gain.low), upwards.at(point.gain.high)
        yield (
            '<g class="point" role="img">'
            f"<title>{escape(_describe_point(tradeoff, place, point))}</title>"
            f'<path class="cross {look}" d="M{left:g} {y:g}H{right:g}M{x:g} {bottom:g}V{top:g}"/>'
            f"{_draw_mark(tradeoff, point, x, y, look)}{draw_text(x, y + 4.5, label)}</g>"
        )


def _choose_look(tradeoff: Tradeoff, point: Point) -> str:
    """Chooses the colour; green is for what is shown, grey for a target met by a failed attack."""
    if not tradeoff.meets(point):
        return "leaks"
    return "doubt" if point.in_doubt else "met"


def _draw_mark(tradeoff: Tradeoff, point: Point, x: float, y: float, look: str) -> str:
    """Draws a disc where the target is met, else a square, for who cannot tell the colours."""
    if tradeoff.meets(point):
        return f'<circle class="{look}" cx="{x:g}" cy="{y:g}" r="{RADIUS}"/>'
    size = f'width="{2 * RADIUS}" height="{2 * RADIUS}"'
    return f'<rect class="{look}" x="{x - RADIUS:g}" y="{y - RADIUS:g}" {size}/>'


def _list_settings(tradeoff: Tradeoff) -> list[str]:
    percent = " %" if tradeoff.points[0].leak.unit == "fraction" else ""
    limit = f"{write_number(tradeoff.max_leak, tradeoff.points[0].leak.unit)}{percent}"
    rows = [
        _describe_point(tradeoff, place, point)
        for place, point in enumerate(tradeoff.points, start=1)
    ]
    shapes = (
        f"Round: the interval of the gain ends at {limit} (dashed) or below; square and "
        "red: it does not."
    )
    return [*rows, f"{shapes} Green: no doubt is known; grey: more may leak."]


def _describe_point(tradeoff: Tradeoff, place: int, point: Point) -> str:
    """Describes a setting in words."""
    proven = "" if not point.guarantees else f", {write_point_epsilon(point)} over the run"
    utility = f"{tradeoff.utility} {write_utility(point.utility[tradeoff.utility])}"
    return (
        f"{place}  {point.defense}: gain {write_point_gain(point)}, {point.verdict}, "
        f"{utility}{proven}"
    )


def _find_utility_ends(tradeoff: Tradeoff, point: Point) -> tuple[float, float]:
    found = point.utility[tradeoff.utility]
    return found.low, found.high
