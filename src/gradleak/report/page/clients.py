"""Clients and rounds of a federated run: who leaks most, and how that changes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from gradleak.report.clients import ClientLeak, list_client_leaks, tell_clients
from gradleak.report.page.section import JudgedRun, Report, Section
from gradleak.report.table_markup import (
    Column,
    draw_html_table,
    draw_markdown_table,
    number_columns,
)

NUMBERS = ("word for word", "proven", "ROUGE-1", "blind")
MOST = 200  # rows; a run of many clients and rounds is told by its sentences


@dataclass(frozen=True)
class ClientsAndRounds(Section):
    """A line for each client and round; left out where records are of no federated run."""

    name = "clients"
    title = "Clients"
    heading = "Clients and rounds"
    template = """
<ul>{% for sentence in section.sentences_of_clients %}<li>{{ sentence }}</li>{% endfor %}</ul>
{% if section.clients|length > most %}
<p class="soft">The first {{ most }} of {{ section.clients|length }}.</p>
{% endif %}
{{ table }}
"""

    clients: tuple[ClientLeak, ...]
    sentences_of_clients: tuple[str, ...]

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        leaks = list_client_leaks(run.summaries)
        remarks = [one for record in run.records for one in record.data.remarks] if leaks else []
        return cls(tuple(leaks), tuple(dict.fromkeys([*tell_clients(leaks), *remarks])))

    @property
    def is_shown(self) -> bool:
        return bool(self.clients)

    def prepare(self, report: Report) -> Mapping[str, Any]:
        columns = [Column("client"), Column("round"), Column("defenses"), *number_columns(*NUMBERS)]
        return {"table": draw_html_table(columns, self._rows[:MOST]), "most": MOST}

    def write_markdown(self, report: Report) -> Iterator[str]:
        if not self.clients:
            return
        yield from (f"## {self.heading}", "")
        yield from (f"- {sentence}" for sentence in self.sentences_of_clients)
        yield ""
        yield from draw_markdown_table(["client", "round", "defenses", *NUMBERS], self._rows[:MOST])

    @property
    def _rows(self) -> list[list[str]]:
        return [
            [
                *(one.client, str(one.round), one.defenses, f"{one.whole} of {one.texts}"),
                *(str(one.proven), f"{100 * one.score:.1f}", f"{100 * one.blind:.1f}"),
            ]
            for one in self.clients
        ]
