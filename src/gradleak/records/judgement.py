"""One judgement of what was rebuilt. Whatever says that something leaks, is in doubt or was not
looked at asks here.

Three words, each with its rule. None of them is "safe": attacks that fail bound themselves, not the
next one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradleak.records.flags import RaisedFlag
from gradleak.records.schema import AttackRecord, BoundRecord, Record, Score
from gradleak.records.settings import Setting, looks
from gradleak.records.statistics import gain_of, paired_difference
from gradleak.records.store import Columns, Summary, columns_of

LEAKS, NOT_SHOWN, NOT_JUDGED = "leaks", "not shown", "could not be judged"
RULES = {
    LEAKS: (
        "an attack rebuilt more than a blind guess does, beyond chance; or a guess is proven by the"
        " update, or too long to be luck and right to the last word; or the updates name every word"
        " of a batch themselves"
    ),
    NOT_SHOWN: (
        "no leak is shown, and nothing stands against the attacks that tried: not shown either way"
    ),
    NOT_JUDGED: (
        "no leak is shown, and something stands against the attacks that tried, so that finding"
        " nothing says nothing"
    ),
}

# What near_chance is decided by, example by example: of texts, of pictures
LEADING = ("rouge1", "mse")
OF_PICTURES = ("mse", "psnr", "ssim", "lpips", "lpips_legacy")
EXACT = "exact_match"

# Under one of these a low score is not evidence: the attacks, not the defense, may be why it is
# low.
DOUBTS = (
    *(
        "search_failed",
        "not_adaptive",
        "dead_gradient",
        "no_objective",
        "unmodelled_dropout",
        "member_out_of_time",
    ),
    "few_examples",
)
EVERY_ATTACK = ("not_adaptive", "no_objective")  # one attack without the fault is enough
OF_BLIND = ("near_chance", "no_objective", "not_adaptive")
OF_THE_SAMPLE = ("few_examples",)  # widens an interval; does not make a score too low
ONLY_BLIND, NO_SCORE = "only_blind", "no_score"
NO_FLAGS = {
    ONLY_BLIND: (
        "Only the blind attack was run, which does not look at the update. Run others, such as"
        " portfolio."
    ),
    NO_SCORE: (
        "No metric applies to these examples, so that nothing was measured. Choose another metric."
    ),
}

Tried = tuple[AttackRecord, Columns]
Raised = dict[str, dict[str, str]]  # flags by name, and what each attack that raised them says
Test = Callable[[Columns, int], bool]  # of one example of an attack


@dataclass(frozen=True)
class Judgement:
    """What may be said of one setting, or of one attack on it."""

    verdict: str  # one of the three words
    metric: str  # the leading one
    # Metrics by which more was rebuilt than by a blind guess, beyond chance
    above_blind: tuple[str, ...]
    proven: int  # examples whose guess the update proves
    whole: int  # examples rebuilt to the last word, by proof or too long to be luck
    examples: int
    named: int  # batches whose update names every word, without any attack
    # Why no more was rebuilt may be the attacks' doing; none where everything was
    doubts: tuple[str, ...]
    # One attack proved every guess and was given neither labels nor lengths
    is_proven_untold: bool = False

    @property
    def leaks(self) -> bool:
        return self.verdict == LEAKS

    @property
    def may_be_more(self) -> bool:
        """Whether the number may be too low, whatever leaks already: what a question mark stands
        for."""
        return any(name not in OF_THE_SAMPLE for name in self.doubts) or self.verdict == NOT_JUDGED


def leading_metric(scores: Mapping[str, Score]) -> str:
    """ROUGE-1 (of pictures, the squared error) where it was measured, else the first metric that
    was."""
    measured = [name for name, score in scores.items() if score.mean is not None]
    return next(
        (name for name in (*LEADING, *measured, *scores) if name in (measured or scores)),
        LEADING[0],
    )


def judge(attacks: Sequence[Tried], batches: int, named: int = 0) -> Judgement:
    """Of attacks on one client of so many batches; `named`: those whose update names every word."""
    looked = [one for one in attacks if looks(one[0])]
    metric = leading_metric((looked or attacks)[0][0].scores) if attacks else LEADING[0]
    above = dict.fromkeys(
        name
        for attack, columns in looked
        for name in _above_blind(attack, columns, metric, batches)
    )
    proven, whole, rebuilt = (
        _examples_where(looked, test) for test in (_is_proven, _is_beyond_luck, _is_rebuilt)
    )
    examples = max((len(columns.batches) for _, columns in attacks), default=0)
    doubts = () if examples and len(rebuilt) == examples else tuple(_doubts(looked, metric))
    unshown = NOT_JUDGED if doubts else NOT_SHOWN
    return Judgement(
        verdict=LEAKS if above or whole or named else unshown,
        metric=metric,
        above_blind=tuple(above),
        proven=len(proven),
        whole=len(whole),
        examples=examples,
        named=named,
        doubts=doubts,
        is_proven_untold=any(
            columns.certified
            and all(columns.certified)
            and all(flag.name != "generous_knowledge" for flag in attack.flags)
            for attack, columns in looked
        ),
    )


def judge_setting(setting: Setting) -> Judgement:
    """Of all attacks that were run on one client."""
    return judge(
        [(ran.attack, ran.columns) for ran in setting.attacks],
        setting.record.data.batches,
        max(named_words(summary.record) for summary in setting.summaries),
    )


def judge_summary(summary: Summary) -> Judgement:
    """Of one record that was read without its long parts."""
    return judge_setting(Setting((summary,)))


def judge_record(record: Record) -> Judgement:
    """Of one whole record."""
    attacks = [(attack, columns_of(attack)) for attack in record.attacks.values()]
    return judge(attacks, record.data.batches, named_words(record))


def named_words(record: Record) -> int:
    """In how many batches the update names all words of the batch for certain."""
    return sum(found.exact for found in record.findings if found.name == "bag_of_words")


def standing_flags(attack: AttackRecord) -> list[RaisedFlag]:
    """Returns the flags that an attack raised; of the blind one without those it has by its
    making, which are nobody's doubt."""
    return [flag for flag in attack.flags if looks(attack) or flag.name not in OF_BLIND]


