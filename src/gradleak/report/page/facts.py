"""Facts around the numbers: who attacks, what it cost, where they come from, how to repeat them,
and what the words mean that a reader may not know."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

from markupsafe import Markup

from gradleak.records.flags import FLAGS
from gradleak.records.judgement import OF_PICTURES, RULES, leading_metric
from gradleak.records.schema import Record
from gradleak.records.settings import Ran
from gradleak.report.naming import write_chain, write_component
from gradleak.report.numbers import write_duration
from gradleak.report.page.opening import Opening, SettingList
from gradleak.report.page.section import JudgedRun, Report, Section
from gradleak.report.page.story import list_facts
from gradleak.report.table_markup import (
    Column,
    draw_html_table,
    draw_markdown_table,
    number_columns,
)
from gradleak.report.verdict import describe_noise, write_guarantees

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
        records = [setting.record for setting in run.settings]
        guarantees = (proven for record in records for proven in write_guarantees(record))
        summaries = chain.from_iterable(setting.summaries for setting in run.settings)
        priors = (one.record.spec.get("prior") for one in summaries)
        granted = {str(fact) for record in records for fact in record.spec.get("know", ())}
        if all(leading_metric(record.worst_case) in OF_PICTURES for record in records):
            granted -= {"lengths"}  # of texts
        seen = f"{_join_fields(records, 'view')}: {_write_share_seen(records)} of the parameters"
        defenses = (write_chain(record.spec.get("defenses")) for record in records)
        sizes = (str(record.spec.get("batch_size", "-")) for record in records)
        facts = {
            "who": "An honest but curious server, or who reads what it receives: it has the model"
            " and each client's update.",
            "sees": seen,
            "may be told": list_facts(sorted(granted)) or "nothing beyond the update",
            "protocol": _join_fields(records, "protocol"),
            "defenses": _join_distinct(defenses),
            "differential privacy": _join_distinct(guarantees)
            or "none of these defenses proves any",
            "noise": _join_distinct(filter(None, map(describe_noise, records))) or None,
            "believes beforehand": _join_distinct(map(write_component, priors)),
            "examples a batch": _join_distinct(sizes),
        }
        return cls(_list_known(facts))

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
        groups: dict[str, list[Ran]] = {}
        for ran in (ran for setting in run.settings for ran in setting.attacks):
            groups.setdefault(run.labels.attack(ran.attack.spec), []).append(ran)
        return cls(tuple(_add_up(name, group) for name, group in groups.items()))

    def prepare(self, report: Report) -> Mapping[str, Any]:
        columns = [
            Column("attack"),
            *number_columns("cells", "examples", "time", "time an example", "steps", "peak memory"),
        ]
        return {"table": draw_html_table(columns, [_list_cost(cost) for cost in self.costs])}

    def write_markdown(self, report: Report) -> Iterator[str]:
        head = ["attack", "cells", "examples", "time", "steps"]
        rows = [[*cells[:4], cells[5]] for cells in map(_list_cost, self.costs)]
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
        records = run.records
        times = sorted(f"{one.created[:16].replace('T', ' ')} UTC" for one in records)
        targets = [record.target for record in records]
        machines = [record.machine for record in records]
        facts = {
            "audited": " to ".join(dict.fromkeys((times[0], times[-1]))),
            "target": _join_distinct(
                f"{one.name} (fingerprint {one.fingerprint[:16]})" for one in targets
            ),
            "model": _join_distinct(one.model for one in targets if one.model) or None,
            "data": _join_fields(records, "data"),
            "how it was read": _join_distinct(
                filter(None, (" ".join(one.data.remarks) for one in records))
            )
            or None,
            "data hash (keyed)": _join_distinct(record.data.hash[:16] for record in records),
            "seeds": _join_distinct(str(one.spec.get("seed", "-")) for one in records),
            "versions": _list_versions(records),
            "machines": _join_distinct(
                f"{one.get('device', '-')} ({one.get('name', '-')})" for one in machines
            ),
            "records": _join_distinct(summary.id for summary in run.summaries),
        }
        return cls(_list_known(facts))

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
        specs = [
            # A flat list of attacks would be an axis
            {**one.record.spec, "attacks": [one.record.spec["attacks"]]}
            for one in run.settings[0].summaries[:NAMES]
        ]
        alike = [
            field
            for field, value in specs[0].items()
            if all(spec.get(field) == value for spec in specs)
        ]
        lines = [f"{field}: {_write_yaml(specs[0][field])}" for field in alike]
        if len(specs) > 1:
            others = [{name: spec[name] for name in spec if name not in alike} for spec in specs]
            cases = (f"  case {at}: {_write_yaml(one)}" for at, one in enumerate(others, 1))
            lines += ["cases:", *cases]
        return cls("\n".join(lines))

    def write_markdown(self, report: Report) -> Iterator[str]:
        yield from (f"## {self.heading}", "", "`gradleak run again.yaml`, with again.yaml:", "")
        yield from ("```yaml", self.reproduce, "```")


def _write_facts(facts: Iterable[NamedFact]) -> Iterator[str]:
    return (f"- {fact.name}: {fact.value}" for fact in facts)


def _write_share_seen(records: Sequence[Record]) -> str:
    targets = [record.target for record in records]
    shares = [100 * one.visible_parameters / max(1, one.parameters) for one in targets]
    ends = dict.fromkeys((min(shares), max(shares)))
    return f"{' to '.join(f'{share:.3g}' for share in ends)} %"


def _add_up(attack: str, group: Sequence[Ran]) -> CostLine:
    costs = [ran.attack.cost for ran in group]
    peaks = (one.peak_memory_bytes for one in costs if one.peak_memory_bytes is not None)
    return CostLine(
        attack=attack,
        records=len(group),
        examples=sum(len(ran.columns.batches) for ran in group),
        seconds=sum(one.seconds for one in costs),
        steps=sum(one.steps for one in costs),
        peak_memory_bytes=max(peaks, default=None),
    )


def _list_cost(cost: CostLine) -> list[str]:
    peak = cost.peak_memory_bytes
    return [
        *(cost.attack, str(cost.records), str(cost.examples), write_duration(cost.seconds)),
        write_duration(cost.seconds / cost.examples) if cost.examples else "–",
        str(cost.steps),
        f"{peak / 2**30:.1f} GiB" if peak else "–",
    ]


def _list_versions(records: Sequence[Record]) -> str:
    pairs = dict.fromkeys(pair for record in records for pair in record.versions.items())
    found = {name: [version for same, version in pairs if same == name] for name, _ in pairs}
    return ", ".join(f"{name} {' and '.join(versions)}" for name, versions in found.items())


def _list_known(facts: Mapping[str, str | None]) -> tuple[NamedFact, ...]:
    """Leaves out what no record says."""
    return tuple(NamedFact(name, value) for name, value in facts.items() if value is not None)


def _join_fields(records: Sequence[Record], field: str) -> str:
    return _join_distinct(write_component(record.spec.get(field)) for record in records)


def _join_distinct(texts: Iterable[str]) -> str:
    """Joins texts, each once; of very many the first."""
    found = list(dict.fromkeys(texts))
    rest = f" and {len(found) - NAMES} more" if len(found) > NAMES else ""
    return "; ".join(found[:NAMES]) + rest


def _write_yaml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # JSON is YAML


WORDS = {
    "update": (
        "What a client sends instead of its data: how its examples would change the model. "
        "This is what is attacked."
    ),
    "blind guess": (
        "A guess with the same knowledge, without the update. What an attack gets "
        "beyond it, the update gave away."
    ),
    "gain": "How much more was rebuilt than by a blind guess.",
    "worst case": (
        "For every example the attack that got most out of it. A defense has to "
        "withstand that. Over several attacks it stands beside the best of as many blind guesses."
    ),
    "interval": (
        "Where the true mean lies with 95 % confidence, by how client batches differ. "
        "Few batches make it wide."
    ),
    "setting": (
        "One kind of client: its model, data, protocol and defenses. All attacks on it "
        "count together."
    ),
    "word for word": "The guess has the very words of the private text, in their order.",
    "proven": (
        "The guess gives back the whole update, up to rounding, and nothing near it does: "
        "the attacker knows it is right."
    ),
    **{word: f"{rule[0].upper()}{rule[1:]}." for word, rule in RULES.items()},
    "flag": "A reason to doubt a number, raised by a rule and not by opinion.",
    "client batch": (
        "The examples of one client that went into one update. Intervals treat each "
        "batch as one draw."
    ),
}
METRICS = {
    "rouge1": "The share of words that guess and private text have in common, in any order.",
    "rouge2": "The share of neighbouring pairs of words that both have.",
    "rougeL": "The longest run of words in the same order, as a share.",
    "exact_match": "Whether the guess is the private text word for word.",
    "token_accuracy": "The share of places at which the guess has the right piece of a word.",
    "bag_f1": "The share of pieces of words that both have, in any order.",
    "secret_recall": "The share of marked secrets (a PIN, a name) that the guess holds whole.",
    "secret_edit_distance": (
        "The share of letters to change to get from the guess to a marked secret: less leaks more."
    ),
    "semantic_similarity": "How alike the meanings of guess and text are, by a sentence encoder.",
    "mse": "The mean squared difference of pixels: less is more leak.",
    "psnr": "The same on a scale of decibels: more is more leak.",
    "ssim": "How alike local patterns of light and dark are: 1 is the same picture.",
    "lpips": (
        "How different two pictures look to a network trained on what people see: less is "
        "more leak."
    ),
}


@dataclass(frozen=True)
class Glossary(Section):
    """The words that this report uses, in the order of the alphabet; on the page alone."""

    name = "glossary"
    title = heading = "Words"
    template = """
