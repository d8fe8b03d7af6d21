"""What a report says, before it is drawn: the same for HTML, Markdown and report.json."""

from dataclasses import dataclass

from gradleak.records.judgement import Coverage
from gradleak.records.schema import Score
from gradleak.report.pictures.heat_map import HeatMap
from gradleak.report.pictures.tradeoff_chart import Tradeoff

SCHEMA = "gradleak.report/1"


@dataclass(frozen=True)
class ScoreLine:
    """One metric of the worst setting."""

    metric: str
    score: Score


@dataclass(frozen=True)
class FlagLine:
    """A reason to doubt, where it was raised, and what it means."""

    name: str
    attacks: tuple[str, ...]
    settings: int
    detail: str  # the numbers of the first that raised it
    meaning: str
    what_to_do: str
    lowers_trust: bool  # in a low score


@dataclass(frozen=True)
class Verdict:
    """What comes first: what leaks, how much more than blind, who could do it, and what stands against trusting it."""

    verdict: str  # of the whole run: it leaks where any setting does, and could not be judged where any could not
    leaks: bool
    in_doubt: bool  # nothing is shown to leak, and the attacks rather than the defense may be why
    headline: str
    sentences: tuple[str, ...]
    setting: str  # where most leaks
    exact: str  # "3 of 30", or nothing where it was not measured
    scores: tuple[ScoreLine, ...]  # of that setting, the worst case over attacks
    knowledge: tuple[str, ...]
    flags: tuple[FlagLine, ...]


@dataclass(frozen=True)
class Story:
    """The run told to who has to decide."""

    happened: str  # one sentence
    means: tuple[str, ...]
    not_tried: tuple[str, ...]
    would_change: tuple[str, ...]


@dataclass(frozen=True)
class SettingLine:
    """One client under all attacks run on it."""

    label: str
    records: tuple[str, ...]
    attacks: tuple[str, ...]
    metric: str  # the leading one: another of texts than of pictures
    score: Score  # of it, worst case
    exact: Score | None
    verdict: str  # leaks, not shown, or could not be judged
    leaks: bool
    flags: tuple[str, ...]
    doubts: tuple[FlagLine, ...]  # the same with their numbers and what they mean


@dataclass(frozen=True)
class HeatLine:
    """One attack under one defense; of several settings the one that leaks most."""

    attack: str
    defense: str
    metric: str
    score: Score
    verdict: str
    in_doubt: bool  # the number may be too low
    settings: int
    record: str


@dataclass(frozen=True)
class AttackHeat:
    """Attacks × defenses."""

    attacks: tuple[str, ...]
    defenses: tuple[str, ...]
    cells: tuple[HeatLine, ...]
    left_out: int = 0  # cells of attacks or defenses for which there was no room


@dataclass(frozen=True)
class TracePoint:
    """One step of a search, over the batches that recorded it."""

    step: int
    median: float
    low: float
    high: float
    batches: int


@dataclass(frozen=True)
class TraceLine:
    """How an attack's objective fell and, where the secret is at hand, how like it the guess became."""

    attack: str
    setting: str
    record: str
    objective: tuple[TracePoint, ...]
    similarity: tuple[TracePoint, ...]


@dataclass(frozen=True)
class Word:
    """A word of a guess; no text where it is withheld."""

    mark: str  # pair, word, wrong, or unknown where the secret is not at hand
    text: str | None


@dataclass(frozen=True)
class GalleryItem:
    """One secret beside one guess."""

    attack: str
    defense: str
    setting: str
    batch: int
    position: int
    record: str
    secret_hash: str
    secret: str | None  # a text, or a picture as a data URI
    words: tuple[Word, ...]
    picture: str | None  # the guess as a data URI, where it is a picture
    metric: str  # the leading one
    unit: str
    score: float | None  # by it
    exact: bool
    certified: bool


@dataclass(frozen=True)
class CostLine:
    """What an attack took over the whole run."""

    attack: str
    records: int
    examples: int
    seconds: float
    steps: int
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Entry:
    """A named fact of the threat model or of where the numbers come from."""

    name: str
    value: str


@dataclass(frozen=True)
class Report:
    """A whole report."""

    created: str
    title: str
    metric: str  # the leading one of the setting that leaks most
    redacted: bool
    records: int
    settings_run: int
    settings_leaking: int
    story: Story
    verdict: Verdict
    settings: tuple[SettingLine, ...]  # the ones that leak most first; not all where there are very many
    heat: AttackHeat
    tradeoff: Tradeoff | None
    leak_map: HeatMap | None
    traces: tuple[TraceLine, ...]
    gallery: tuple[GalleryItem, ...]
    costs: tuple[CostLine, ...]
    threat_model: tuple[Entry, ...]
    provenance: tuple[Entry, ...]
    coverage: Coverage  # cells that were meant and are missing, failed or unreadable
    reproduce: str  # a study of the setting that leaks most
