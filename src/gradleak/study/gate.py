"""A gate for CI: passes only if what leaks is shown to be small, and nothing stands against believing it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradleak.core.errors import GradleakError
from gradleak.core.registry import did_you_mean
from gradleak.records.flags import FLAGS
from gradleak.records.settings import Setting, settings_of
from gradleak.records.statistics import interval
from gradleak.records.summary import read_summaries
from gradleak.report.labels import Labels, natural
from gradleak.report.run_verdict import DOUBTS, doubts

CONFIDENCE = 0.95  # that the truth lies on the good side of the end that is held against the bound: one-sided
ONLY_BLIND = "Only the blind attack was run, which does not look at the update. Run others, such as portfolio."
ACCEPTABLE = (*DOUBTS, "only_blind")


class GateFailed(GradleakError):
    """A bound is passed, or cannot be believed."""

    exit_code = 4


@dataclass(frozen=True)
class Bound:
    """The most (or, where lower leaks more, the least) that a metric may be."""

    metric: str
    limit: float
    upper: bool

    @property
    def text(self) -> str:
        return f"{self.metric} {'≤' if self.upper else '≥'} {self.limit:g}"


@dataclass(frozen=True)
class Finding:
    """One setting held against one bound, or against one flag."""

    setting: str
    record: Path
    rule: str  # the metric or the flag
    title: str
    passed: bool
    message: str


def read_bound(written: str, *, upper: bool) -> Bound:
    """`exact_match=0.05`."""
    flag = "--max" if upper else "--min"
    metric, equals, value = written.partition("=")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not equals or not metric.strip() or not math.isfinite(limit):
        raise GradleakError(f"Cannot read {flag} {written!r}: write {flag} exact_match=0.05.")
    return Bound(metric.strip(), limit, upper)


def examples_needed(limit: float) -> int:
    """How many examples, none of them leaking, show that fewer than this share leak (one-sided, exact): 59 for 0.05."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log1p(-limit))


def judge(run: Path, bounds: Sequence[Bound], accepted: Sequence[str] = ()) -> list[Finding]:
    """Every setting of a run against every bound and every flag that makes a low score unreliable."""
    if not bounds:
        raise GradleakError("A gate needs a bound: add --max exact_match=0.05.")
    for name in accepted:
        if name not in ACCEPTABLE:
            near = did_you_mean(name, list(ACCEPTABLE))
            raise GradleakError(f"Cannot accept {name!r}{near} Flags that a gate minds: {', '.join(ACCEPTABLE)}.")
    summaries = read_summaries(run)
    labels = Labels([summary.record for summary in summaries])
    settings = sorted(settings_of(summaries), key=lambda setting: natural(labels.setting(setting.record)))
    return [finding for setting in settings for finding in _of_setting(setting, labels, bounds, accepted)]


def _of_setting(setting: Setting, labels: Labels, bounds: Sequence[Bound], accepted: Sequence[str]) -> list[Finding]:
    name, path = labels.setting(setting.record), setting.summaries[0].path
    found = [_held_against(setting, name, path, bound) for bound in bounds]
    for flag in doubts(setting):
        if flag not in accepted:
            meaning = f"{FLAGS[flag].meaning} {FLAGS[flag].what_to_do}" if flag in FLAGS else ONLY_BLIND
            found.append(Finding(name, path, flag, f"no {flag}", False, f"{flag}: {meaning}"))
    return found


def _held_against(setting: Setting, name: str, path: Path, bound: Bound) -> Finding:
    _refuse_unfit(setting, bound)
    values, _, clusters = setting.values(bound.metric)
    kept = [(value, cluster) for value, cluster in zip(values, clusters, strict=True) if value is not None]
    if not kept:
        message = f"{bound.metric} applies to none of the {len(values)} examples, so that nothing is shown."
        return Finding(name, path, bound.metric, bound.text, False, message)
    found = interval([value for value, _ in kept], [cluster for _, cluster in kept], 2 * CONFIDENCE - 1)
    end = found.high if bound.upper else found.low
    passed = end <= bound.limit if bound.upper else end >= bound.limit
    told = f"{bound.metric} is {found.mean:.3g} over {found.n} examples and may be as {'high' if bound.upper else 'low'} as "
    told += f"{end:.3g} (one-sided {CONFIDENCE:.0%})"
    return Finding(name, path, bound.metric, bound.text, passed, f"{told}. {_needs(setting, bound, found.mean)}".strip())


def _needs(setting: Setting, bound: Bound, mean: float) -> str:
    """How many examples the bound needs, where they can help."""
    fraction = setting.record.worst_case[bound.metric].unit == "fraction" and bound.upper and 0 < bound.limit < 1
    if not fraction or mean > bound.limit:
        return ""
    needed = examples_needed(bound.limit)
    batches = int(setting.record.spec.get("batch_size", 1))
    each = f" in {-(-needed // batches)} or more batches of {batches}" if batches > 1 else ""
    return f"A bound of {bound.limit:g} needs {needed} examples{each} of which none leaks (0 of {needed})."


def _refuse_unfit(setting: Setting, bound: Bound) -> None:
    known = setting.metrics()
    if bound.metric not in known:
        near = did_you_mean(bound.metric, known)
        raise GradleakError(
            f"{setting.summaries[0].path} was not scored by {bound.metric!r}{near} It has {', '.join(known)}; "
            f"gradleak score adds others without attacking again."
        )
    if (setting.record.worst_case[bound.metric].direction == "higher") != bound.upper:
        flag, more = ("--min", "lower") if bound.upper else ("--max", "higher")
        raise GradleakError(f"{bound.metric} leaks more the {more} it is: use {flag} {bound.metric}={bound.limit:g}.")
