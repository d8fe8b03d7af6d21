"""Every attack gets more out of an update than a guess that does not look at it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch

from gradleak.audit import AuditSpec, run_audit
from gradleak.core.registry import list_registered
from gradleak.datasets.made_up import Shapes
from gradleak.targets.tiny import WORDS
from gradleak.training.picture_models import GeneratorTraining, stack_pictures, train_generator

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
PAIRS = (
    "my cat",
    "she sold",
    "our doctor",
    "left bank",
    "saw dog",
    "you owes",
    "road bad",
    "moved soon",
)
WORD_BY_WORD = ("cat", "sold", "doctor", "bank", "dog", "salary", "road", "soon")
ON_TEXTS = {"target": "tiny", "data": "texts.csv", "prior": "frequent_words", "metrics": ["rouge1"]}
# What moves embeddings gets to a word in a tenth of the steps that a sentence takes
ON_WORDS = ON_TEXTS | {"data": "words.csv"}
LEARNT = ON_TEXTS | {"data": "pairs.csv", "public": "public.csv", "view": "lamp"}
ON_PICTURES = {"target": "tiny_image", "data": "shapes:side=8", "metrics": ["mse"]}
SHORT_LAMP = "steps=40,starts=8"
LEARNS = "steps=140,training_batch=32,learning_rate=0.008,token_width=64"
FACTORS = f"{LEARNS},features=factors,words=known"
# Under each attack the least with which it is clearly better on these secrets, so that all of them
# take seconds: its fields, and the audit's
SETTINGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bag_of_words": ("steps=4,orders=4,repeats=2,beams=1", ON_TEXTS),
    "dlg": ("steps=240", ON_WORDS),
    "dlg_bert_large": ("steps=100", ON_WORDS),
    "energy": ("restarts=1,sweeps=1,proposals=8", ON_TEXTS),
    "gi_gip": (
        "latent_steps=60,weight_steps=60,restarts=1,variation_weight=0.00001",
        ON_PICTURES | {"prior": "generator"},
    ),
    "ig": ("steps=100,variation_weight=0.001", ON_PICTURES),
    "lamp_bert_large": (SHORT_LAMP, ON_WORDS),
    "lamp_cos": (SHORT_LAMP, ON_WORDS),
    "lamp_l2l1": (SHORT_LAMP, ON_WORDS),
    "lamp_plus": (f"{SHORT_LAMP},polish_rounds=1,word_sweeps=1,word_restarts=0", ON_WORDS),
    "lamp_quick": (f"{SHORT_LAMP},polish_rounds=1", ON_WORDS),
    "lti": (FACTORS, LEARNT),
    "lti_p": (FACTORS, LEARNT),
    "lti_plus": (LEARNS, LEARNT),
    "lti_pictures": (
        "steps=80,training_batch=32,directions=64,width=64,learning_rate=0.002",
        ON_PICTURES,
    ),
    "lti_pictures_paper": (
        "steps=300,epochs=null,training_batch=32,width=64,learning_rate=0.005",
        ON_PICTURES,
    ),
    "partial_gradients": (SHORT_LAMP, ON_WORDS),
    "portfolio": ("steps=0,restarts=1", ON_TEXTS),
    "rows": ("rounds=20,climbs=4", ON_TEXTS),
    "span": ("", ON_TEXTS),
    "span_continuous": ("steps=40,starts=1", ON_TEXTS),
    "tag": ("steps=240", ON_WORDS),
    "tag_bert_large": ("steps=80,learning_rate=0.1", ON_WORDS),
}


def write_texts(path: Path, texts: Sequence[str]) -> None:
    """Writes texts with labels 0 and 1 in turn."""
    rows = "".join(f"{text},{place % 2}\n" for place, text in enumerate(texts))
    path.write_text(f"text,label\n{rows}")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts to attack and to learn from, and a generator of pictures."""
    folder = tmp_path_factory.mktemp("above_blind")
    write_texts(folder / "texts.csv", TEXTS)
    write_texts(folder / "pairs.csv", PAIRS)
    write_texts(folder / "words.csv", WORD_BY_WORD)
    # Every word of the model three times, each time before another: none of the secrets
    words = [word for word in WORDS if word.isalpha()]
    turned = [words[step:] + words[:step] for step in (5, 17, 31)]
    public = [f"{one} {other}" for row in turned for one, other in zip(words, row, strict=True)]
    assert not {*public} & {*PAIRS}
    write_texts(folder / "public.csv", public)
    training = GeneratorTraining(latents=8, width=8, epochs=4)
    pictures, path = stack_pictures(Shapes("public", 8).load(64)), folder / "generator.safetensors"
    assert len(list(train_generator(training, pictures, path, torch.device("cpu")))) == 4
    return folder


def test_every_attack_has_a_setting() -> None:
    assert {*SETTINGS, "blind"} == list_registered("attack").keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_an_attack_is_better_than_blind_by_three_standard_errors(name: str, files: Path) -> None:
    fields, audit = SETTINGS[name]
    plain = {
        field: str(files / value) if str(value).endswith(".csv") else value
        for field, value in audit.items()
    }
    if plain.get("prior") == "generator":
        plain["prior"] = f"generator:path={files / 'generator.safetensors'}"
    plain |= {"attacks": [f"{name}:{fields}" if fields else name], "limit": SECRETS}
    (attack,) = run_audit(AuditSpec.from_plain(plain)).record.attacks.values()
    ((metric, score),) = attack.scores.items()
    sign = 1.0 if score.direction == "higher" else -1.0
    gains = [sign * (one.values[metric] - one.blind_values[metric]) for one in attack.examples]
    assert len(gains) == SECRETS
    assert mean(gains) > 3 * stdev(gains) / math.sqrt(SECRETS)
