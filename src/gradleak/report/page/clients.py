"""Clients and rounds of a federated run beside one another: who leaks most, and how that
changes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

from gradleak.records.judgement import EXACT, LEADING
from gradleak.records.store import Summary
from gradleak.report.naming import write_defenses
from gradleak.report.numbers import write_count
from gradleak.report.page.section import JudgedRun, Report, Section
from gradleak.report.table_markup import (
    Column,
    draw_html_table,
    draw_markdown_table,
    number_columns,
)

CLIENT_TEXTS = "client_texts"  # the data set of such records
NUMBERS = ("word for word", "proven", "ROUGE-1", "blind")
MOST = 200  # rows; a run of many clients and rounds is told by its sentences


@dataclass(frozen=True)
class ClientLeak:
    """What came back of one client's texts in one round, by the best attack on each."""

    client: str
    round: int
    defenses: str
    texts: int
    whole: int  # rebuilt to the last word
    proven: int
    score: float  # ROUGE-1, from 0 to 1
    blind: float


def list_client_leaks(summaries: Sequence[Summary]) -> list[ClientLeak]:
    """Returns a line for each client and round that records speak of, by round and client."""
    found = (leak for one in summaries for leak in _list_leaks(one))
    return sorted(found, key=lambda one: (one.round, one.defenses, len(one.client), one.client))


def tell_clients(leaks: Sequence[ClientLeak]) -> list[str]:
    """Returns who leaks most, how leak changes over rounds and what defenses change, in
    sentences."""
    return [*_tell_most(leaks), *_tell_rounds(leaks), *_tell_defenses(leaks)]


def _list_leaks(summary: Summary) -> Iterator[ClientLeak]:
    spec, metric = summary.record.spec, LEADING[0]
    data = spec.get("data", {})
    columns = [one for one in summary.columns.values() if metric in one.values]
    if data.get("name") != CLIENT_TEXTS or not columns:
        return
    for batch, client in enumerate(data["clients"]):
        places = [at for at, found in enumerate(columns[0].batches) if found == batch]
        if places:
            yield ClientLeak(
                client=str(client),
                round=int(data["round"]),
                defenses=write_defenses(spec.get("defenses")),
                texts=len(places),
                whole=sum(
                    any((one.values.get(EXACT) or {at: 0})[at] == 1 for one in columns)
                    for at in places
                ),
                proven=sum(
                    any(one.certified and one.certified[at] for one in columns) for at in places
                ),
                score=fmean(max(one.values[metric][at] or 0.0 for one in columns) for at in places),
                blind=fmean(max(one.blind[metric][at] or 0.0 for one in columns) for at in places),
            )


def _tell_most(leaks: Sequence[ClientLeak]) -> Iterator[str]:
    clients = list(dict.fromkeys(one.client for one in leaks))
    if len(clients) < 2:
        return
    means = {name: _mean([one for one in leaks if one.client == name]) for name in clients}
    most, least = max(clients, key=means.__getitem__), min(clients, key=means.__getitem__)
    if means[most] == means[least]:
        yield f"All {len(clients)} clients leak alike: ROUGE-1 {means[most]:.1f}."
        return
    yield (
        f"Of {len(clients)} clients {most} leaks most (ROUGE-1 {means[most]:.1f}) and {least} least"
        f" ({means[least]:.1f})."
    )


def _tell_rounds(leaks: Sequence[ClientLeak]) -> Iterator[str]:
    rounds = sorted({one.round for one in leaks})
    if len(rounds) < 2:
        return
    parts = []
    for number in rounds:
        held = [one for one in leaks if one.round == number]
        whole, texts = sum(one.whole for one in held), sum(one.texts for one in held)
        parts.append(f"round {number}: {whole} of {write_count(texts, 'text', 'texts')}")
    shown = parts if len(parts) <= 6 else [*parts[:3], "…", *parts[-3:]]
    yield f"Rebuilt word for word, {'; '.join(shown)}."


def _tell_defenses(leaks: Sequence[ClientLeak]) -> Iterator[str]:
    chains = dict.fromkeys(one.defenses for one in leaks)
    means = [
        f"{chain} {_mean([one for one in leaks if one.defenses == chain]):.1f}" for chain in chains
    ]
    if len(means) > 1:
        yield f"ROUGE-1 by what the platform did to updates: {'; '.join(means)}."


def _mean(leaks: Sequence[ClientLeak]) -> float:
    """Returns the mean over texts, in %."""
    return 100 * sum(one.score * one.texts for one in leaks) / sum(one.texts for one in leaks)


@dataclass(frozen=True)
class ClientsAndRounds(Section):
    """A line for each client and round; left out where records are of no federated run."""

    name = "clients"
    title = "Clients"
    heading = "Clients and rounds"
    needs = "clients"
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

    def prepare(self, report: Report) -> Mapping[str, Any]:
        columns = [Column("client"), Column("round"), Column("defenses"), *number_columns(*NUMBERS)]
        return {"table": draw_html_table(columns, self._rows), "most": MOST}

    def write_markdown(self, report: Report) -> Iterator[str]:
        yield from (f"## {self.heading}", "")
        yield from (f"- {sentence}" for sentence in self.sentences_of_clients)
        yield ""
        yield from draw_markdown_table(["client", "round", "defenses", *NUMBERS], self._rows)

    @property
    def _rows(self) -> list[list[str]]:
        return [
            [
                *(one.client, str(one.round), one.defenses, f"{one.whole} of {one.texts}"),
                *(str(one.proven), f"{100 * one.score:.1f}", f"{100 * one.blind:.1f}"),
            ]
            for one in self.clients[:MOST]
        ]
