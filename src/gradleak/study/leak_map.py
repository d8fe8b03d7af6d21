"""Which module of which layer leaks most: one attack on every layer × module (Li, Xu and Dras
2024, Figures 2 to 4)."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from gradleak.audit.client import private_examples
from gradleak.audit.display import Display
from gradleak.audit.opened_priors import open_priors
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.core.prior import PriorSpec
from gradleak.core.specs import to_string
from gradleak.records.files import write_whole
from gradleak.records.plain import to_plain
from gradleak.records.store import check_writable
from gradleak.report.pictures.heat_map import Absent, HeatMap, draw_heat_map
from gradleak.study.cells import Cell
from gradleak.study.grid import by_group_key, run_cells
from gradleak.study.map_cells import MapPlan
from gradleak.study.map_summary import summarise

SCHEMA = "gradleak.map/1"
FILE, PICTURE = "map.json", "heat_map.svg"
LAYER = "layer"


class MapIncomplete(RunFailed):
    """Some cells failed; the map of the others is drawn, and is here."""

    def __init__(self, heat_map: HeatMap, failures: Sequence[str]) -> None:
        Exception.__init__(
            self,
            f"{len(failures)} cells of the map failed; their tracebacks are in"
            f" {', '.join(failures)}.",
        )
        self.heat_map = heat_map


def run_map(
    plan: MapPlan, folder: Path, device: str, display: Display, memory: int | None = None
) -> HeatMap:
    """Attacks the cells that have no record in the folder yet, a layer at a time; then writes
    map.json and heat_map.svg.

    Cells that the attack refuses are absent from the map; where one fails, `MapIncomplete` has the
    map of the others.
    """
    if not isinstance(plan.base.prior, PriorSpec):
        raise GradleakError(
            "A leak map is of text models: audit pictures with --layers and --modules instead."
        )
    check_writable(folder)
    private_examples(plan.base)  # refused now, not after the model is opened
    display.say(f"Opening {to_string(plan.base.target)} on {device}")
    target = plan.base.target.open(torch.device(device), getattr(torch, plan.base.dtype))
    opened = (target, open_priors(plan.base, target))
    cells, absent = plan.cells(target)
    results = run_cells(
        [Cell({LAYER: str(cell.layer), "module": cell.module}, cell.spec) for cell in cells],
        folder,
        device,
        display,
        memory=memory,
        opened=lambda _: opened,
        alike=by_layer,
    )
    records, failures = {}, []
    for cell, result in zip(cells, results, strict=True):
        if result.record is not None:
            records[cell.layer, cell.module] = result.record
            continue
        absent.append(
            Absent(
                cell.layer,
                cell.module,
                result.refusal or f"It failed; the traceback is in {result.failure}.",
            )
        )
        if not result.refusal:
            failures.append(str(result.failure))
    if not records:
        raise (RunFailed if failures else GradleakError)(
            f"No cell could be attacked. {absent[-1].reason}"
        )
    heat_map = summarise(plan, target, records, absent)
    write_map(folder, heat_map)
    if failures:
        raise MapIncomplete(heat_map, failures)
    return heat_map


def by_layer(cell: Cell) -> object:
    """Cells that are attacked in one call: those of one layer.

    A call computes what any of its observations shows, for all of them: a pass goes as deep as the
    deepest part. Cells of one layer share nearly all of it. Cells of two layers would pay for each
    other's.
    """
    return cell.axes[LAYER], by_group_key(cell)


def write_map(folder: Path, heat_map: HeatMap) -> None:
    """Writes map.json and heat_map.svg, each whole or not at all."""
    plain = {"schema": SCHEMA, **to_plain(heat_map)}
    write_whole(
        folder / FILE, json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )
    write_whole(folder / PICTURE, draw_heat_map(heat_map))
