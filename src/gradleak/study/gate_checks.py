"""A gate for CI, shut by default: it opens only if all that was meant is there, little leaks,
and that can be believed.

What was meant is a contract: every cell of a study, of the data and the attacks as they are now.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradleak.core.errors import GradleakError, did_you_mean, refuse_unknown
from gradleak.records.files import RecordError
from gradleak.records.judgement import (
    DOUBTS,
    FAILED,
    GAPS,
    GUARANTEE,
    INFORMATION,
    MEASURES,
    MISSING,
    NO_FLAGS,
    OF_PICTURES,
    ORACLE,
    OTHER_DATA,
    OUTDATED,
    Gap,
    find_bound,
    judge_setting,
    list_flags,
)
from gradleak.records.run_folder import PlannedCell, Run, read_run
from gradleak.records.schema import Score
from gradleak.records.settings import Ran, Setting, settings_of
from gradleak.records.statistics import interval
from gradleak.report.naming import Labels, rank_naturally
from gradleak.report.numbers import write_count
from gradleak.report.verdict import explain_doubt
from gradleak.study.private_data import KEY, DataReader, is_of_this_data

# That the truth lies on the good side of the end that is held against the bound: one-sided
CONFIDENCE = 0.95
NAMES_WORDS, NO_BOUND = "names_words", "no_bound"
NAMED = (
    "The updates name every word in {} of {} batches, whatever an attack rebuilds: hide the word"
    " embeddings' gradient."
)
# What any attack could do is below the bound for texts like the prior's, and not for all
PRIOR_DEPENDENT = "prior_dependent"
ACCEPTABLE = (*DOUBTS, *NO_FLAGS, NAMES_WORDS, NO_BOUND, PRIOR_DEPENDENT, *GAPS)
POSSIBLE = (*MEASURES, "bits")  # what --max-possible is about
SHOWN = 10  # cells named in one message


class GateFailed(GradleakError):
    """A bound is passed, or cannot be believed."""

    exit_code = 4


@dataclass(frozen=True)
class Bound:
    """The most (or, where lower leaks more, the least) that a metric may be."""

    metric: str
    limit: float
    upper: bool
    possible: bool = False  # for any attack, and not only for those that were run

    def write(self, unit: str) -> str:
        """Writes `exact_match ≤ 5 %`, as tables show it."""
        if self.possible:
            return f"possible {self.metric} ≤ {write_share(self.limit, unit)}"
        return f"{self.metric} {'≤' if self.upper else '≥'} {write_share(self.limit, unit)}"


def write_share(value: float, unit: str) -> str:
    """Writes a fraction in %, and other values as they are."""
    return f"{100 * value:.3g} %" if unit == "fraction" else f"{value:.3g}"


@dataclass(frozen=True)
class Accepted:
    """A reason that does not shut the gate, and why not."""

    rule: str
    why: str = ""


@dataclass(frozen=True)
class GateCheck:
    """One setting held against one bound or one reason to doubt it; or what is missing from the
    run."""

    setting: str
    records: tuple[Path, ...]  # the files that it is about, the worst first
    rule: str  # the metric, the flag, or the kind of gap
    title: str
    passed: bool
    message: str
    verdict: str = ""  # of the setting, in one of three words
    waived: str | None = None  # it failed, and was accepted for this reason

    @property
    def shuts(self) -> bool:
        return not self.passed and self.waived is None


@dataclass(frozen=True)
class Contract:
    """The cells of a study, and the versions of the attacks of each, by its id and their key in
    a record."""

    cells: tuple[PlannedCell, ...]
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def read_contract(path: Path, changes: Sequence[str] = ()) -> Contract:
    """Of a study's YAML, with fields replaced (`field=value`) as they were for its run."""
    from gradleak.study.cells import read_study

    cells = read_study(path, changes).cells
    return Contract(
        tuple(PlannedCell(cell.spec.id, cell.axes) for cell in cells),
        {
            cell.spec.id: {key: one.version for key, one in cell.spec.attack_keys().items()}
            for cell in cells
        },
    )


