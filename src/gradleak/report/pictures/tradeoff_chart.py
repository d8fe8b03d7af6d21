"""A trade-off of leak against utility: what it holds, the setting it recommends, and its picture.

In the picture utility grows to the right and leak upwards, so that good is low and right; each
setting is a cross of two intervals.
"""

from collections.abc import Iterable, Iterator
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
SIDES = f'width="{2 * RADIUS}" height="{2 * RADIUS}"'
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
        return self.choose_best(filter(self.meets, self.points))

    def choose_best(self, points: Iterable[Point]) -> Point | None:
        """Returns the point with the best utility; the first of equals."""
        return max(points, key=lambda point: point.utility[self.utility].mean, default=None)


def describe_setup(tradeoff: Tradeoff) -> list[str]:
    """Describes all that was held fixed: of the audits, then of the trainings."""
    schedule = tradeoff.training
    draws = f", {tradeoff.draws} draws each" if tradeoff.draws > 1 else ""
    return [
        (
            f"Leak: target {tradeoff.target} · data {tradeoff.data} · {tradeoff.batches} client "
            f"batches of {tradeoff.batch_size}{draws} · worst case over "
            f"{', '.join(tradeoff.attacks)} · told {', '.join(tradeoff.knows) or 'nothing'}"
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
    yield from _recommend(tradeoff)
    if few := few_examples(tradeoff.batches * tradeoff.batch_size):
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
    for point in tradeoff.points:
        # Meant to be differentially private, and without an ε
        if point.guarantees and not any(is_finite(one.epsilon) for one in point.guarantees):
            said = ", ".join(write_epsilons(point.guarantees))
            yield f"Over the whole run, {point.defense}: {said}."
    yield from (f"{NONE} {one.defense}: {one.reason}" for one in tradeoff.missing)


def _recommend(tradeoff: Tradeoff) -> Iterator[str]:
    """Names the setting to take, and what stands against taking it."""
    limit = write_number(tradeoff.max_leak, tradeoff.points[0].leak.unit)
    target = f"a gain over blind ({tradeoff.metric}) whose interval ends at {limit} or below"
    chosen = tradeoff.weakest
    if chosen is None:
        nearest = min(tradeoff.points, key=lambda point: point.gain.high)
        more = "; its mean lies below, so that more examples (--limit) may show it"
        yield (
            f"None of these settings meets the target, {target}. The nearest setting: "
            f"{_name_setting(nearest)}, gain {write_point_gain(nearest)}"
            f"{more if nearest.gain.mean <= tradeoff.max_leak else ''}."
        )
    else:
        leaks = " It leaks all the same: more than a blind guess, within the target."
        yield (
            f"Weakest setting that meets the target, {target}: {_name_setting(chosen)}, gain "
            f"{write_point_gain(chosen)}, {_describe_cost(tradeoff, chosen)}."
            f"{leaks if chosen.verdict == LEAKS else ''}"
        )
        yield _doubt(tradeoff, chosen)
    if any(point.in_doubt for point in tradeoff.points):
        yield (
            "? may be more: the search failed, no attack was adapted to the defense, or else; "
            "its record says what."
        )


def _describe_cost(tradeoff: Tradeoff, chosen: Point) -> str:
    """Describes the utility of a setting beside that of no defense, or else of the best.

    It says too whether anything was learnt at all.
    """
    found = chosen.utility[tradeoff.utility]
    undefended = [point for point in tradeoff.points if point.defense == UNDEFENDED]
    beside = tradeoff.choose_best(undefended[:1] or tradeoff.points)
    said = f"{tradeoff.utility} {write_utility(found)}"
    if beside is not None and beside is not chosen:
        said += f" ({_name_setting(beside)}: {write_utility(beside.utility[tradeoff.utility])})"
    if tradeoff.utility == "mcc" and found.low <= 0:
        said += ", which may be no better than chance"
    return said


def _name_setting(point: Point) -> str:
    return "no defense" if point.defense == UNDEFENDED else point.defense


def _doubt(tradeoff: Tradeoff, chosen: Point) -> str:
    if not chosen.in_doubt:
        return "That bounds these attacks on these examples, not what a stronger one could do."
    sure = (point for point in tradeoff.points if tradeoff.meets(point) and not point.in_doubt)
    best = tradeoff.choose_best(sure)
    instead = "No setting meets the target without this doubt."
    if best is not None:
        instead = f"The weakest without this doubt is {_name_setting(best)}."
    return (
        f"But {chosen.why_in_doubt}: more may leak. {instead} Try a stronger --attack, "
        "such as portfolio."
    )


def draw_tradeoff(tradeoff: Tradeoff, *, alone: bool = True) -> str:
    """Draws the trade-off.

    Where it does not stand alone, what may be concluded stands beside it, not in it.
    """
    gains = [end for point in tradeoff.points for end in (point.gain.low, point.gain.high)]
    utilities = [end for point in tradeoff.points for end in _find_utility_ends(tradeoff, point)]
    across = Axis([0.0, *utilities], LEFT, WIDTH)
    upwards = Axis([0.0, tradeoff.max_leak, *gains], TOP + HEIGHT, -HEIGHT)
    settings, setup = _list_settings(tradeoff), describe_setup(tradeoff)
    said = [*settings, *conclude(tradeoff), *setup]
    written = said if alone else [*settings, *setup]
    lines = [line for sentence in written for line in wrap_sentence(sentence, PAGE)]
    below = TOP + HEIGHT + 72
    return draw_picture(
        f"Trade-off: what leaks ({tradeoff.metric} above blind) against {tradeoff.utility}",
        said,
        PAGE,
        below + LINE * len(lines),
        [
            *_draw_axes(tradeoff, across, upwards),
            *_draw_points(tradeoff, across, upwards),
            *draw_small_print(lines, below),
        ],
        STYLE,
    )


def _draw_axes(tradeoff: Tradeoff, across: Axis, upwards: Axis) -> Iterator[str]:
    """Draws the frame, with what the target allows shaded."""
    right, bottom, limit = LEFT + WIDTH, TOP + HEIGHT, upwards.at(tradeoff.max_leak)
    allowed = f'x="{LEFT}" y="{limit:g}" width="{WIDTH}" height="{bottom - limit:g}"'
    yield from (
        f'<rect class="allowed" {allowed}/>',
        f'<line class="limit" x1="{LEFT}" y1="{limit:g}" x2="{right}" y2="{limit:g}"/>',
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>',
    )
    for value in across.ticks():
        x = across.at(value)
        yield from (
            f'<line class="grid" x1="{x:g}" y1="{TOP}" x2="{x:g}" y2="{bottom}"/>',
            draw_text(x, bottom + 18, f"{round(value, 6):g}", style="small"),
        )
    percent = tradeoff.points[0].leak.unit == "fraction"
    for value in upwards.ticks():
        y, tick = upwards.at(value), f"{round(100 * value, 6):g} %" if percent else f"{value:g}"
        yield from (
            f'<line class="grid" x1="{LEFT}" y1="{y:g}" x2="{right}" y2="{y:g}"/>',
            draw_text(LEFT - 8, y + 4, tick, anchor="end", style="small"),
        )
    utility = f"{tradeoff.utility} after training (more is better)"
    gain = f"gain over blind, {tradeoff.metric} (less is better)"
    yield from (
        draw_text(LEFT + WIDTH / 2, bottom + 42, utility),
        draw_text(16, TOP - 10, gain, anchor="start"),
    )


def _draw_points(tradeoff: Tradeoff, across: Axis, upwards: Axis) -> Iterator[str]:
    for place, point in enumerate(tradeoff.points, start=1):
        x, y = across.at(point.utility[tradeoff.utility].mean), upwards.at(point.gain.mean)
        left, right = (across.at(end) for end in _find_utility_ends(tradeoff, point))
        bottom, top = upwards.at(point.gain.low), upwards.at(point.gain.high)
        # A disc where the target is met, else a square, for who cannot tell the colours; green is
        # for what is shown, grey for a target met by a failed attack
        met = "doubt" if point.in_doubt else "met"
        look, mark = "leaks", f'rect class="leaks" x="{x - RADIUS:g}" y="{y - RADIUS:g}" {SIDES}'
        if tradeoff.meets(point):
            look, mark = met, f'circle class="{met}" cx="{x:g}" cy="{y:g}" r="{RADIUS}"'
        label = draw_text(x, y + 4.5, f"{place}{'?' if point.in_doubt else ''}")
        yield (
            '<g class="point" role="img">'
            f"<title>{escape(_describe_point(tradeoff, place, point))}</title>"
            f'<path class="cross {look}" d="M{left:g} {y:g}H{right:g}M{x:g} {bottom:g}V{top:g}"/>'
            f"<{mark}/>{label}</g>"
        )


def _list_settings(tradeoff: Tradeoff) -> list[str]:
    unit = tradeoff.points[0].leak.unit
    limit = write_number(tradeoff.max_leak, unit) + (" %" if unit == "fraction" else "")
    return [
        *(_describe_point(tradeoff, at, point) for at, point in enumerate(tradeoff.points, 1)),
        f"Round: the interval of the gain ends at {limit} (dashed) or below; square and red: it "
        "does not. Green: no doubt is known; grey: more may leak.",
    ]


def _describe_point(tradeoff: Tradeoff, place: int, point: Point) -> str:
    """Describes a setting in words."""
    proven = f", {write_point_epsilon(point)} over the run" if point.guarantees else ""
    return (
        f"{place}  {point.defense}: gain {write_point_gain(point)}, {point.verdict}, "
        f"{tradeoff.utility} {write_utility(point.utility[tradeoff.utility])}{proven}"
    )


def _find_utility_ends(tradeoff: Tradeoff, point: Point) -> tuple[float, float]:
    found = point.utility[tradeoff.utility]
    return found.low, found.high
