"""How components are written, and short names that tell those of one run apart."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradleak.records.schema import Record

FIELDS = (
    "target",
    "data",
    "protocol",
    "view",
    "defenses",
    "batch_size",
    "limit",
    "draws",
    "seed",
    "dtype",
)
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)")
NO_DEFENSE = "no defense"


def write_component(component: Any) -> str:
    """Writes a component of a spec as the command line has it, without the fields that are off."""
    if not isinstance(component, dict):
        return _write_value(component if component is not None else "-")
    fields = [
        f"{key}={_write_value(value)}"
        for key, value in component.items()
        # No number is off: noise of 0 must not read as the usual noise
        if key != "name" and not (value is None or value is False or value in ([], ""))
    ]
    return str(component.get("name", "-")) + (":" + ",".join(fields) if fields else "")


def _write_value(value: Any) -> str:
    """Writes a field's value: `[query,key]`, `true`, or a component within a component."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_write_value, value))}]"
    if isinstance(value, dict):
        return write_component(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_chain(components: Any, between: str = " + ") -> str:
    """Writes several components on one line."""
    return between.join(write_component(one) for one in components or ()) or "none"


def write_defenses(components: Any) -> str:
    """Writes a chain of defenses, or that there is none."""
    return write_chain(components) if components else NO_DEFENSE


class Labels:
    """Names that tell the components of one run apart."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._attacks = _find_varying(
            attack.spec for record in records for attack in record.attacks.values()
        )
        self._defenses = _find_varying(
            defense for record in records for defense in record.spec.get("defenses", ())
        )
        self.fields = [
            field
            for field in FIELDS
            if len({make_key(record.spec.get(field)) for record in records}) > 1
        ]

    def attack(self, spec: Mapping[str, Any]) -> str:
        """Names an attack: `lamp_cos`, or `lamp_cos:steps=40` where another has other steps."""
        return _name_component(spec, self._attacks)

    def defense(self, record: Record) -> str:
        """Names the chain of defenses; one that stands alone has all its strength in its name."""
        names = (
            _name_component(one, self._defenses)
            if self._defenses.get(one["name"])
            else write_component(one)
            for one in record.spec.get("defenses") or ()
        )
        return " + ".join(names) or NO_DEFENSE

    def setting(self, record: Record, but: Sequence[str] = ()) -> str:
        """Names what tells this setting from the others, `but` some fields.

        Where there is one setting only, what was audited is named.
        """
        told = [self._value(record, field) for field in self.fields if field not in but]
        audited = [record.target.name, write_component(record.spec.get("data"))]
        return ", ".join(told or (audited if but else [*audited, self.defense(record)]))

    def _value(self, record: Record, field: str) -> str:
        if field == "defenses":
            return self.defense(record)
        value = record.spec.get(field)
        if not isinstance(value, dict):
            return f"{field.replace('_', ' ')} {write_component(value)}"
        if field == "data" and value.get("name") == "client_texts":
            clients = list(map(str, value["clients"]))
            many = f"{len(clients)} clients" if len(clients) > 3 else f"client {', '.join(clients)}"
            return f"round {value['round']}, {many}"
        return write_component(value)


def rank_naturally(label: str) -> list[tuple[bool, float, str]]:
    """Ranks names as people do: no defense first, 0.01 before 0.1, 2 before 10."""
    if label == NO_DEFENSE:
        return [(False, 0.0, "")]
    return [
        (True, float(part), "") if NUMBER.fullmatch(part) else (False, 0.0, part)
        for part in filter(None, NUMBER.split(label))
    ]


def _find_varying(specs: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Finds, by the name of a component, the fields in which its uses differ."""
    by_name: dict[str, dict[str, Mapping[str, Any]]] = {}
    for spec in specs:
        by_name.setdefault(str(spec.get("name")), {})[make_key(spec)] = spec
    return {
        name: [
            field
            for field in next(iter(uses.values()))
            if len({make_key(use.get(field)) for use in uses.values()}) > 1
        ]
        for name, uses in by_name.items()
    }


def _name_component(spec: Mapping[str, Any], varying: Mapping[str, list[str]]) -> str:
    name = str(spec.get("name", "?"))
    fields = (f"{field}={write_component(spec.get(field))}" for field in varying.get(name, ()))
    return ":".join(filter(None, (name, ",".join(fields))))


def make_key(value: Any) -> str:
    """Makes a text that tells values apart; plain ones are most of them."""
    return (
        repr(value) if isinstance(value, (str, int, float)) else json.dumps(value, sort_keys=True)
    )
