"""The cells of a study and the records that answer them, for results that can be published."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradleak.records.schema import AttackRecord, Record
from gradleak.records.summary import Summary

# A record may differ from the cell it answers in the number of examples and in the weights, since
# these stand beside every number.
WEIGHTS = ("path", "revision", "weights")
MUST_AGREE = (
    "data",
    "batch_size",
    "protocol",
    "defenses",
    "view",
    "know",
    "prior",
    "draws",
    "seed",
    "dtype",
    "time_limit",
)


@dataclass(frozen=True)
class StudyCell:
    """A cell of a study: where it lies on the axes, and its spec as plain values."""

    axes: Mapping[str, str]
    spec: Mapping[str, Any]
    defaults: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # of the target and the attacks, by name
    versions: Mapping[str, int] = field(
        default_factory=dict
    )  # of the attacks as they are now, by name


@dataclass(frozen=True)
class Answer:
    """One attack of a record that answers a cell."""

    source: Summary
    key: str
    is_older: bool = False  # there is a newer version of the attack

    @property
    def record(self) -> Record:
        return self.source.record

    @property
    def attack(self) -> AttackRecord:
        return self.record.attacks[self.key]


@dataclass(frozen=True)
class Answered:
    """A cell with its answers, one an attack and model; none where it was not run."""

    cell: StudyCell
    answers: Sequence[Answer]

    def attack(self, found: Answer | None = None) -> str:
        """Names the attack as the study does, or as the record where a cell has several.

        An older version says so.
        """
        names = [str(attack["name"]) for attack in self.cell.spec["attacks"]]
        several = found.key if found is not None else " + ".join(names)
        written = self.cell.axes.get("attacks", names[0]) if len(names) == 1 else several
        return (
            f"{written} (version {found.attack.version})"
            if found is not None and found.is_older
            else written
        )


def find_answers(cells: Sequence[StudyCell], summaries: Sequence[Summary]) -> list[Answered]:
    """Finds the records that answer each cell of a study.

    Of several records for one model and version the one with most examples is taken.
    """
    exact: dict[str, list[Summary]] = {}
    for summary in summaries:
        exact.setdefault(_make_key(summary.record.spec), []).append(summary)
    keys = [_make_key(cell.spec) for cell in cells]
    # What fits no cell to the letter may be of an earlier version. Few are, so that all of them are
    # compared with every cell.
    planned = set(keys)
    rest = [summary for key, found in exact.items() if key not in planned for summary in found]
    return [
        Answered(cell, list(_choose_best(cell, [*exact.get(key, ()), *rest])))
        for cell, key in zip(cells, keys, strict=True)
    ]


def write_command(study: Sequence[str], cell: StudyCell, record: Record | None = None) -> str:
    """Writes the command that runs this one cell.

    For a record it has the number of batches and the model, where these are not the study's own.
    `study` is the path of the YAML and the options that change it.
    """
    words = ["gradleak", "run", *study]
    if record is None:
        for axis, value in cell.axes.items():
            words += ["--only", f"{axis}={value}"]
        return " ".join(shlex.quote(word) for word in words)
    if record.spec["limit"] != cell.spec["limit"]:
        words += ["--set", f"limit={record.spec['limit']}"]
    if not values_agree(cell.spec["target"], record.spec["target"]):
        words += ["--set", f"target={_describe_change(cell.spec['target'], record.spec['target'])}"]
    return " ".join(shlex.quote(word) for word in words)


def values_agree(one: Any, other: Any) -> bool:
    """Whether two values agree in all that both have.

    A field that came later is at its default in older records.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.get("name") == other.get("name") and all(
            values_agree(one[key], other[key]) for key in one.keys() & other.keys()
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(values_agree, one, other))
    return bool(one == other)


def _choose_best(cell: StudyCell, summaries: Sequence[Summary]) -> Iterator[Answer]:
    fit = [summary for summary in summaries if _fits(cell, summary.record.spec)]
    for wanted in cell.spec["attacks"]:
        by_model: dict[str, dict[int, list[Answer]]] = {}
        for summary in fit:
            for key, attack in summary.record.attacks.items():
                if _components_agree(cell, wanted, attack.spec):
                    versions = by_model.setdefault(summary.record.target.fingerprint, {})
                    versions.setdefault(attack.version, []).append(Answer(summary, key))
        for versions in by_model.values():
            for version in sorted(versions, reverse=True):
                best = max(
                    versions[version],
                    key=lambda one: (one.record.data.examples, one.record.created),
                )
                yield replace(
                    best,
                    is_older=version < max(*versions, cell.versions.get(str(wanted["name"]), 0)),
                )


def _make_key(spec: Mapping[str, Any]) -> str:
    return json.dumps([spec.get(field) for field in (*MUST_AGREE, "attacks")], sort_keys=True)


def _fits(cell: StudyCell, spec: Mapping[str, Any]) -> bool:
    target = {key: value for key, value in cell.spec["target"].items() if key not in WEIGHTS}
    return _components_agree(cell, target, spec["target"]) and all(
        values_agree(cell.spec[name], spec[name])
        for name in MUST_AGREE
        if name in cell.spec and name in spec
    )


def _components_agree(cell: StudyCell, planned: Mapping[str, Any], ran: Mapping[str, Any]) -> bool:
    """Whether they agree, and what the older one lacks is at its default in the newer."""
    usual = cell.defaults.get(str(planned["name"]), {})
    return values_agree(planned, ran) and all(
        planned[key] == usual.get(key) for key in planned.keys() - ran.keys()
    )


def _describe_change(planned: Mapping[str, Any], ran: Mapping[str, Any]) -> str:
    """Writes the model on one line: what differs from the study's, or all that is set.

    Of a path its end is written: the rest is a machine's.
    """
    alike = planned["name"] == ran["name"]
    fields = {
        key: value
        for key, value in ran.items()
        if key != "name" and not (alike and values_agree(planned.get(key), value))
    }
    if "path" in fields:
        return (
            str(fields["path"])
            if not str(fields["path"]).startswith("/")
            else "…/" + str(fields["path"]).rsplit("/", 1)[-1]
        )
    written = ",".join(f"{key}={value}" for key, value in fields.items())
    return str(ran["name"]) + (f":{written}" if written else "")