<dl class="facts">
  {%- for word, meaning in glossary.meanings.items() -%}
  <dt id="{{ glossary.address(word) }}">{{ word }}</dt><dd>{{ meaning }}</dd>
  {%- endfor -%}
</dl>
"""

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        return cls()

    def prepare(self, report: Report) -> Mapping[str, Any]:
        return {"glossary": WordLinks(explain_words(report))}


@dataclass(frozen=True)
class WordLinks:
    """Links from words of a page to what they mean."""

    meanings: Mapping[str, str]

    def address(self, word: str) -> str:
        """Returns the place of a word in the glossary."""
        return f"word-{word.replace(' ', '-')}"

    def link(self, word: str, shown: str | None = None) -> Markup:
        """Links a word of the glossary, written otherwise where asked."""
        return Markup('<a class="term" href="#{}" title="{}">{}</a>').format(
            self.address(word), self.meanings.get(word, ""), shown or word
        )

    def link_if_known(self, word: str) -> Markup | str:
        """Links a word where the glossary has it, and leaves others as they are."""
        return self.link(word) if word in self.meanings else word


def explain_words(report: Report) -> dict[str, str]:
    """Explains the words that this report uses, in the order of the alphabet."""
    verdict = report.find(Opening).verdict
    metrics = {report.metric, *report.find(SettingList).metrics}
    metrics |= {one.metric for one in verdict.scores}
    raised = [FLAGS[flag.name] for flag in verdict.flags if flag.name in FLAGS]
    found = {
        **WORDS,
        **{name: METRICS[name] for name in metrics if name in METRICS},
        **{flag.name: f"{flag.meaning} {flag.what_to_do}" for flag in raised},
    }
    if report.metric in OF_PICTURES:
        found.pop("word for word")
    return dict(sorted(found.items(), key=lambda entry: entry[0].lower()))
