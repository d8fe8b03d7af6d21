"""Every attack gets more out of an update than a guess that does not look at it."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch

from gradleak.audit import AuditSpec, run_audit
from gradleak.core.registry import registered
from gradleak.datasets.shapes import Shapes
from gradleak.training.generator import GeneratorTraining, stacked, train_generator

SECRETS = 8
TEXTS = (
    "my cat is red",
    "she sold the house",
    "call our doctor again",
    "he left the bank",
    "they saw a dog",
    "you owes my salary",
    "the road is bad",
    "we moved on friday",
)
ON_TEXTS = {"target": "tiny", "data": "texts.csv", "prior": "frequent_words", "metrics": ["rouge1"]}
LEARNS_TEXTS = ON_TEXTS | {"public": "canaries"}
ON_PICTURES = {"target": "tiny_image", "data": "shapes:side=8", "metrics": ["mse"]}
SHORT_LAMP = "steps=40,starts=8"
LEARNS = "steps=60,training_batch=16,first_width=64,token_width=64"
# Under each attack the least with which it is clearly better on these secrets, so that all of them
# take seconds: a line, and fields of the audit where it needs others
SETTINGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bag_of_words": ("steps=6,orders=16,repeats=4,beams=2", ON_TEXTS),
    "dlg": ("steps=60", ON_TEXTS),
    "dlg_bert_large": ("steps=60", ON_TEXTS),
    "energy": ("restarts=1,sweeps=1,proposals=8", ON_TEXTS),
    "gi_gip": ("latent_steps=30,weight_steps=30,restarts=1", ON_PICTURES | {"prior": "generator"}),
    "ig": ("steps=40", ON_PICTURES),
    "lamp_bert_large": (SHORT_LAMP, ON_TEXTS),
    "lamp_cos": (SHORT_LAMP, ON_TEXTS),
    "lamp_l2l1": (SHORT_LAMP, ON_TEXTS),
    "lamp_plus": (f"{SHORT_LAMP},polish_rounds=1,word_sweeps=1,word_restarts=0", ON_TEXTS),
    "lamp_quick": (f"{SHORT_LAMP},polish_rounds=1", ON_TEXTS),
    "lti": (LEARNS, LEARNS_TEXTS),
    "lti_p": (LEARNS, LEARNS_TEXTS),
    "lti_plus": (LEARNS, LEARNS_TEXTS),
    "lti_pictures": ("steps=60,training_batch=32,directions=64,width=64", ON_PICTURES),
    "lti_pictures_paper": (
        "steps=60,epochs=null,learning_rate=0.001,training_batch=32,width=64",
        ON_PICTURES,
    ),
    "partial_gradients": (SHORT_LAMP, ON_TEXTS),
    "portfolio": ("steps=0,restarts=1", ON_TEXTS),
    "span": ("", ON_TEXTS),
    "span_continuous": ("steps=40,starts=1", ON_TEXTS),
    "tag": ("steps=60", ON_TEXTS),
    "tag_bert_large": ("steps=60", ON_TEXTS),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with eight short texts, and a generator of pictures."""
    folder = tmp_path_factory.mktemp("above_blind")
    rows = "".join(f"{text},{place % 2}\n" for place, text in enumerate(TEXTS))
    (folder / "texts.csv").write_text(f"text,label\n{rows}")
    training = GeneratorTraining(latents=8, width=8, epochs=4)
    pictures, path = stacked(Shapes("public", 8).load(64)), folder / "generator.safetensors"
    assert len(list(train_generator(training, pictures, path, torch.device("cpu")))) == 4
    return folder


def test_every_attack_has_a_setting() -> None:
    assert {*SETTINGS, "blind"} == registered("attack").keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_an_attack_is_better_than_blind_by_three_standard_errors(name: str, files: Path) -> None:
    fields, audit = SETTINGS[name]
    paths = {
        "texts.csv": str(files / "texts.csv"),
        "generator": f"generator:path={files}/generator.safetensors",
    }
    plain = {
        field: paths.get(value, value) if isinstance(value, str) else value
        for field, value in audit.items()
    }
    plain |= {"attacks": [f"{name}:{fields}" if fields else name], "limit": SECRETS}
    (attack,) = run_audit(AuditSpec.from_plain(plain)).record.attacks.values()
    ((metric, score),) = attack.scores.items()
    sign = 1.0 if score.direction == "higher" else -1.0
    gains = [sign * (one.values[metric] - one.blind_values[metric]) for one in attack.examples]
    assert len(gains) == SECRETS
    assert mean(gains) > 3 * stdev(gains) / math.sqrt(SECRETS)