def list_flags(record: Record) -> Raised:
    """Returns flags by name: the attacks that raised them, each with its numbers; under "" what
    belongs to the whole audit."""
    found: Raised = {}
    for key, attack in record.attacks.items():
        for flag in standing_flags(attack):
            found.setdefault(flag.name, {})[key] = flag.detail
    for flag in record.flags:
        found.setdefault(flag.name, {"": flag.detail})
    return found


def list_flags_beside(judgement: Judgement, record: Record) -> Raised:
    """Raised flags that stand against what is judged: not those of one attack where another
    lacks the fault or rebuilt it all."""
    moot = [name for name in DOUBTS if name not in (*judgement.doubts, *OF_THE_SAMPLE)]
    moot += ["near_chance"] if judgement.leaks else []
    moot += ["generous_knowledge"] if judgement.is_proven_untold else []
    return {name: details for name, details in list_flags(record).items() if name not in moot}


def _doubts(looked: Sequence[Tried], metric: str) -> Iterator[str]:
    if not looked:
        yield ONLY_BLIND
        return
    raised = [{flag.name for flag in standing_flags(attack)} for attack, _ in looked]
    for name in DOUBTS:
        if (all if name in EVERY_ATTACK else any)(name in one for one in raised):
            yield name
    scores = (attack.scores.get(metric) for attack, _ in looked)
    if all(score is None or score.mean is None for score in scores):
        yield NO_SCORE


def _above_blind(
    attack: AttackRecord, columns: Columns, leading: str, batches: int
) -> Iterable[str]:
    """Metrics by which one attack did better than blind. Legacy ones repeat the honest ones."""
    for name, score in attack.scores.items():
        if name == leading:
            above = _leading_is_above(attack, columns, batches, name, score)
        else:  # there are many, and some lie high by chance: their intervals must not touch
            above = _is_clear_of_blind(score)
        if above and not name.endswith("_legacy"):
            yield name


def _leading_is_above(
    attack: AttackRecord, columns: Columns, batches: int, name: str, score: Score
) -> bool:
    """By the paired rule of near_chance, which sees more than two intervals do; its flag holds
    the answer where it was asked."""
    if score.mean is None or score.blind is None or gain_of(score) <= 0:
        return False
    if name in LEADING:
        return all(flag.name != "near_chance" for flag in standing_flags(attack))
    pairs = [
        (ours, blind, batch % batches)  # several draws of one batch are no independent ones
        for ours, blind, batch in zip(
            columns.values.get(name, ()), columns.blind.get(name, ()), columns.batches, strict=False
        )
        if ours is not None and blind is not None
    ]
    if not pairs:
        return _is_clear_of_blind(score)
    ours, blind, clusters = zip(*pairs, strict=True)
    better, worse = (ours, blind) if score.direction == "higher" else (blind, ours)
    return paired_difference(better, worse, clusters).low > 0


