"""A section of the report is a class and a line in a list: nothing else needs to know of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pytest
from report_schema import describe_report

from gradleak.records.schema import Record
from gradleak.records.store import write_record
from gradleak.report import page
from gradleak.report.page.forms import write_html, write_markdown
from gradleak.report.page.section import JudgedRun, Report, Section
from gradleak.report.table_markup import (
    Column,
    draw_html_table,
    draw_markdown_table,
    number_columns,
)

Make = Callable[..., Record]


@dataclass(frozen=True)
class SecretLengths(Section):
    """How long the private texts are, which are left out where a record does not say."""

    name = "lengths"
    title = "Lengths"
    heading = "How long the secrets are"
    template = "<p>Of {{ report.records }} record.</p>{{ table }}"

    tokens: tuple[int, ...]

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        secrets = (one for summary in run.summaries for one in summary.whole().secrets)
        return cls(tuple(one.tokens for one in secrets))

    @property
    def is_shown(self) -> bool:
        return bool(self.tokens)

    def prepare(self, report: Report) -> Mapping[str, Any]:
        rows = [[f"secret <{place}>", str(count)] for place, count in enumerate(self.tokens)]
        return {"table": draw_html_table([Column("which"), *number_columns("tokens")], rows)}

    def write_markdown(self, report: Report) -> Iterator[str]:
        yield from (f"## {self.heading}", "")
        yield from draw_markdown_table(["tokens"], [[str(count)] for count in self.tokens])


@pytest.fixture
def report(tmp_path: Path, make_record: Make, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setattr(page, "SECTIONS", (*page.SECTIONS, SecretLengths))
    write_record(tmp_path, make_record())
    return page.build_report(tmp_path, lambda record: {})


def test_the_page_lists_a_new_section_and_draws_its_inside(report: Report) -> None:
    page = write_html(report)
    assert '<li><a href="#lengths">Lengths</a></li>' in page
    inside = page[page.index('<section id="lengths"') :]
    assert '<h2 id="lengths-title">How long the secrets are</h2>' in inside
    assert "<p>Of 1 record.</p>" in inside
    assert (
        '<th scope="row">secret &lt;0&gt;</th><td class="number" data-label="tokens">6</td>'
        in inside
    )


def test_markdown_json_and_its_schema_have_a_new_section(report: Report) -> None:
    assert "## How long the secrets are\n\n| tokens |\n| --- |\n| 6 |\n" in write_markdown(report)
    assert report.plain["tokens"] == [6]
    schema = describe_report()
    assert schema["properties"]["tokens"] == {"type": "array", "items": {"type": "integer"}}
    assert list(report.plain) == schema["required"]


def test_a_section_with_nothing_to_show_is_not_on_the_page(report: Report) -> None:
    empty = [SecretLengths(()) if one.name == "lengths" else one for one in report.sections]
    assert "lengths" not in write_html(replace(report, sections=empty))


def test_sections_have_names_of_their_own() -> None:
    names = [section.name for section in page.SECTIONS]
    assert len(set(names)) == len(names)
