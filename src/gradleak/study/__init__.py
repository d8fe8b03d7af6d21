"""Many settings: a grid of audits written as YAML, one record a cell; and what is asked of it.

A program does with these functions what the commands do; docs/studies.md has an example.

A study is read (`read_study`) and run in processes of this machine (`run_on`), on a cluster
(`run_on_ray`) or for so many minutes (`fill_minutes`); `read_state` says how far it is. A leak map
(`run_map`), a trade-off (`run_tradeoff`) and tuning (`tune`) make their own cells out of a plan.
`judge` is the gate, `publish_runs` what tables need of public data, and `purge` takes private
contents out.

Each is loaded when it is first asked for, since torch takes seconds and not all of them need it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradleak.study.cells import Cell, Study, read_study
    from gradleak.study.engine import run_on
    from gradleak.study.gate_checks import (
        GateCheck,
        GateFailed,
        judge,
        read_accepted,
        read_bound,
        read_contract,
    )
    from gradleak.study.grid import CellResult, run_cells
    from gradleak.study.leak_and_utility import TradeoffPlan, plan_tradeoff, run_tradeoff
    from gradleak.study.leak_map import MapIncomplete, MapPlan, plan_map, run_map
    from gradleak.study.minutes import Allowance, TimedRun, fill_minutes, read_time
    from gradleak.study.publishing import publish_runs
    from gradleak.study.ray_engine import Cluster, run_on_ray
    from gradleak.study.removal import Purge, plan_purge, purge
    from gradleak.study.state import RunState, read_state
    from gradleak.study.tuning import Effort, Ranked, Tuned, Tuning, plan_tuning, read_range, tune

__all__ = [
    "Allowance",
    "Cell",
    "CellResult",
    "Cluster",
    "Effort",
    "GateCheck",
    "GateFailed",
    "MapIncomplete",
    "MapPlan",
    "Purge",
    "Ranked",
    "RunState",
    "Study",
    "TimedRun",
    "TradeoffPlan",
    "Tuned",
    "Tuning",
    "fill_minutes",
    "judge",
    "plan_map",
    "plan_purge",
    "plan_tradeoff",
    "plan_tuning",
    "publish_runs",
    "purge",
    "read_accepted",
    "read_bound",
    "read_contract",
    "read_range",
    "read_state",
    "read_study",
    "read_time",
    "run_cells",
    "run_map",
    "run_on",
    "run_on_ray",
    "run_tradeoff",
    "tune",
]

_OFFERS = {  # by module, which a test holds to the imports above
    "cells": ("Cell", "Study", "read_study"),
    "engine": ("run_on",),
    "gate_checks": (
        "GateCheck",
        "GateFailed",
        "judge",
        "read_accepted",
        "read_bound",
        "read_contract",
    ),
    "grid": ("CellResult", "run_cells"),
    "leak_and_utility": ("TradeoffPlan", "plan_tradeoff", "run_tradeoff"),
    "leak_map": ("MapIncomplete", "MapPlan", "plan_map", "run_map"),
    "minutes": ("Allowance", "TimedRun", "fill_minutes", "read_time"),
    "publishing": ("publish_runs",),
    "ray_engine": ("Cluster", "run_on_ray"),
    "removal": ("Purge", "plan_purge", "purge"),
    "state": ("RunState", "read_state"),
    "tuning": ("Effort", "Ranked", "Tuned", "Tuning", "plan_tuning", "read_range", "tune"),
}


def __getattr__(name: str) -> Any:
    for module, names in _OFFERS.items():
        if name in names:
            return getattr(importlib.import_module(f"gradleak.study.{module}"), name)
    raise AttributeError(f"module 'gradleak.study' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # so that completion and the site find them too
