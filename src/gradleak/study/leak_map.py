"""Which module of which layer leaks most: one attack on every layer × module (Li, Xu and Dras 2024, Figures 2 to 4)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from gradleak.audit.client import private_batches, private_examples
from gradleak.audit.display import Display
from gradleak.audit.outcomes import Outcome
from gradleak.core.errors import GradleakError
from gradleak.core.specs import to_string
from gradleak.records.plain import to_plain
from gradleak.records.schema import Record
from gradleak.records.store import check_writable, open_key, write_record
from gradleak.report.heat_map import Absent, HeatMap
from gradleak.report.heat_picture import svg
from gradleak.study.files import write_whole
from gradleak.study.grid import Clock
from gradleak.study.map_attack import MapAttack
from gradleak.study.map_cells import MapCell, MapPlan, together
from gradleak.study.map_records import Scribe
from gradleak.study.map_summary import summarise

SCHEMA = "gradleak.map/1"
FILE, PICTURE = "map.json", "heat_map.svg"


def run_map(plan: MapPlan, folder: Path, device: str, display: Display) -> HeatMap:
    """Attacks the cells that have no record in the folder yet, a layer at a time; then writes map.json and heat_map.svg."""
    check_writable(folder)
    examples, key = private_examples(plan.base), open_key(folder)
    display.say(f"Opening {to_string(plan.base.target)} on {device}")
    target = plan.base.target.open(torch.device(device), getattr(torch, plan.base.dtype))
    cells, absent = plan.cells(target)
    scribe = Scribe(target, private_batches(plan.base, target, examples), key, device)
    records = {cell: record for cell in cells if (record := scribe.finished(folder, cell)) is not None}
    if records:
        display.say(f"{len(records)} of {len(cells)} cells are finished already: skipped.")
    left = [cell for cell in cells if cell not in records]
    refused = _attack_all(plan, scribe, left, folder, display, records)
    absent += [Absent(cell.layer, cell.module, reason) for cell, reason in refused.items()]
    if not records:
        raise GradleakError(f"No cell could be attacked. {absent[-1].reason}")
    heat_map = summarise(plan, target, {(cell.layer, cell.module): records[cell] for cell in cells if cell in records}, absent)
    write_map(folder, heat_map)
    return heat_map


def _attack_all(
    plan: MapPlan, scribe: Scribe, cells: Sequence[MapCell], folder: Path, display: Display, records: dict[MapCell, Record]
) -> Mapping[MapCell, str]:
    """Adds the records of these cells as their layers are finished; returns why some have none."""
    if not cells:
        return {}
    attack = MapAttack(plan.base, scribe.target, scribe.private, display)
    layers = together(cells)
    clock = Clock(len(layers))
    for group in layers:
        display.say(f"Layer {group[0].layer}{clock.left()}: {len(group)} views of {len(scribe.private)} batches")
        for cell, outcomes in attack.outcomes(group).items():
            blind = [Outcome(attack.blind[batch], None, None, one.update_norm) for batch, one in enumerate(outcomes)]
            records[cell] = scribe.record(cell, outcomes, blind, attack.peak_memory)
            write_record(folder, records[cell])
        clock.finished += 1
    return attack.refused


def write_map(folder: Path, heat_map: HeatMap) -> None:
    """Writes map.json and heat_map.svg, each whole or not at all."""
    plain = {"schema": SCHEMA, **to_plain(heat_map)}
    write_whole(folder / FILE, json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_whole(folder / PICTURE, svg(heat_map))