def stale_records(run: Run, contract: Contract | None) -> Iterator[Gap]:
    """Records of other data than is there now, or of other versions of attacks than the contract
    asks for.

    Without a contract, data that is not at hand is not missed: a gate may run on a machine that has
    no private data.
    """
    data = DataReader(network=contract is not None)
    for summary in run.summaries:
        place = (summary.path.name, str(summary.path))
        same = is_of_this_data(summary, data)
        if same is False:
            yield Gap(OTHER_DATA, *place, "Its data is other data by now. Run its audit again.")
        elif same is None and contract is not None:
            why = f"Whether it is of this data cannot be told: the data or {KEY} is not at hand."
            yield Gap(OTHER_DATA, *place, why)
        versions = {} if contract is None else contract.versions.get(summary.id, {})
        for key, version in versions.items():
            attack = summary.record.attacks.get(key)
            if attack is None or attack.version != version:
                why = f"Its {key} is of another version. Run its audit again."
                yield Gap(OUTDATED, *place, why)


def read_bound(written: str, *, upper: bool, possible: bool = False) -> Bound:
    """`exact_match=0.05`, or `exact_match=5%`."""
    flag = "--max-possible" if possible else "--max" if upper else "--min"
    metric, _, value = (word.strip() for word in written.partition("="))
    try:
        limit = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        limit = math.nan
    if not metric or not math.isfinite(limit):
        raise GradleakError(f"Cannot read {flag} {written!r}: write {flag} exact_match=0.05.")
    if possible and (metric not in POSSIBLE or limit < 0):
        raise GradleakError(
            f"--max-possible is about {', '.join(POSSIBLE)}, from 0 on, not {written!r}."
        )
    return Bound(metric, limit, upper, possible)


def read_accepted(written: str) -> Accepted:
    """`few_examples`, or `few_examples=only 12 notes exist`."""
    rule, _, why = (word.strip() for word in written.partition("="))
    refuse_unknown("Cannot accept", rule, ACCEPTABLE, "What a gate minds")
    return Accepted(rule, why)


