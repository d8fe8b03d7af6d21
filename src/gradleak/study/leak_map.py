"""Which module of which layer leaks most: one attack on every layer × module (Li, Xu and Dras 2024, Figures 2 to 4)."""

import json
from pathlib import Path

import torch

from gradleak.audit.client import private_examples
from gradleak.audit.display import Display
from gradleak.audit.runner import run_audits
from gradleak.core.errors import GradleakError
from gradleak.core.prior import PriorSpec
from gradleak.core.specs import to_string
from gradleak.records.files import write_whole
from gradleak.records.plain import to_plain
from gradleak.records.store import check_writable
from gradleak.report.heat_map import Absent, HeatMap
from gradleak.report.heat_picture import svg
from gradleak.study.grid import Clock, DataHashes, finished
from gradleak.study.map_cells import MapPlan, together
from gradleak.study.map_summary import summarise

SCHEMA = "gradleak.map/1"
FILE, PICTURE = "map.json", "heat_map.svg"


def run_map(plan: MapPlan, folder: Path, device: str, display: Display, memory: int | None = None) -> HeatMap:
    """Attacks the cells that have no record in the folder yet, a layer at a time; then writes map.json and heat_map.svg."""
    if not isinstance(plan.base.prior, PriorSpec):
        raise GradleakError("A leak map is of text models: audit pictures with --layers and --modules instead.")
    check_writable(folder)
    private_examples(plan.base)  # refused now, not after the model is opened
    display.say(f"Opening {to_string(plan.base.target)} on {device}")
    target = plan.base.target.open(torch.device(device), getattr(torch, plan.base.dtype))
    cells, absent = plan.cells(target)
    data = DataHashes(folder)
    records = {cell: record for cell in cells if (record := finished(folder, cell.spec, data)) is not None}
    if records:
        display.say(f"{len(records)} of {len(cells)} cells are finished already: skipped.")
    layers = together([cell for cell in cells if cell not in records])
    clock = Clock(len(layers))
    for group in layers:
        display.say(f"Layer {group[0].layer}{clock.left()}: {len(group)} views of {plan.base.limit} batches")
        specs = [cell.spec for cell in group]
        done = run_audits(specs, device=device, out=folder, display=display, target=target, memory=memory)
        for cell, result in zip(group, done, strict=True):
            if isinstance(result, GradleakError):
                absent.append(Absent(cell.layer, cell.module, str(result)))
            else:
                records[cell] = result.record
        clock.finished += 1
    if not records:
        raise GradleakError(f"No cell could be attacked. {absent[-1].reason}")
    heat_map = summarise(plan, target, {(cell.layer, cell.module): records[cell] for cell in cells if cell in records}, absent)
    write_map(folder, heat_map)
    return heat_map


def write_map(folder: Path, heat_map: HeatMap) -> None:
    """Writes map.json and heat_map.svg, each whole or not at all."""
    plain = {"schema": SCHEMA, **to_plain(heat_map)}
    write_whole(folder / FILE, json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_whole(folder / PICTURE, svg(heat_map))
