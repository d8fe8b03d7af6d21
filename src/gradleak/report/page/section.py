"""What a report is made of: a run that was judged, and sections that are each drawn from it.

A section is declared in one place, a class in a file beside this one that says what it holds, what
it needs and how it looks. The package's `__init__.py` lists the sections in their order.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from gradleak.records.judgement import LEADING, Coverage, Judgement, judge_setting
from gradleak.records.plain import to_plain
from gradleak.records.schema import Record, Score
from gradleak.records.settings import Setting, settings_of
from gradleak.records.store import Summary
from gradleak.report.naming import Labels, rank_naturally
from gradleak.report.shown_guesses import Secrets, SecretsOf, find_kept_secrets

SCHEMA = "gradleak.report/1"


@dataclass(frozen=True)
class JudgedRun:
    """The records of a run, each setting of which is judged and named."""

    summaries: Sequence[Summary]
    coverage: Coverage
    folder: Path | None = None  # where a trade-off or a leak map may lie beside the records
    secrets_of: SecretsOf = lambda record: {}  # compared with guesses word by word
    shows_secrets: bool = False  # in what is drawn

    @property
    def records(self) -> list[Record]:
        return [summary.record for summary in self.summaries]

    @cached_property
    def labels(self) -> Labels:
        return Labels(self.records)

    @cached_property
    def judgements(self) -> Mapping[Setting, Judgement]:
        return {setting: judge_setting(setting) for setting in settings_of(self.summaries)}

    @cached_property
    def settings(self) -> Sequence[Setting]:
        """The settings that leak first, of these the ones that leak most.

        Settings of texts stand before those of pictures, whose scores are on another scale.
        """
        return sorted(self.judgements, key=self._rank)

    @cached_property
    def settings_by_name(self) -> Sequence[Setting]:
        return sorted(
            self.settings, key=lambda one: rank_naturally(self.labels.setting(one.record))
        )

    @property
    def leaking(self) -> Sequence[Setting]:
        return [setting for setting in self.settings if self.judgements[setting].leaks]

    def find_secrets(self, record: Record) -> Secrets:
        """Finds the private texts of a record, in it or where they came from."""
        return {**self.secrets_of(record), **find_kept_secrets(record)}

    def _rank(self, setting: Setting) -> tuple[bool, int, float]:
        judgement = self.judgements[setting]
        metric, mean = judgement.metric, setting.mean(judgement.metric)
        leak = float("-inf")
        if mean is not None:
            leak = mean if setting.first_score(metric).direction == "higher" else -mean
        medium = LEADING.index(metric) if metric in LEADING else len(LEADING)
        return not judgement.leaks, medium, -leak


def find_exact_score(setting: Setting) -> Score | None:
    """Returns how much was rebuilt word for word; none where no attack was scored by that."""
    return setting.worst("exact_match") if "exact_match" in setting.metrics() else None


class Section(ABC):
    """A part of a report. It is a frozen dataclass whose fields are members of report.json."""

    name: ClassVar[str]  # its address in the page: #name
    title: ClassVar[str]  # in the list at the top of the page
    heading: ClassVar[str]
    template: ClassVar[str]  # its inside in the page, in Jinja; `section` and `report` are at hand
    needs: ClassVar[str] = ""  # the member without which there is nothing to say

    @classmethod
    @abstractmethod
    def gather(cls, run: JudgedRun) -> Self:
        """Takes what it holds out of a run."""

    @property
    def is_empty(self) -> bool:
        """Whether the run has nothing for it: it is then left out."""
        return bool(self.needs) and not getattr(self, self.needs)

    @property
    def is_shown(self) -> bool:
        """Whether the page has it."""
        return not self.is_empty

    def prepare(self, report: "Report") -> Mapping[str, Any]:
        """Returns what the template names beside `section`, `report` and what all have."""
        return {}

    def write_markdown(self, report: "Report") -> Iterator[str]:
        """Yields its lines, heading included; none where Markdown leaves it out."""
        return iter(())


AnySection = TypeVar("AnySection", bound=Section)


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
    sections: Sequence[Section]

    def find(self, kind: type[AnySection]) -> AnySection:
        """Returns the section of that kind; every report has all of them."""
        return next(section for section in self.sections if isinstance(section, kind))

    @property
    def plain(self) -> dict[str, Any]:
        """The report as report.json has it: the members of all sections beside one another."""
        head = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "sections"}
        members = [to_plain(section).items() for section in self.sections]
        return {"schema": SCHEMA, **head, **dict(chain.from_iterable(members))}
