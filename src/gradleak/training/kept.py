"""What fine-tuning keeps on disk: a checkpoint an epoch, and at the end the model with the facts
of its training."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gradleak.core.defense import Guarantee
from gradleak.core.errors import GradleakError
from gradleak.core.specs import to_string
from gradleak.records.files import make_private_folder, write_whole, written_aside
from gradleak.records.plain import to_plain
from gradleak.targets.text_classifier import TextClassifier
from gradleak.training.scores import Scores

if TYPE_CHECKING:
    from gradleak.training.finetune import FineTuning, Material


def facts_of(settings: "FineTuning", material: "Material") -> dict[str, Any]:
    """The settings and sizes of a training, as plain values."""
    sizes = {"examples": len(material.training), "eval_examples": len(material.evaluation)}
    defenses = (
        {"defenses": [to_string(defense) for defense in settings.defenses]}
        if settings.defenses
        else {}
    )
    federation = (
        {"protocol": to_string(settings.protocol), "clients": settings.clients}
        if settings.federated
        else {}
    )
    kept = {
        name: value
        for name, value in vars(settings).items()
        if name not in ("defenses", "protocol", "clients")
    }
    return {**kept, **material.described, **sizes, **defenses, **federation}


def refuse_foreign(out: Path) -> None:
    """Before anything is computed: a model that is there already is never written over."""
    if out.exists() and not out.is_dir():
        raise GradleakError(f"{out} is a file: choose a folder for --out.")
    if (out / "config.json").exists() and not (out / "checkpoint.pt").is_file():
        raise GradleakError(f"{out} already holds a model: choose another --out.")
    make_private_folder(out)  # a model remembers some of what it learnt from


def save_checkpoint(
    out: Path,
    settings: "FineTuning",
    target: TextClassifier,
    material: "Material",
    optimiser: torch.optim.Optimizer,
    epochs_done: int,
) -> None:
    """Writes all that is needed to go on after an epoch, whole or not at all."""
    state = {
        "facts": facts_of(settings, material),
        "content": material.content(),
        "model": target.module.state_dict(),
        "optimiser": optimiser.state_dict(),
        "epochs_done": epochs_done,
    }
    with written_aside(out / "checkpoint.pt") as aside:
        torch.save(state, aside)


def resume(
    out: Path,
    settings: "FineTuning",
    target: TextClassifier,
    material: "Material",
    optimiser: torch.optim.Optimizer,
) -> int:
    """Loads the checkpoint, if there is one; returns the epochs done."""
    if not (out / "checkpoint.pt").is_file():
        return 0
    state = torch.load(out / "checkpoint.pt", map_location="cpu", weights_only=True)
    there, here = state["facts"], facts_of(settings, material)
    differs = [
        f"{name} was {there.get(name)!r} and is {value!r}"
        for name, value in here.items()
        if there.get(name) != value
    ]
    if not differs and state["content"] != material.content():
        differs = ["the examples have changed"]
    if differs:
        raise GradleakError(
            f"{out} holds a checkpoint of other settings ({'; '.join(differs)}): choose another"
            " --out, or remove it."
        )
    target.module.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["epochs_done"])


def save_model(
    out: Path,
    settings: "FineTuning",
    target: TextClassifier,
    material: "Material",
    scores: Scores,
    proven_of_run: Sequence[Guarantee],
) -> None:
    """The model in Hugging Face format, and how it was trained beside it."""
    model: Any = target.module
    model.save_pretrained(out)
    target.tokenizer.save_pretrained(out)
    proven = {"guarantees": [to_plain(one) for one in proven_of_run]} if settings.defenses else {}
    facts = {**facts_of(settings, material), "scores": asdict(scores), **proven}
    write_whole(out / "training.json", json.dumps(facts, indent=1) + "\n")
