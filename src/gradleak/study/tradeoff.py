"""What leaks under each defense against what training under it gives: every setting audited,
then trained."""

import json
from collections.abc import Sequence
from pathlib import Path

from gradleak.audit.client import private_batches, private_examples
from gradleak.audit.display import Display
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.core.specs import to_string
from gradleak.records.files import write_whole
from gradleak.records.judgement import judge_record
from gradleak.records.plain import to_plain
from gradleak.records.schema import Record, now
from gradleak.records.settings import worst_values
from gradleak.records.statistics import Interval, paired_difference
from gradleak.records.store import check_writable, open_key
from gradleak.records.summary import columns_of
from gradleak.report.pictures.tradeoff_chart import Missing, Point, Tradeoff, draw_tradeoff
from gradleak.study.grid import CellResult, Clock, run_cells
from gradleak.study.tradeoff_plan import TradeoffPlan
from gradleak.study.utility import Trainer, Utility, classifier, material_of
from gradleak.training.finetune import Material

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
    audits = _audited(plan, results, failures)
    trainings = _train_all(
        Trainer(plan, material, open_key(folder), folder, device, display), failures
    )
    points = tuple(
        point_of(name, plan.metric, audits[name], trainings[name])
        for name in (setting.name for setting in plan.settings)
        if name in audits and name in trainings
    )
    if not points:
        raise RunFailed(
            f"No setting could be both audited and trained. {next(iter(failures.values()))}"
        )
    tradeoff = _whole(plan, material, points, failures)
    write_tradeoff(folder, tradeoff)
    return tradeoff


def _audited(
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
        setting.name: kept
        for setting in settings
        if (kept := trainer.finished(setting)) is not None
    }
    if found:
        trainer.display.say(
            f"{len(found)} of {len(settings)} settings are trained already: skipped."
        )
    left = [setting for setting in settings if setting.name not in found]
    clock = Clock(len(left))
    for number, setting in enumerate(left, start=1):
        trainer.display.say(f"Training {number} of {len(left)}{clock.left()}: {setting.name}")
        try:
            found[setting.name] = trainer.train(setting)
        except RunFailed as error:
            failures[setting.name] = f"its training failed. {error}"
        clock.finished += 1
    return found


def point_of(name: str, metric: str, record: Record, utility: Utility) -> Point:
    """One setting of the trade-off, from what it left on disk."""
    raised = [{flag.name for flag in attack.flags} for attack in record.attacks.values()]
    return Point(
        defense=name,
        leak=record.worst_case[metric],
        gain=gain_over_blind(record, metric),
        utility=utility.scores(),
        guarantees=utility.guarantees,
        one_draw=any("one_draw" in names for names in raised),
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
    pairs = [
        # Several draws of one batch are no independent ones
        (value, without, example.batch % record.data.batches)
        for value, without, example in zip(ours, blind, attacks[0].examples, strict=True)
        if value is not None and without is not None
    ]
    if not pairs:
        raise GradleakError(f"{metric} applies to none of these examples: choose another --metric.")
    first, second, clusters = zip(*pairs, strict=True)
    return (
        paired_difference(first, second, clusters)
        if direction == "higher"
        else paired_difference(second, first, clusters)
    )


def write_tradeoff(folder: Path, tradeoff: Tradeoff) -> None:
    """Writes tradeoff.json and tradeoff.svg, each whole or not at all."""
    weakest = tradeoff.weakest
    plain = {
        "schema": SCHEMA,
        "weakest": None if weakest is None else weakest.defense,
        **to_plain(tradeoff),
    }
    write_whole(
        folder / FILE, json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )
    write_whole(folder / PICTURE, draw_tradeoff(tradeoff))


def _whole(
    plan: TradeoffPlan, material: Material, points: tuple[Point, ...], failures: Failures
) -> Tradeoff:
    base, training = plan.base, plan.settings[0].training
    examples = len(private_examples(base))
    return Tradeoff(
        created=now(),
        target=to_string(base.target),
        data=to_string(base.data),
        attacks=tuple(to_string(attack) for attack in base.attacks),
        metric=plan.metric,
        utility=plan.utility,
        max_leak=plan.max_leak,
        batches=examples // base.batch_size,
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