def _is_clear_of_blind(score: Score) -> bool:
    low, high, blind_low, blind_high = score.low, score.high, score.blind_low, score.blind_high
    if low is None or high is None or blind_low is None or blind_high is None:
        return False
    return low > blind_high if score.direction == "higher" else high < blind_low


def _is_proven(columns: Columns, place: int) -> bool:
    return place < len(columns.certified) and columns.certified[place]


def _is_beyond_luck(columns: Columns, place: int) -> bool:
    return _is_proven(columns, place) or (
        place < len(columns.beyond_luck) and columns.beyond_luck[place]
    )


def _is_rebuilt(columns: Columns, place: int) -> bool:
    exact = columns.values.get(EXACT, ())
    return _is_proven(columns, place) or (place < len(exact) and exact[place] == 1)


def _examples_where(attacks: Sequence[Tried], test: Test) -> set[int]:
    """The examples of which some attack's guess passes the test."""
    return {
        place
        for _, columns in attacks
        for place in range(len(columns.batches))
        if test(columns, place)
    }


MISSING, FAILED, UNREADABLE = "missing", "failed", "unreadable"
FOREIGN, OTHER_DATA, OUTDATED = "foreign", "other_data", "outdated"
GAPS = {
    MISSING: "no record of it is here: it was not run, or was cut",
    FAILED: "it ended with an error, and its traceback is here",
    UNREADABLE: "its file is broken or was changed, so that it was not looked at",
    FOREIGN: "it belongs to no cell of the study",
    OTHER_DATA: "it is of other data than the rest, or than the data as it is now",
    OUTDATED: "it is of another version of an attack than the study asks for",
}


@dataclass(frozen=True)
class Gap:
    """A cell that should be here and is not, or a file that should not be here as it is."""

    kind: str  # one of GAPS
    cell: str  # where it lies on the axes of its study, or its file
    path: str  # what to look at
    why: str  # in a sentence


@dataclass(frozen=True)
class Coverage:
    """How much of what was meant is there to be judged."""

    meant: int | None  # cells of the studies; none where no study says
    run: int  # of these, or of all where no study says
    gaps: tuple[Gap, ...] = ()

    def of(self, kind: str) -> list[Gap]:
        """The gaps of one kind."""
        return [gap for gap in self.gaps if gap.kind == kind]

    def sentence(self) -> str:
        """`4 of 12 cells were run: 7 missing, 1 failed.`; nothing where no study says what was
        meant and no file is odd."""
        counts = ", ".join(
            f"{len(gaps)} {kind.replace('_', ' ')}" for kind in GAPS if (gaps := self.of(kind))
        )
        if self.meant is None:
            return f"Not all of this run was judged: {counts}." if counts else ""
        cells = f"{self.run} of {self.meant} cells were run"
        return f"{cells}: {counts}." if counts else f"{cells}."


MEASURES = ("token_accuracy", "exact_match")
ORACLE, GUARANTEE, INFORMATION = "oracle", "guarantee", "information"
SECRETS, CEILING = "exposure", "ceiling"


@dataclass(frozen=True)
class Bracket:
    """One measure of one setting, from both sides."""

    of: str  # one of MEASURES
    # The first attack that the audit named, not the best of several after the fact; none of a
    # setting on which only the blind guess was run
    attack: str | None
    rebuilt: Score | None
    at_most: BoundRecord  # by an oracle, under the prior
    guaranteed: BoundRecord | None  # by the noise alone; none where nothing is clipped

    @property
    def is_crossed(self) -> bool:
        """Whether the attack did clearly better than the oracle: these texts are not as the prior
        believes, or guesses were aligned."""
        if self.rebuilt is None or self.rebuilt.low is None or self.at_most.high is None:
            return False
        return self.rebuilt.low > self.at_most.high


def list_brackets(record: Record) -> Iterator[Bracket]:
    """Yields a bracket for each measure that was bounded."""
    first = next((key for key, attack in record.attacks.items() if looks(attack)), None)
    for of in MEASURES:
        at_most = find_bound(record, ORACLE, of)
        if at_most is not None:
            rebuilt = None if first is None else record.attacks[first].scores.get(of)
            yield Bracket(of, first, rebuilt, at_most, find_bound(record, GUARANTEE, of))


def find_bound(record: Record, bound: str, of: str) -> BoundRecord | None:
    """Returns a bound by its name and what it bounds."""
    bounds = record.bounds.bounds if record.bounds else ()
    return next((one for one in bounds if (one.bound, one.of) == (bound, of)), None)
