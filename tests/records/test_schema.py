"""Laws of the record's JSON."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from gradleak.records.files import RecordError
from gradleak.records.schema import SCHEMA, Record, now, spec_id


def test_what_is_written_is_read_back(record: Record) -> None:
    assert Record.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False))) == record


def test_the_json_has_the_published_keys(record: Record) -> None:
    plain = record.to_json()
    keys = (
        "schema id created spec versions machine data target secrets attacks worst_case flags"
        " findings guarantees noise bounds"
    )
    assert list(plain) == keys.split() and plain["schema"] == SCHEMA
    attack = plain["attacks"]["lamp_cos"]
    keys = "spec scores examples batches knowledge flags cost stages label_accuracy version"
    assert list(attack) == keys.split()
    score_keys = "mean low high blind blind_low blind_high unit direction n blind_guesses"
    assert list(attack["scores"]["rouge1"]) == score_keys.split()
    assert attack["batches"][0]["losses"] == [[1, 0.5], [2, None]] and attack["batches"][0][
        "guesses"
    ] == [[2, ["a cat"]]]


def test_private_text_appears_only_when_kept(record: Record) -> None:
    kept = replace(record, secrets=(replace(record.secrets[0], text="my secret"),))
    assert "text" not in record.to_json()["secrets"][0]
    assert kept.to_json()["secrets"][0]["text"] == "my secret"
    assert Record.from_json(kept.to_json()) == kept


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_written_as_null(record: Record, value: float) -> None:
    attack = record.attacks["lamp_cos"]
    batch = replace(attack.batches[0], loss=value, losses=((1, value),), seconds=value)
    broken = replace(record, attacks={"lamp_cos": replace(attack, batches=(batch,))})
    plain = json.loads(json.dumps(broken.to_json(), allow_nan=False))
    written = plain["attacks"]["lamp_cos"]["batches"][0]
    assert (written["loss"], written["losses"], written["seconds"]) == (None, [[1, None]], None)
    assert Record.from_json(plain).attacks["lamp_cos"].batches[0].loss is None


def test_the_id_is_of_the_spec_whatever_the_order_of_its_keys(record: Record) -> None:
    assert (
        spec_id({"a": 1, "b": (2, 3)})
        == spec_id({"b": [2, 3], "a": 1})
        != spec_id({"a": 1, "b": [3, 2]})
    )
    assert re.fullmatch("[0-9a-f]{16}", record.id)
    assert replace(record, created="later").id == record.id


def test_unknown_fields_of_a_later_writer_are_left_out(record: Record) -> None:
    plain = record.to_json()
    plain["target"]["colour"] = "blue"
    assert Record.from_json(plain) == record


def _broken(plain: dict[str, Any], *path: str, value: Any) -> dict[str, Any]:
    *above, last = path
    place = plain
    for key in above:
        place = place[key]
    place[last] = value
    return plain


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), "gradleak.record/9", "gradleak.record/9"),
        (("spec", "seed"), 1, "does not belong to this spec"),
        (("target", "parameters"), "many", "record.target.parameters cannot be of type str"),
        (("secrets",), {}, "record.secrets"),
        (("attacks", "lamp_cos"), {"spec": {}}, "lacks record.attacks.lamp_cos.scores"),
        (
            ("attacks", "lamp_cos", "batches"),
            [{"batch": 0, "losses": [[1, 2, 3]]}],
            "must hold 2 values",
        ),
    ],
)
def test_a_broken_record_is_refused_by_name(
    record: Record, path: tuple[str, ...], value: Any, message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        Record.from_json(_broken(record.to_json(), *path, value=value))


def test_what_is_no_mapping_is_no_record() -> None:
    with pytest.raises(RecordError, match="schema"):
        Record.from_json([])  # type: ignore[arg-type]


def test_an_object_json_cannot_hold_is_refused(record: Record) -> None:
    with pytest.raises(RecordError, match="plain values only, not set"):
        replace(record, machine={"device": {"cpu"}}).to_json()


def test_now_is_utc() -> None:
    assert now().endswith("+00:00")
