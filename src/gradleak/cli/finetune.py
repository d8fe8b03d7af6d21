"""`gradleak finetune`: a target trained on a dataset, to be audited afterwards."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.command import AllowPickle, Device, option, resolve_device
from gradleak.core.errors import GradleakError

if TYPE_CHECKING:
    from gradleak.core.dataset import Dataset
    from gradleak.targets.image_classifier import ImageClassifier
    from gradleak.training.fine_tuning import FineTuning, News

SECONDS_BETWEEN_LINES = 2.0


def finetune(
    data: Annotated[
        str, option("Labelled examples: a name or a file, such as cola:selection=all.")
    ],
    out: Annotated[
        Path,
        option("Folder for the model, in Hugging Face format; of pictures, a .safetensors file."),
    ],
    target: Annotated[
        str, option("Model to train: a name, a hub id or a folder. [minilm]")
    ] = "minilm",
    eval_data: Annotated[
        str | None, option("Examples to score it on. [the data's dev split, or a tenth held out]")
    ] = None,
    epochs: Annotated[int, option("Passes over the data. [2]")] = 2,
    batch_size: Annotated[int, option("Examples in a step. [32]")] = 32,
    learning_rate: Annotated[
        float, option("At the first step; falls linearly to zero. [5e-5]")
    ] = 5e-5,
    gradient_noise: Annotated[
        float, option("Standard deviation of noise on every gradient entry. [0]")
    ] = 0.0,
    defense: Annotated[
        list[str] | None,
        option(
            "On the gradient of every step, as a client would send it; repeat for a chain. [none]"
        ),
    ] = None,
    protocol: Annotated[
        str,
        option(
            "What clients do in a step, such as fedavg:steps=4,learning_rate=0.01, whose own rate"
            " then counts. [fedsgd]"
        ),
    ] = "fedsgd",
    clients: Annotated[
        int, option("Among whom the examples of a step are dealt out. [1]", minimum=1)
    ] = 1,
    limit: Annotated[int | None, option("Batches of examples to read. [all]", minimum=1)] = None,
    seed: Annotated[int, option("Of order, dropout, noise and held-out examples. [0]")] = 0,
    device: Device = "auto",
    allow_pickle: AllowPickle = False,
) -> None:
    """Fine-tunes a target as LAMP's authors did; attack it with gradleak audit --target FOLDER.

    A classifier of pictures is trained by Adam and written as a file: gradleak audit --target
    lenet:weights=FILE. It wants more epochs and a higher learning rate than the defaults, such as
    20 and 0.003. Interrupted, the same command goes on from the last epoch.
    """
    import torch

    from gradleak.audit.spec import read
    from gradleak.core.defense import Defense
    from gradleak.core.protocol import Protocol
    from gradleak.datasets import resolve_dataset
    from gradleak.report.verdict import write_epsilon
    from gradleak.targets import resolve_target
    from gradleak.targets.image_classifier import ImageClassifier
    from gradleak.targets.text_classifier import TextClassifier
    from gradleak.training.fine_tuning import FineTuning, fine_tune, guarantees
    from gradleak.training.material import read_material

    defenses = tuple(read("defense", line, Defense) for line in defense or ())
    steps = read("protocol", protocol, Protocol)
    settings = FineTuning(
        epochs, batch_size, learning_rate, gradient_noise, seed, defenses, steps, clients
    )
    spec, source = resolve_target(target, allow_pickle), resolve_dataset(data)
    judged = None if eval_data is None else resolve_dataset(eval_data)
    opened = spec.open(torch.device(resolve_device(device)))
    if isinstance(opened, ImageClassifier):
        train_on_pictures(
            settings, opened, source, judged, out, None if limit is None else limit * batch_size
        )
        return
    if not isinstance(opened, TextClassifier):
        raise GradleakError(
            f"{target} is neither a text classifier nor one of pictures, which is all that can be"
            " trained."
        )
    training = source.load(None if limit is None else limit * batch_size)
    material = read_material(spec, opened, training, source, judged, settings.streams)
    typer.echo(
        f"{len(material.training)} examples for training, {len(material.evaluation)} for"
        " evaluation",
        err=True,
    )
    if cut := sum(lesson.dropped > 0 for lesson in (*material.training, *material.evaluation)):
        typer.echo(
            f"{cut} of them are longer than the model reads and were truncated as its tokenizer"
            " does",
            err=True,
        )
    scores = fine_tune(settings, opened, material, out, _Printer().show)
    typer.echo(
        f"{out}: MCC {scores.mcc:.4f}, F1 {scores.f1:.4f}, accuracy {scores.accuracy:.4f}, n"
        f" {scores.examples}"
    )
    for one in guarantees(settings, len(material.training)):
        bound, colon, why = write_epsilon(one.epsilon, one.epsilon_in_words).partition(":")
        typer.echo(
            f"ε {bound} per {one.protects} at δ {one.delta:g} over the whole run, by"
            f" {one.accountant}{colon}{why}"
        )


def train_on_pictures(
    settings: "FineTuning",
    target: "ImageClassifier",
    data: "Dataset",
    judged: "Dataset | None",
    out: Path,
    limit: int | None,
) -> None:
    """The same for a classifier of pictures, written as one safetensors file; a tenth is held
    out where nothing is named."""
    from gradleak.training.picture_models import ImageTraining, train_image_classifier

    if settings.defenses or settings.gradient_noise or settings.federated:
        raise GradleakError(
            "Defenses and clients in training are for text classifiers: leave --defense,"
            " --gradient-noise, --protocol and --clients out."
        )
    if out.is_dir() or not out.parent.is_dir():
        raise GradleakError(
            f"{out} must be a file to be written, such as lenet.safetensors, in a folder that is"
            " there."
        )
    examples = data.load(limit)
    held = max(1, len(examples) // 10)
    training, evaluation = (
        (examples, judged.load()) if judged is not None else (examples[held:], examples[:held])
    )
    chosen = ImageTraining(
        settings.epochs, settings.batch_size, settings.learning_rate, settings.seed
    )
    for news in train_image_classifier(chosen, target, training, evaluation, out):
        typer.echo("  ".join(f"{name} {value:.4g}" for name, value in news.items()), err=True)
    typer.echo(f"{out}: accuracy {news['accuracy']:.4f}, n {len(evaluation)}")


class _Printer:
    """A line on standard error every two seconds, and at the end."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def show(self, news: "News") -> None:
        import time

        if time.monotonic() - self._last < SECONDS_BETWEEN_LINES and news.step < news.steps:
            return
        self._last = time.monotonic()
        left = f"{news.seconds_left:.0f} s left"
        typer.echo(
            f"epoch {news.epoch}  step {news.step}/{news.steps}  loss {float(news.loss):.4f} "
            f" {left}",
            err=True,
        )
