"""Clients and rounds of a federated run beside one another: who leaks most, and how that
changes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from gradleak.records.judgement import EXACT, LEADING
from gradleak.records.store import Summary
from gradleak.report.naming import write_defenses
from gradleak.report.numbers import write_count

CLIENT_TEXTS = "client_texts"  # the data set of such records


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
    found = [leak for one in summaries for leak in _list_leaks(one)]
    return sorted(found, key=lambda one: (one.round, one.defenses, len(one.client), one.client))


def tell_clients(leaks: Sequence[ClientLeak]) -> list[str]:
    """Returns who leaks most, how leak changes over rounds and what defenses change, in
    sentences."""
    if not leaks:
        return []
    return [*_tell_most(leaks), *_tell_rounds(leaks), *_tell_defenses(leaks)]


def _list_leaks(summary: Summary) -> Iterator[ClientLeak]:
    record = summary.record
    data = record.spec.get("data", {})
    if data.get("name") != CLIENT_TEXTS:
        return
    metric = LEADING[0]
    columns = [one for one in summary.columns.values() if metric in one.values]
    if not columns:
        return
    for batch, client in enumerate(data["clients"]):
        places = [at for at, found in enumerate(columns[0].batches) if found == batch]
        scores = [max(one.values[metric][at] or 0.0 for one in columns) for at in places]
        blind = [max(one.blind[metric][at] or 0.0 for one in columns) for at in places]
        exact = [
            any((one.values.get(EXACT) or {at: 0})[at] == 1 for one in columns) for at in places
        ]
        proven = [any(one.certified and one.certified[at] for one in columns) for at in places]
        if places:
            yield ClientLeak(
                str(client),
                int(data["round"]),
                write_defenses(record.spec.get("defenses")),
                len(places),
                sum(exact),
                sum(proven),
                fmean(scores),
                fmean(blind),
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
    chains = list(dict.fromkeys(one.defenses for one in leaks))
    if len(chains) < 2:
        return
    means = [
        f"{chain} {_mean([one for one in leaks if one.defenses == chain]):.1f}" for chain in chains
    ]
    yield f"ROUGE-1 by what the platform did to updates: {'; '.join(means)}."


def _mean(leaks: Sequence[ClientLeak]) -> float:
    """Returns the mean over texts, in %."""
    texts = sum(one.texts for one in leaks)
    return 100 * sum(one.score * one.texts for one in leaks) / texts
