"""What a trade-off compares: settings of defenses, each audited and trained under, all else
alike."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradleak.audit.spec import AuditSpec, read
from gradleak.core.dataset import Dataset
from gradleak.core.defense import Defense
from gradleak.core.errors import GradleakError
from gradleak.core.metric import Metric
from gradleak.core.registry import did_you_mean
from gradleak.datasets import resolve_dataset
from gradleak.metrics import DEFAULT_METRICS
from gradleak.study.cells import Cell
from gradleak.training.finetune import FineTuning

NONE = "none"
UTILITIES = ("mcc", "f1", "accuracy")
CHAINED = re.compile(r"\s+\+\s+")  # spaces on both sides: 1e+3 is a number


@dataclass(frozen=True)
class Setting:
    """Defenses in the order written, with the audit and the training that share them."""

    name: str
    audit: AuditSpec
    training: FineTuning

    @property
    def cell(self) -> Cell:
        return Cell({"defense": self.name}, self.audit)


@dataclass(frozen=True)
class TradeoffPlan:
    """The settings, what they learn from and are judged on, and how leak and utility are read."""

    settings: tuple[Setting, ...]
    train_data: Dataset
    eval_data: Dataset | None
    metric: str
    utility: str
    max_leak: float

    @property
    def base(self) -> AuditSpec:
        return self.settings[0].audit


def plan_tradeoff(
    defenses: Sequence[str],
    audit: Mapping[str, Any],
    training: FineTuning,
    *,
    train_data: str | None = None,
    eval_data: str | None = None,
    metric: str = "rouge1",
    utility: str = "mcc",
    max_leak: float = 0.05,
) -> TradeoffPlan:
    """A trade-off from plain values; what is wrong with any of them is said before anything is
    opened."""
    _refuse_unknown_utility(utility)
    judge = read("metric", metric, Metric)
    if not 0 <= max_leak < float("inf"):
        raise GradleakError(
            "--max-leak is a gain over blind in the metric's own unit, 0 or more (0.05 is 5 %),"
            f" not {max_leak}."
        )
    metrics = [*DEFAULT_METRICS, *([] if judge.name in DEFAULT_METRICS else [judge])]
    base = AuditSpec.from_plain({**audit, "metrics": metrics})
    # No twins
    settings = {
        setting.audit.id: setting
        for setting in (_setting(line, base, training) for line in defenses)
    }
    if not settings:
        raise GradleakError(
            "A trade-off needs settings to compare: add --defense none --defense"
            " gaussian_noise:std=0.01."
        )
    judged = None if eval_data is None else resolve_dataset(eval_data)
    learnt = base.data if train_data is None else resolve_dataset(train_data)
    return TradeoffPlan(tuple(settings.values()), learnt, judged, judge.name, utility, max_leak)


def read_chain(line: str) -> tuple[Defense, ...]:
    """`none`, one defense, or several in turn: `clipping:clip=1 + gaussian_noise:std=0.01`."""
    if line.strip() == NONE:
        return ()
    return tuple(read("defense", one.strip(), Defense) for one in CHAINED.split(line.strip()))


def _setting(line: str, base: AuditSpec, training: FineTuning) -> Setting:
    """Called as it was written: the shortest form would leave out a strength that happens to be
    the default."""
    chain = read_chain(line)
    return Setting(
        " ".join(line.split()), replace(base, defenses=chain), replace(training, defenses=chain)
    )


def _refuse_unknown_utility(utility: str) -> None:
    if utility not in UTILITIES:
        near = did_you_mean(utility, list(UTILITIES))
        raise GradleakError(f"Unknown utility {utility!r}{near} Utilities: {', '.join(UTILITIES)}.")
