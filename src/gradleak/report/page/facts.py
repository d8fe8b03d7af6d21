"""Facts around the numbers: who attacks, what it cost, where they come from, how to repeat them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from gradleak.records.judgement import OF_PICTURES, leading_metric
from gradleak.records.schema import Record
from gradleak.records.settings import Setting
from gradleak.records.summary import Summary
from gradleak.report.naming import write_chain, write_component
from gradleak.report.numbers import write_duration
from gradleak.report.page.section import JudgedRun, Report, Section
from gradleak.report.page.story import list_facts
from gradleak.report.privacy import describe_noise, write_guarantees
from gradleak.report.table_markup import (
    Column,
    draw_html_table,
    draw_markdown_table,
    number_columns,
)

NAMES = 20  # records named
FACTS = """
<dl class="facts">
  {%%- for fact in section.%s %%}<dt>{{ fact.name }}</dt><dd>{{ fact.value }}</dd>{%% endfor -%%}
</dl>
"""


@dataclass(frozen=True)
class NamedFact:
    """A named fact of the threat model or of where the numbers come from."""

    name: str
    value: str


@dataclass(frozen=True)
class ThreatModel(Section):
    """Who attacks, what is seen, what is told, what clients do."""

    name = "threat"
    title = "Who attacks"
    heading = "Who attacks, and what it knows"
    template = FACTS % "threat_model"

    threat_model: tuple[NamedFact, ...]

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        return cls(tuple(_describe_threat(run.settings)))

    def write_markdown(self, report: Report) -> Iterator[str]:
        yield from ("## Threat model", "", *_write_facts(self.threat_model), "")


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
class Costs(Section):
    """What each attack took."""

    name = "cost"
    title = heading = "Cost"
    template = "{{ table }}"

    costs: tuple[CostLine, ...]

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        return cls(tuple(_add_costs(run)))

    def prepare(self, report: Report) -> Mapping[str, Any]:
        names = ("cells", "examples", "time", "time an example", "steps", "peak memory")
        columns = [Column("attack"), *number_columns(*names)]
        return {"table": draw_html_table(columns, [_list_cost(cost) for cost in self.costs])}

    def write_markdown(self, report: Report) -> Iterator[str]:
        head = ["attack", "cells", "examples", "time", "steps"]
        rows = []
        for cost in self.costs:
            attack, cells, examples, time, _, steps, _ = _list_cost(cost)
            rows.append([attack, cells, examples, time, steps])
        yield from (f"## {self.heading}", "", *draw_markdown_table(head, rows))


@dataclass(frozen=True)
class Provenance(Section):
    """Where the numbers come from."""

    name = "provenance"
    title = heading = "Provenance"
    template = FACTS % "provenance"

    provenance: tuple[NamedFact, ...]

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        return cls(tuple(_describe_provenance(run.summaries)))

    def write_markdown(self, report: Report) -> Iterator[str]:
        yield from (f"## {self.heading}", "", *_write_facts(self.provenance), "")


@dataclass(frozen=True)
class Reproduction(Section):
    """A study that gives the records of the setting that leaks most again."""

    name = "reproduce"
    title = "Reproduce"
    heading = "How to reproduce"
    template = """
<p>Save this as <code>again.yaml</code>: the setting that leaks most, with every choice written out.
  The same versions on the same kind of machine give the same records.</p>
