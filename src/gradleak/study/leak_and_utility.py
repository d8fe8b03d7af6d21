"""What leaks under each defense against what training under it gives.

Settings of defenses are compared, all else alike: every setting is audited, then a model is trained
under it, and what that is good for is measured.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradleak.audit.client import private_batches, private_examples
from gradleak.audit.spec import AuditSpec, read
from gradleak.core.attack import Display, Progress
from gradleak.core.dataset import Dataset
from gradleak.core.defense import Defense
from gradleak.core.errors import GradleakError, RunFailed, refuse_unknown
from gradleak.core.metric import Metric
from gradleak.core.specs import to_string
from gradleak.core.target import Target
from gradleak.datasets import resolve_dataset
from gradleak.metrics import DEFAULT_METRICS
from gradleak.records.files import RecordError, write_whole
from gradleak.records.judgement import judge_record
from gradleak.records.plain import from_plain, to_plain
from gradleak.records.schema import GuaranteeRecord, Record, now, spec_id
from gradleak.records.settings import worst_values
from gradleak.records.statistics import Interval, measure_gain
from gradleak.records.store import (
    TRAININGS,
    SecretKey,
    check_writable,
    columns_of,
    keyed_hash,
    open_key,
)
from gradleak.report.pictures.tradeoff_chart import Missing, Point, Tradeoff, draw_tradeoff
from gradleak.study.cells import Cell
from gradleak.study.grid import CellResult, Clock, run_cells, write_result
from gradleak.targets.text_classifier import TextClassifier
from gradleak.training.fine_tuning import FineTuning, News, count, guarantees, train
from gradleak.training.material import Lesson, Material, intervals, read_material

NONE = "none"
UTILITIES = ("mcc", "f1", "accuracy")
CHAINED = re.compile(r"\s+\+\s+")  # spaces on both sides: 1e+3 is a number


@dataclass(frozen=True)
class DefenseSetting:
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

    settings: tuple[DefenseSetting, ...]
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
    refuse_unknown("Unknown utility", utility, UTILITIES, "Utilities")
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


def _setting(line: str, base: AuditSpec, training: FineTuning) -> DefenseSetting:
    """Called as it was written: the shortest form would leave out a strength that happens to be
    the default."""
    chain = read_chain(line)
    return DefenseSetting(
        " ".join(line.split()), replace(base, defenses=chain), replace(training, defenses=chain)
    )


UTILITY_SCHEMA = "gradleak.utility/1"
# One example in so many: a tenth of a few hundred would leave intervals that say nothing
HELD_OUT = 3


@dataclass(frozen=True)
class Utility:
    """How a trained target does on the test examples: how often each class (row) was taken for
    each (column)."""

    spec: dict[str, Any]
    counts: tuple[tuple[int, ...], ...]
    # Of the whole run, where it is differential privacy
    guarantees: tuple[GuaranteeRecord, ...] = ()

    @property
    def id(self) -> str:
        return spec_id(self.spec)

    def scores(self) -> dict[str, Interval]:
        """MCC, F1 and accuracy, with intervals over the test examples."""
        return intervals(torch.tensor(self.counts, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class Trainer:
    """Trains under one setting after the other; what all share, and the folder where results are
    kept."""

    plan: TradeoffPlan
    material: Material
    key: SecretKey
    folder: Path
    device: str
    display: Display

    def find(self, setting: DefenseSetting) -> Utility | None:
        """What an earlier run kept of this very training on this very data."""
        path = self._path(setting)
        if not path.exists():
            return None
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RecordError(
                f"{path} is not a whole JSON file ({error}). Delete it and run the same command"
                " again."
            ) from error
        found: Utility = from_plain(Utility, plain, "utility")
        return found

    def train(self, setting: DefenseSetting) -> Utility:
        """Trains from the target as it is opened. A checkpoint an epoch lies in the folder until
        the result does."""
        spec, path = self._spec(setting), self._path(setting)
        unfinished, progress = path.with_suffix(""), Progress()

        def watch(news: News) -> None:
            progress.report(news.step, news.steps, float(news.loss))

        target = classifier(self.plan, self.device)
        with self.display.watch(f"training under {setting.name}", progress):
            train(setting.training, target, self.material, unfinished, watch)
        table = count(target, self.material.evaluation).long().tolist()
        names = " + ".join(to_string(defense) for defense in setting.training.defenses)
        proven = guarantees(setting.training, len(self.material.training))
        utility = Utility(
            spec,
            tuple(map(tuple, table)),
            tuple(GuaranteeRecord(names, **vars(one)) for one in proven),
        )
        write_result(path, UTILITY_SCHEMA, utility, id=utility.id)
        shutil.rmtree(unfinished)  # weights of a trade-off are of no further use, and large
        return utility

    def _path(self, setting: DefenseSetting) -> Path:
        return self.folder / TRAININGS / f"{spec_id(self._spec(setting))}.json"

    def _spec(self, setting: DefenseSetting) -> dict[str, Any]:
        """Every choice that can change the scores; the data by a keyed hash, so that edited data
        is learnt anew."""
        plain: dict[str, Any] = to_plain(asdict(replace(setting.training, defenses=())))
        return {
            **plain,
            **self.material.described,
            "defenses": [to_string(defense) for defense in setting.training.defenses],
            "content": keyed_hash(self.key, self.material.content()),
        }


def classifier(plan: TradeoffPlan, device: str) -> TextClassifier:
    """The target, opened; refused where it is nothing that can be fine-tuned."""
    opened: Target = plan.base.target.open(torch.device(device), torch.float32)
    if not isinstance(opened, TextClassifier):
        raise GradleakError(
            f"{to_string(plan.base.target)} is not a text classifier, which is all that can be"
            " fine-tuned."
        )
    return opened


def material_of(plan: TradeoffPlan, target: TextClassifier) -> Material:
    """What is learnt and judged by; refused where nothing could be learnt or told from it."""
    made = read_material(
        plan.base.target,
        target,
        plan.train_data.load(),
        plan.train_data,
        plan.eval_data,
        plan.settings[0].training.streams,
        HELD_OUT,
    )
    _refuse_one_class(made.training, "training")
    _refuse_one_class(made.evaluation, "test")
    return made


def _refuse_one_class(examples: Sequence[Lesson], called: str) -> None:
    labels = Counter(lesson.label for lesson in examples)
    if len(labels) < 2:
        raise GradleakError(
            f"All {len(examples)} {called} examples have label {next(iter(labels))}, so that"
            " utility cannot be measured: use labelled data of two classes or more (--train-data,"
            " --eval-data)."
        )


SCHEMA = "gradleak.tradeoff/1"
FILE, PICTURE = "tradeoff.json", "tradeoff.svg"
Failures = dict[str, str]  # by the name of a setting, why it has no result


def run_tradeoff(
    plan: TradeoffPlan, folder: Path, device: str, display: Display, memory: int | None = None
) -> Tradeoff:
    """Audits and trains what has no result in the folder yet; then writes tradeoff.json and
    tradeoff.svg."""
    target = classifier(plan, device)
    # Unfit data is refused here, before anything runs
    private_batches(plan.base, target, private_examples(plan.base))
    material = material_of(plan, target)
    check_writable(folder)
    failures: Failures = {}
    results = run_cells(
        [setting.cell for setting in plan.settings], folder, device, display, memory=memory
    )
    audits = _collect_audits(plan, results, failures)
    trainings = _train_all(
        Trainer(plan, material, open_key(folder), folder, device, display), failures
    )
    points = tuple(
        point_of(name, plan.metric, record, trainings[name])
        for name, record in audits.items()
        if name in trainings
    )
    if not points:
        raise RunFailed(
            f"No setting could be both audited and trained. {next(iter(failures.values()))}"
        )
    tradeoff = _whole(plan, material, points, failures)
    weakest = None if tradeoff.weakest is None else tradeoff.weakest.defense
    write_result(folder / FILE, SCHEMA, tradeoff, weakest=weakest)
    write_whole(folder / PICTURE, draw_tradeoff(tradeoff))
    return tradeoff


def _collect_audits(
    plan: TradeoffPlan, results: Sequence[CellResult], failures: Failures
) -> dict[str, Record]:
    """The records of the settings that have one."""
    found = {}
    for setting, result in zip(plan.settings, results, strict=True):
        if result.record is None:
            failures[setting.name] = f"its audit failed; the traceback is in {result.failure}."
        else:
            found[setting.name] = result.record
    return found


def _train_all(trainer: Trainer, failures: Failures) -> dict[str, Utility]:
    """Trains the settings that were not yet; one whose loss runs away has no utility, and the
    others go on."""
    settings = trainer.plan.settings
    found = {
        setting.name: kept for setting in settings if (kept := trainer.find(setting)) is not None
    }
    if found:
        trainer.display.say(
            f"{len(found)} of {len(settings)} settings are trained already: skipped."
        )
    left = [setting for setting in settings if setting.name not in found]
    clock = Clock(len(left))
    for number, setting in enumerate(left, start=1):
        trainer.display.say(
            f"Training {number} of {len(left)}{clock.describe_rest()}: {setting.name}"
        )
        try:
            found[setting.name] = trainer.train(setting)
        except RunFailed as error:
            failures[setting.name] = f"its training failed. {error}"
        clock.finished += 1
    return found


def point_of(name: str, metric: str, record: Record, utility: Utility) -> Point:
    """One setting of the trade-off, from what it left on disk."""
    raised = {flag.name for attack in record.attacks.values() for flag in attack.flags}
    return Point(
        defense=name,
        leak=record.worst_case[metric],
        gain=gain_over_blind(record, metric),
        utility=utility.scores(),
        guarantees=utility.guarantees,
        one_draw="one_draw" in raised,
        audit=record.id,
        training=utility.id,
        judgement=judge_record(record),
    )


def gain_over_blind(record: Record, metric: str) -> Interval:
    """How much more leaks than a blind guess gives away, example by example, in the worst case
    over attacks."""
    direction, attacks = record.worst_case[metric].direction, list(record.attacks.values())
    tried = [(attack, columns_of(attack)) for attack in attacks]
    ours, blind = worst_values(tried, metric, direction)
    # Several draws of one batch are no independent ones
    clusters = [example.batch % record.data.batches for example in attacks[0].examples]
    gain = measure_gain(ours, blind, clusters, direction)
    if gain is None:
        raise GradleakError(f"{metric} applies to none of these examples: choose another --metric.")
    return gain


def _whole(
    plan: TradeoffPlan, material: Material, points: tuple[Point, ...], failures: Failures
) -> Tradeoff:
    base, training = plan.base, plan.settings[0].training
    return Tradeoff(
        created=now(),
        target=to_string(base.target),
        data=to_string(base.data),
        attacks=tuple(to_string(attack) for attack in base.attacks),
        metric=plan.metric,
        utility=plan.utility,
        max_leak=plan.max_leak,
        batches=len(private_examples(base)) // base.batch_size,
        batch_size=base.batch_size,
        draws=base.draws,
        knows=tuple(sorted(str(fact) for fact in base.granted)),
        train_data=to_string(plan.train_data),
        eval_data=material.described["eval_data"],
        training_examples=len(material.training),
        test_examples=len(material.evaluation),
        training={
            name: getattr(training, name)
            for name in ("epochs", "batch_size", "learning_rate", "seed")
        },
        points=points,
        missing=tuple(Missing(name, reason) for name, reason in failures.items()),
    )
