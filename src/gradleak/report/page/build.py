"""Records of a run put together into a report."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradleak.records.errors import RecordError
from gradleak.records.judgement import Judgement, judge_setting, judge_summary, raised_beside
from gradleak.records.plain import from_plain
from gradleak.records.run_folder import Run, read_run
from gradleak.records.schema import now
from gradleak.records.settings import Setting, settings_of
from gradleak.records.summary import Summary
from gradleak.report.labels import Labels, natural
from gradleak.report.page.attack_heat import attack_heat
from gradleak.report.page.gallery import SecretsOf, gallery
from gradleak.report.page.opening import flag_lines, order, verdict
from gradleak.report.page.searches import traces
from gradleak.report.page.section import CostLine, Entry, Report, SettingLine
from gradleak.report.page.story import in_words, tell
from gradleak.report.pictures.heat_map import HeatMap
from gradleak.report.pictures.tradeoff_chart import Tradeoff
from gradleak.report.privacy import guarantee_lines, noise_size
from gradleak.report.terminal.record_screen import chain, line

ROWS = 100  # settings listed; each may need an interval of its own
NAMES = 20  # records named


def build_report(run: Path, secrets_of: SecretsOf, *, show_secrets: bool = False) -> Report:
    """The report of a record or of a folder of records; private texts are in it only with `show_secrets`."""
    found = readable(run)
    summaries = found.summaries
    records = [summary.record for summary in summaries]
    labels = Labels(records)
    judged = {setting: judge_setting(setting) for setting in settings_of(summaries)}
    settings = order(judged)
    in_order = sorted(settings, key=lambda setting: natural(labels.setting(setting.record)))
    folder = run if run.is_dir() else run.parent
    by_id = {summary.id: summary for summary in summaries if summary.path.parent == folder}
    return Report(
        created=now(),
        title=run.resolve().name.removesuffix(".json"),
        metric=judged[settings[0]].metric,
        redacted=not show_secrets,
        records=len(records),
        settings_run=len(settings),
        settings_leaking=sum(judged[setting].leaks for setting in settings),
        story=tell(settings, judged, labels),
        verdict=verdict(settings, judged, found.coverage, labels),
        settings=tuple(_setting_line(setting, judged[setting], labels) for setting in settings[:ROWS]),
        heat=attack_heat(in_order, labels),
        tradeoff=_tradeoff(run, folder, by_id),
        leak_map=_leak_map(run, folder, by_id),
        traces=tuple(traces(settings, labels, secrets_of)),
        gallery=tuple(gallery(in_order, labels, secrets_of, show_secrets)),
        costs=tuple(_costs(settings, labels)),
        threat_model=tuple(threat_model(settings)),
        provenance=tuple(provenance(summaries)),
        coverage=found.coverage,
        reproduce=reproduce(settings[0]),
    )


def readable(run: Path) -> Run:
    """What is there to be reported; where nothing is, the reason."""
    found = read_run(run)
    if found.summaries:
        return found
    if found.coverage.gaps:
        raise RecordError(f"{run} holds no record that can be read. {found.coverage.gaps[0].why}")
    raise RecordError(f"{run} holds no records. Name the folder that an audit or a study wrote its records into.")


def _setting_line(setting: Setting, judgement: Judgement, labels: Labels) -> SettingLine:
    record = setting.record
    return SettingLine(
        label=labels.setting(record),
        records=tuple(summary.id for summary in setting.summaries),
        attacks=tuple(labels.attack(ran.attack.spec) for ran in setting.attacks),
        metric=judgement.metric,
        score=setting.worst(judgement.metric),
        exact=setting.worst("exact_match") if "exact_match" in setting.metrics() else None,
        verdict=judgement.verdict,
        leaks=judgement.leaks,
        flags=tuple(
            dict.fromkeys(name for one in setting.summaries for name in raised_beside(judgement, one.record, one.columns))
        ),
        doubts=tuple(flag_lines([setting], {setting: judgement}, labels)),
    )


def _beside(run: Path, folder: Path, name: str, wanted: Any) -> Any:
    """The trade-off or map that lies beside the records of a folder, if one does."""
    path = folder / name
    if not run.is_dir() or not path.is_file():
        return None
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{path} is not a whole JSON file. Make it again, or delete it to have a report without it.") from error
    return from_plain(wanted, plain, name)


def _tradeoff(run: Path, folder: Path, summaries: Mapping[str, Summary]) -> Tradeoff | None:
    """The trade-off as its file has it, each setting judged by its record as it is now."""
    found: Tradeoff | None = _beside(run, folder, "tradeoff.json", Tradeoff)
    if found is None:
        return None
    judged = {one.audit: judge_summary(summaries[one.audit]) for one in found.points if one.audit in summaries}
    return replace(found, points=tuple(replace(one, judgement=judged.get(one.audit, one.judgement)) for one in found.points))


def _leak_map(run: Path, folder: Path, summaries: Mapping[str, Summary]) -> HeatMap | None:
    found: HeatMap | None = _beside(run, folder, "map.json", HeatMap)
    if found is None:
        return None
    judged = {one.record: judge_summary(summaries[one.record]) for one in found.cells if one.record in summaries}
    return replace(found, cells=tuple(replace(one, judgement=judged.get(one.record, one.judgement)) for one in found.cells))


def _costs(settings: Sequence[Setting], labels: Labels) -> list[CostLine]:
    found: dict[str, CostLine] = {}
    for ran in (ran for setting in settings for ran in setting.attacks):
        name, cost = labels.attack(ran.attack.spec), ran.attack.cost
        before = found.get(name, CostLine(name, 0, 0, 0.0, 0, None))
        memory = [value for value in (before.peak_memory_bytes, cost.peak_memory_bytes) if value is not None]
        found[name] = CostLine(
            name,
            before.records + 1,
            before.examples + len(ran.columns.batches),
            before.seconds + cost.seconds,
            before.steps + cost.steps,
            max(memory, default=None),
        )
    return list(found.values())


def threat_model(settings: Sequence[Setting]) -> list[Entry]:
    """Who attacks, what is seen, what is told, what clients do."""
    records = [setting.record for setting in settings]
    share = sorted({record.target.visible_parameters / max(1, record.target.parameters) for record in records})
    seen = f"{100 * share[0]:.3g} %" if len(share) == 1 else f"{100 * share[0]:.3g} to {100 * share[-1]:.3g} %"
    granted = {str(fact) for record in records for fact in record.spec.get("know", ())}
    guarantees = _distinct(told for record in records for told in guarantee_lines(record))
    noise = _distinct(told for record in records if (told := noise_size(record)) is not None)
    return [
        Entry("who", "An honest but curious server, or who reads what it receives: it has the model and each client's update."),
        Entry("sees", f"{_distinct(line(record.spec.get('view')) for record in records)}: {seen} of the parameters"),
        Entry("may be told", in_words(sorted(granted)) or "nothing beyond the update"),
        Entry("protocol", _distinct(line(record.spec.get("protocol")) for record in records)),
        Entry("defenses", _distinct(chain(record.spec.get("defenses")) for record in records)),
        Entry("differential privacy", guarantees or "none of these defenses proves any"),
        *([Entry("noise", noise)] if noise else []),
        Entry("believes beforehand", _distinct(line(one.record.spec.get("prior")) for s in settings for one in s.summaries)),
        Entry("examples a batch", _distinct(str(record.spec.get("batch_size", "-")) for record in records)),
    ]


def provenance(summaries: Sequence[Summary]) -> list[Entry]:
    """Where the numbers come from."""
    records = [summary.record for summary in summaries]
    times = sorted(record.created for record in records)
    versions: Mapping[str, dict[str, None]] = {name: {} for record in records for name in record.versions}
    for record in records:
        for name, version in record.versions.items():
            versions[name][version] = None
    return [
        Entry("audited", times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"),
        Entry("target", _distinct(f"{record.target.name} (fingerprint {record.target.fingerprint[:16]})" for record in records)),
        *_if_told("model", (record.target.model for record in records)),
        Entry("data", _distinct(line(record.spec.get("data")) for record in records)),
        *_if_told("how it was read", (" ".join(record.data.remarks) for record in records)),
        Entry("data hash (keyed)", _distinct(record.data.hash[:16] for record in records)),
        Entry("seeds", _distinct(str(record.spec.get("seed", "-")) for record in records)),
        Entry("versions", ", ".join(f"{name} {' and '.join(found)}" for name, found in versions.items())),
        Entry("machines", _distinct(f"{one.machine.get('device', '-')} ({one.machine.get('name', '-')})" for one in records)),
        Entry("records", _distinct(summary.id for summary in summaries)),
    ]


def _if_told(name: str, texts: Iterable[str]) -> list[Entry]:
    """An entry of what some records say and others, or older ones, do not."""
    told = [text for text in texts if text]
    return [Entry(name, _distinct(told))] if told else []


def _distinct(texts: Any) -> str:
    """Each once; of very many the first."""
    found = list(dict.fromkeys(texts))
    rest = f" and {len(found) - NAMES} more" if len(found) > NAMES else ""
    return "; ".join(found[:NAMES]) + rest


def reproduce(setting: Setting) -> str:
    """A study that gives the records of a setting again; JSON is YAML."""
    specs = [_as_study(summary.record.spec) for summary in setting.summaries[:NAMES]]
    alike = {field: value for field, value in specs[0].items() if all(spec.get(field) == value for spec in specs)}
    lines = [f"{field}: {json.dumps(value, ensure_ascii=False)}" for field, value in alike.items()]
    if len(specs) > 1:
        lines.append("cases:")
        for place, spec in enumerate(specs, start=1):
            other = {field: value for field, value in spec.items() if field not in alike}
            lines.append(f"  case {place}: {json.dumps(other, ensure_ascii=False)}")
    return "\n".join(lines)


def _as_study(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {**spec, "attacks": [spec["attacks"]]}  # a flat list would be an axis