def examples_needed(limit: float) -> int:
    """How many examples, none of them leaking, show that fewer than this share leak (one-sided,
    exact): 59 for 0.05."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log1p(-limit))


def judge(
    run: Path,
    bounds: Sequence[Bound],
    accepted: Sequence[Accepted] = (),
    contract: Contract | None = None,
) -> list[GateCheck]:
    """A run's gaps, then every setting against every bound and every reason that makes a low
    score unreliable."""
    if not bounds:
        raise GradleakError("A gate needs a bound: add --max exact_match=0.05.")
    found = read_run(run, None if contract is None else contract.cells)
    gaps = (*found.coverage.gaps, *stale_records(found, contract))
    if not found.summaries and not gaps:
        raise RecordError(
            f"{run} holds no records. Name the folder that an audit or a study wrote its records"
            " into."
        )
    found = replace(found, coverage=replace(found.coverage, gaps=gaps))
    labels = Labels([summary.record for summary in found.summaries])
    settings = sorted(
        settings_of(found.summaries),
        key=lambda setting: rank_naturally(labels.setting(setting.record)),
    )
    _refuse_unfit(settings, [bound for bound in bounds if not bound.possible])
    findings = [
        *_check_gaps(found),
        *(one for setting in settings for one in check_setting(setting, labels, bounds)),
    ]
    if not settings:  # gaps may be waived, a bound never is
        nothing = "No record is here to hold against this bound."
        findings += [
            GateCheck("the run", (), bound.metric, bound.write(""), False, nothing)
            for bound in bounds
        ]
    why = {one.rule: one.why or "no reason given" for one in accepted}
    return [replace(one, waived=why.get(one.rule)) if not one.passed else one for one in findings]


def _check_gaps(run: Run) -> Iterator[GateCheck]:
    """One finding a kind of gap, with the names of what is missing; and one that says that all
    is there."""
    cells = run.coverage.meant
    for kind, meaning in GAPS.items():
        gaps = run.coverage.of(kind)
        if gaps:
            named = "; ".join(f"{gap.cell} ({gap.why.rstrip('.')})" for gap in gaps[:SHOWN])
            more = f"; and {len(gaps) - SHOWN} more" if len(gaps) > SHOWN else ""
            of = f" of {cells}" if cells is not None and kind in (MISSING, FAILED) else ""
            paths = tuple(dict.fromkeys(Path(gap.path) for gap in gaps))
            message = f"{len(gaps)}{of} {kind.replace('_', ' ')}: {named}{more}."
            told = f"{message} That is: {meaning}."
            yield GateCheck("the run", paths, kind, f"no {kind} cell", False, told)
    if cells is not None and not run.coverage.gaps:
        yield GateCheck(
            "the run", (), MISSING, "every cell has a record", True, run.coverage.sentence()
        )


def check_setting(setting: Setting, labels: Labels, bounds: Sequence[Bound]) -> Iterator[GateCheck]:
    """One setting against every bound, and against everything that makes a low score of it
    unreliable."""
    judgement, name = judge_setting(setting), labels.setting(setting.record)
    pictures = judgement.metric in OF_PICTURES
    possible = [bound for bound in bounds if bound.possible]
    own = [
        bound
        for bound in bounds
        if (bound.metric in OF_PICTURES) == pictures and not bound.possible
    ]
    found = [_hold_against(setting, bound) for bound in own]
    found += [_hold_possible(setting, bound) for bound in possible]
    if not own and not possible:
        kind, example = (
            ("pictures", "--min mse=0.02") if pictures else ("texts", "--max exact_match=0.05")
        )
        message = f"These are {kind}, and no bound is about {kind}: add one, such as {example}."
        found.append(GateCheck("", _paths(setting), NO_BOUND, "has a bound", False, message))
    # Whether attacks can be believed does not matter to what none of them could do.
    for doubt in judgement.doubts if own or not possible else ():
        where, said = _find_flag(setting, doubt)
        found.append(
            GateCheck("", where, doubt, f"free of {doubt}", False, f"{said}{explain_doubt(doubt)}")
        )
    if judgement.named:
        message = NAMED.format(judgement.named, setting.record.data.batches)
        found.append(GateCheck("", _paths(setting), NAMES_WORDS, "no words named", False, message))
    return (replace(one, setting=name, verdict=judgement.verdict) for one in found)


def _paths(setting: Setting) -> tuple[Path, ...]:
    return tuple(summary.path for summary in setting.summaries)


def _find_flag(setting: Setting, name: str) -> tuple[tuple[Path, ...], str]:
    """The records that raised a flag, and what the first of them says; all records for what is
    no flag."""
    raisers = {
        one.path: details[name]
        for one in setting.summaries
        if name in (details := list_flags(one.record))
    }
    if not raisers:
        return _paths(setting), ""
    attack, detail = next(iter(next(iter(raisers.values())).items()))
    return tuple(raisers), f"{attack}: {detail} " if attack else f"{detail} "


def _hold_against(setting: Setting, bound: Bound) -> GateCheck:
    measured = bound.metric in setting.metrics()
    unit = setting.first_score(bound.metric).unit if measured else ""
    title = bound.write(unit)
    if not measured:
        lacking = dict.fromkeys(
            ran.source.path for ran in setting.attacks if bound.metric not in ran.columns.values
        )
        message = (
            f"{bound.metric} was not measured. gradleak score adds it without attacking again."
        )
        return GateCheck("", tuple(lacking), bound.metric, title, False, message)
    values, _, clusters = setting.values(bound.metric)
    kept = [
        (value, cluster)
        for value, cluster in zip(values, clusters, strict=True)
        if value is not None
    ]
    if not kept:
        message = (
            f"{bound.metric} applies to none of the {len(values)} examples, so that nothing is"
            " shown."
        )
        return GateCheck("", _paths(setting), bound.metric, title, False, message)
    found = interval(
        [value for value, _ in kept], [cluster for _, cluster in kept], 2 * CONFIDENCE - 1
    )
    end = found.high if bound.upper else found.low
    passed = end <= bound.limit if bound.upper else end >= bound.limit
    told = (
        f"{bound.metric} is {write_share(found.mean, unit)} over"
        f" {write_count(found.n, 'example', 'examples')} and may be as"
        f" {'high' if bound.upper else 'low'} as {write_share(end, unit)}"
        f" (one-sided, {100 * CONFIDENCE:g} %)"
    )
    message = f"{told}. {_needs(setting, bound, found.mean)}".strip()
    return GateCheck("", _worst_first(setting, bound), bound.metric, title, passed, message)


def _hold_possible(setting: Setting, bound: Bound) -> GateCheck:
    """What no attack could pass: by a theorem about the noise, or else under the prior."""
    unit = "bits" if bound.metric == "bits" else "fraction"
    title = bound.write(unit)
    bounded = [one for one in setting.summaries if one.record.bounds is not None]
    if not bounded:
        message = "What no attack could do was not computed. gradleak bound adds it to the record."
        return GateCheck("", _paths(setting), bound.metric, title, False, message)
    record, where = bounded[0].record, (bounded[0].path,)
    proven = find_bound(record, INFORMATION if bound.metric == "bits" else GUARANTEE, bound.metric)
    most = math.inf if proven is None else proven.mean
    told = (
        f"No theorem bounds {bound.metric} here: nothing is clipped"
        if proven is None
        else f"Whoever attacks gets at most {write_share(most, unit)} by the noise alone"
    )
    if most <= bound.limit:
        return GateCheck("", where, bound.metric, title, True, f"{told}.")
    estimated = find_bound(record, ORACLE, bound.metric)
    if estimated is None or estimated.high is None or estimated.high > bound.limit:
        more = (
            ""
            if estimated is None or estimated.high is None
            else f"; an oracle may get {write_share(estimated.high, unit)}"
        )
        return GateCheck("", where, bound.metric, title, False, f"{told}{more}.")
    assert record.bounds is not None
    message = (
        f"{told}; an oracle gets at most {write_share(estimated.high, unit)}, which is a theorem"
        f" only for texts drawn from the prior {record.bounds.prior}."
    )
    return GateCheck("", where, PRIOR_DEPENDENT, title, False, message)


def _worst_first(setting: Setting, bound: Bound) -> tuple[Path, ...]:
    """The record whose attack got most out of the client is the one to look at."""

    def leak(ran: Ran) -> float:
        there = [value for value in ran.columns.values[bound.metric] if value is not None]
        mean = sum(there) / len(there) if there else 0.0
        return mean if bound.upper else -mean

    return tuple(
        dict.fromkeys(ran.source.path for ran in sorted(setting.attacks, key=leak, reverse=True))
    )


def _needs(setting: Setting, bound: Bound, mean: float) -> str:
    """How many examples the bound needs, where they can help."""
    fraction = (
        setting.first_score(bound.metric).unit == "fraction" and bound.upper and 0 < bound.limit < 1
    )
    if not fraction or mean > bound.limit:
        return ""
    needed = examples_needed(bound.limit)
    batches = int(setting.record.spec.get("batch_size", 1))
    each = f" in {-(-needed // batches)} or more batches of {batches}" if batches > 1 else ""
    return (
        f"A bound of {write_share(bound.limit, 'fraction')} needs"
        f" {write_count(needed, 'example', 'examples')}{each}, none of them leaking."
    )


def _refuse_unfit(settings: Sequence[Setting], bounds: Sequence[Bound]) -> None:
    """Bounds that no setting was measured by, that point the wrong way, or that hold whatever
    leaks."""
    for bound in bounds:
        fit = [
            setting
            for setting in settings
            if any(bound.metric in one.record.worst_case for one in setting.summaries)
        ]
        if not fit and settings:
            known = dict.fromkeys(metric for setting in settings for metric in setting.metrics())
            raise GradleakError(
                f"{settings[0].summaries[0].path} was not scored by"
                f" {bound.metric!r}{did_you_mean(bound.metric, known)} It has {', '.join(known)};"
                " gradleak score adds others without attacking again."
            )
        for setting in fit:
            _refuse_out_of_range(bound, setting.first_score(bound.metric))


def _refuse_out_of_range(bound: Bound, score: Score) -> None:
    if (score.direction == "higher") != bound.upper:
        flag, more = ("--min", "lower") if bound.upper else ("--max", "higher")
        raise GradleakError(
            f"{bound.metric} leaks more the {more} it is: use {flag}"
            f" {bound.metric}={bound.limit:g}."
        )
    flag = "--max" if bound.upper else "--min"
    if score.unit == "fraction" and not 0 <= bound.limit <= 1:
        percent = f", or {flag} {bound.metric}={bound.limit:g}%" if 0 <= bound.limit <= 100 else ""
        meant = f"{bound.limit / 100:g}" if 0 <= bound.limit <= 100 else "0.05"
        raise GradleakError(
            f"{flag} {bound.metric}={bound.limit:g} is out of range: {bound.metric} is a share from"
            f" 0 to 1, which tables show in %. Write {flag} {bound.metric}={meant}{percent}."
        )
    always = (
        bound.limit >= 1
        if bound.upper and score.unit == "fraction"
        else not bound.upper and bound.limit <= 0
    )
    if always:
        raise GradleakError(
            f"{flag} {bound.metric}={bound.limit:g} holds whatever leaks: give a bound that can be"
            " passed."
        )
