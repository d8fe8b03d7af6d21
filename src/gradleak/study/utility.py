"""What a defense costs: a target trained under it, kept as a table of counts, so that it is
trained once."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradleak.audit.display import Display
from gradleak.core.attack import Progress
from gradleak.core.errors import GradleakError
from gradleak.core.specs import to_string
from gradleak.core.target import Target
from gradleak.records.errors import RecordError
from gradleak.records.files import write_whole
from gradleak.records.plain import from_plain, to_plain
from gradleak.records.schema import GuaranteeRecord, spec_id
from gradleak.records.statistics import Interval
from gradleak.records.store import SecretKey, keyed_hash
from gradleak.study.tradeoff_plan import Setting, TradeoffPlan
from gradleak.targets.text_classifier import TextClassifier
from gradleak.training.finetune import FineTuning, Lesson, Material, News, count, guarantees, train
from gradleak.training.material import read_material
from gradleak.training.scores import intervals

SCHEMA = "gradleak.utility/1"
FOLDER = "training"
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

    def finished(self, setting: Setting) -> Utility | None:
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

    def train(self, setting: Setting) -> Utility:
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
        utility = Utility(
            spec,
            tuple(map(tuple, table)),
            _guarantees(setting.training, len(self.material.training)),
        )
        write_whole(
            path,
            json.dumps(
                {"schema": SCHEMA, "id": utility.id, **to_plain(utility)}, indent=1, allow_nan=False
            )
            + "\n",
        )
        shutil.rmtree(unfinished)  # weights of a trade-off are of no further use, and large
        return utility

    def _path(self, setting: Setting) -> Path:
        return self.folder / FOLDER / f"{spec_id(self._spec(setting))}.json"

    def _spec(self, setting: Setting) -> dict[str, Any]:
        """Every choice that can change the scores; the data by a keyed hash, so that edited data
        is learnt anew."""
        chain = [to_string(defense) for defense in setting.training.defenses]
        plain: dict[str, Any] = to_plain(asdict(replace(setting.training, defenses=())))
        return {
            **plain,
            **self.material.described,
            "defenses": chain,
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
    training = plan.settings[0].training
    examples = plan.train_data.load()
    made = read_material(
        plan.base.target,
        target,
        examples,
        plan.train_data,
        plan.eval_data,
        training.streams,
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


def _guarantees(training: FineTuning, examples: int) -> tuple[GuaranteeRecord, ...]:
    names = " + ".join(to_string(defense) for defense in training.defenses)
    return tuple(
        GuaranteeRecord(
            names,
            one.reading,
            one.protects,
            one.accountant,
            one.epsilon,
            one.delta,
            epsilon_in_words=one.epsilon_in_words,
        )
        for one in guarantees(training, examples)
    )