<pre><code>gradleak run again.yaml --out runs</code></pre>
<details><summary>again.yaml</summary><pre><code>{{ section.reproduce }}</code></pre></details>
"""

    reproduce: str  # a study of the setting that leaks most

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        return cls(_write_study(run.settings[0]))

    def write_markdown(self, report: Report) -> Iterator[str]:
        yield from (f"## {self.heading}", "", "`gradleak run again.yaml`, with again.yaml:", "")
        yield from ("```yaml", self.reproduce, "```")


def _write_facts(facts: Iterable[NamedFact]) -> Iterator[str]:
    return (f"- {fact.name}: {fact.value}" for fact in facts)


def _describe_threat(settings: Sequence[Setting]) -> list[NamedFact]:
    records = [setting.record for setting in settings]
    guarantees = _join_distinct(proven for record in records for proven in write_guarantees(record))
    noise = _join_distinct(size for one in records if (size := describe_noise(one)) is not None)
    priors = (one.record.spec.get("prior") for setting in settings for one in setting.summaries)
    granted = {str(fact) for record in records for fact in record.spec.get("know", ())}
    if all(leading_metric(record.worst_case) in OF_PICTURES for record in records):
        granted -= {"lengths"}  # of texts
    views = _join_fields(records, "view")
    return [
        NamedFact(
            "who",
            "An honest but curious server, or who reads what it receives: it has the model and "
            "each client's update.",
        ),
        NamedFact("sees", f"{views}: {_write_share_seen(records)} of the parameters"),
        NamedFact("may be told", list_facts(sorted(granted)) or "nothing beyond the update"),
        NamedFact("protocol", _join_fields(records, "protocol")),
        NamedFact(
            "defenses",
            _join_distinct(write_chain(record.spec.get("defenses")) for record in records),
        ),
        NamedFact("differential privacy", guarantees or "none of these defenses proves any"),
        *([NamedFact("noise", noise)] if noise else []),
        NamedFact("believes beforehand", _join_distinct(map(write_component, priors))),
        NamedFact(
            "examples a batch",
            _join_distinct(str(record.spec.get("batch_size", "-")) for record in records),
        ),
    ]


def _write_share_seen(records: Sequence[Record]) -> str:
    targets = [record.target for record in records]
    shares = sorted({one.visible_parameters / max(1, one.parameters) for one in targets})
    if len(shares) == 1:
        return f"{100 * shares[0]:.3g} %"
    return f"{100 * shares[0]:.3g} to {100 * shares[-1]:.3g} %"


def _add_costs(run: JudgedRun) -> list[CostLine]:
    found: dict[str, CostLine] = {}
    for ran in (ran for setting in run.settings for ran in setting.attacks):
        name, cost = run.labels.attack(ran.attack.spec), ran.attack.cost
        before = found.get(name, CostLine(name, 0, 0, 0.0, 0, None))
        peaks = (before.peak_memory_bytes, cost.peak_memory_bytes)
        found[name] = CostLine(
            name,
            before.records + 1,
            before.examples + len(ran.columns.batches),
            before.seconds + cost.seconds,
            before.steps + cost.steps,
            max((peak for peak in peaks if peak is not None), default=None),
        )
    return list(found.values())


def _list_cost(cost: CostLine) -> list[str]:
    peak = cost.peak_memory_bytes
    return [
        *(cost.attack, str(cost.records), str(cost.examples), write_duration(cost.seconds)),
        write_duration(cost.seconds / cost.examples) if cost.examples else "–",
        str(cost.steps),
        f"{peak / 2**30:.1f} GiB" if peak else "–",
    ]


def _write_time(created: str) -> str:
    """Writes 2026-03-01T10:20:30+00:00 as a person does: records have the time of UTC."""
    return f"{created[:16].replace('T', ' ')} UTC"


def _describe_provenance(summaries: Sequence[Summary]) -> list[NamedFact]:
    records = [summary.record for summary in summaries]
    times = sorted(record.created for record in records)
    targets = (f"{one.target.name} (fingerprint {one.target.fingerprint[:16]})" for one in records)
    machines = [record.machine for record in records]
    devices = (f"{one.get('device', '-')} ({one.get('name', '-')})" for one in machines)
    seeds = (str(record.spec.get("seed", "-")) for record in records)
    return [
        NamedFact("audited", " to ".join(dict.fromkeys(map(_write_time, (times[0], times[-1]))))),
        NamedFact("target", _join_distinct(targets)),
        *_enter_where_known("model", (record.target.model for record in records)),
        NamedFact("data", _join_fields(records, "data")),
        *_enter_where_known("how it was read", (" ".join(one.data.remarks) for one in records)),
        NamedFact("data hash (keyed)", _join_distinct(record.data.hash[:16] for record in records)),
        NamedFact("seeds", _join_distinct(seeds)),
        NamedFact("versions", _list_versions(records)),
        NamedFact("machines", _join_distinct(devices)),
        NamedFact("records", _join_distinct(summary.id for summary in summaries)),
    ]


def _list_versions(records: Sequence[Record]) -> str:
    found: dict[str, dict[str, None]] = {name: {} for record in records for name in record.versions}
    for record in records:
        for name, version in record.versions.items():
            found[name][version] = None
    return ", ".join(f"{name} {' and '.join(versions)}" for name, versions in found.items())


def _enter_where_known(name: str, texts: Iterable[str]) -> list[NamedFact]:
    """Makes an entry of what some records say and others, or older ones, do not."""
    known = [text for text in texts if text]
    return [NamedFact(name, _join_distinct(known))] if known else []


def _join_fields(records: Sequence[Record], field: str) -> str:
    return _join_distinct(write_component(record.spec.get(field)) for record in records)


def _join_distinct(texts: Iterable[str]) -> str:
    """Joins texts, each once; of very many the first."""
    found = list(dict.fromkeys(texts))
    rest = f" and {len(found) - NAMES} more" if len(found) > NAMES else ""
    return "; ".join(found[:NAMES]) + rest


def _write_study(setting: Setting) -> str:
    """Writes a study that gives the records of a setting again; JSON is YAML."""
    specs = [_fit_into_study(summary.record.spec) for summary in setting.summaries[:NAMES]]
    alike = {
        field: value
        for field, value in specs[0].items()
        if all(spec.get(field) == value for spec in specs)
    }
    lines = [f"{field}: {json.dumps(value, ensure_ascii=False)}" for field, value in alike.items()]
    if len(specs) > 1:
        lines.append("cases:")
        for place, spec in enumerate(specs, start=1):
            other = {field: value for field, value in spec.items() if field not in alike}
            lines.append(f"  case {place}: {json.dumps(other, ensure_ascii=False)}")
    return "\n".join(lines)


def _fit_into_study(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {**spec, "attacks": [spec["attacks"]]}  # a flat list would be an axis
