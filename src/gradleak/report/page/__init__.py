"""A run as one page: put together out of sections, and written as HTML, PDF, Markdown and JSON."""

from collections.abc import Sequence
from pathlib import Path

from gradleak.records.files import RecordError
from gradleak.records.run_folder import read_run
from gradleak.records.schema import now
from gradleak.report.page.bracket import WhatNoAttackCouldDo
from gradleak.report.page.charts import (
    AttacksUnderDefenses,
    LeakAgainstUtility,
    LeakMapOverLayers,
)
from gradleak.report.page.clients import ClientsAndRounds
from gradleak.report.page.facts import Costs, Glossary, Provenance, Reproduction, ThreatModel
from gradleak.report.page.guesses import GuessGallery, Searches
from gradleak.report.page.opening import Opening, SettingList
from gradleak.report.page.section import JudgedRun, Report, Section
from gradleak.report.shown_guesses import SecretsOf

# In the order in which a person reads them.
SECTIONS: Sequence[type[Section]] = (
    Opening,
    ThreatModel,
    SettingList,
    ClientsAndRounds,
    AttacksUnderDefenses,
    WhatNoAttackCouldDo,
    LeakAgainstUtility,
    LeakMapOverLayers,
    Searches,
    GuessGallery,
    Costs,
    Provenance,
    Reproduction,
    Glossary,
)


def build_report(run: Path, secrets_of: SecretsOf, *, show_secrets: bool = False) -> Report:
    """Builds the report of a record, or of a folder of records.

    Private texts are in it only with `show_secrets`.
    """
    found = read_run(run)
    if not found.summaries:
        raise RecordError(
            f"{run} holds no record that can be read. {found.coverage.gaps[0].why}"
            if found.coverage.gaps
            else f"{run} holds no records. Name the folder that an audit or a study wrote its"
            " records into."
        )
    judged = JudgedRun(
        summaries=found.summaries,
        coverage=found.coverage,
        folder=run if run.is_dir() else None,
        secrets_of=secrets_of,
        shows_secrets=show_secrets,
    )
    return Report(
        created=now(),
        title=run.resolve().name.removesuffix(".json"),
        metric=judged.judgements[judged.settings[0]].metric,
        redacted=not show_secrets,
        records=len(found.summaries),
        settings_run=len(judged.settings),
        settings_leaking=len(judged.leaking),
        sections=[section.gather(judged) for section in SECTIONS],
    )
