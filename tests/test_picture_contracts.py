"""What every registered component for pictures promises; a new one is checked here without being
told of."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.audit import AuditSpec
from gradleak.audit.client import observe, private_batches
from gradleak.audit.scoring import picture_pairs
from gradleak.core.attack import Attack, Bench, ClientSetting, Reconstruction, TrainableAttack
from gradleak.core.batch import Batch, PrivateBatch, picture_of, pixels_of
from gradleak.core.errors import GradleakError
from gradleak.core.metric import Metric, Pair
from gradleak.core.observation import Fact, Observation
from gradleak.core.prior import PicturePrior
from gradleak.core.registry import list_registered
from gradleak.core.streams import Streams
from gradleak.datasets.made_up import Shapes
from gradleak.priors.picture_priors import load_generator
from gradleak.targets.image_networks import TinyImage
from gradleak.training.picture_models import GeneratorTraining, stack_pictures, train_generator
from gradleak.views import Everything

CPU = torch.device("cpu")
SEARCH = {"steps": 3, "latent_steps": 3, "weight_steps": 2, "restarts": 2}
SHORT = {
    **SEARCH,
    "training_batch": 8,
    "epochs": None,
    "directions": 16,
    "width": 8,
    "learning_rate": 0.001,
}
PLAIN = {
    "target": "tiny_image",
    "data": "shapes:side=8",
    "limit": 2,
    "batch_size": 2,
    "dtype": "float64",
}


def each(kind: str, that: Callable[[Any], bool] = lambda component: True) -> Any:
    components = [cls() for cls in list_registered(kind).values() if cls.medium == "image"]
    kept = [component for component in components if that(component)]
    assert kept
    return pytest.mark.parametrize(kind, kept, ids=lambda component: component.name)


def searches(attack: Attack) -> bool:
    """Whether it looks for pictures by their gradients, under labels it assumes; others learnt
    what gradients mean."""
    return not isinstance(attack, TrainableAttack)


@pytest.fixture(scope="module")
def prior(tmp_path_factory: pytest.TempPathFactory) -> PicturePrior:
    path: Path = tmp_path_factory.mktemp("prior") / "generator.safetensors"
    pictures = stack_pictures(Shapes("public", 8).load(64))
    assert (
        len(
            list(
                train_generator(
                    GeneratorTraining(latents=4, width=4, epochs=1), pictures, path, CPU
                )
            )
        )
        == 1
    )
    opened = load_generator(path)
    opened.network.double()
    return opened


@pytest.fixture(scope="module")
def scene() -> tuple[list[PrivateBatch], list[Observation]]:
    spec = AuditSpec.from_plain(PLAIN)
    target = spec.target.open(CPU, torch.float64)
    private = private_batches(spec, target)
    return private, [observe(spec, target, batch, index) for index, batch in enumerate(private)]


def attacked(
    attack: Attack, observations: Sequence[Observation], prior: PicturePrior
) -> list[Reconstruction]:
    fields = {field.name for field in dataclasses.fields(attack)}
    fields -= {"directions"} if getattr(attack, "raw", False) else set()
    quick = dataclasses.replace(
        attack, **{name: value for name, value in SHORT.items() if name in fields}
    )
    bench = Bench(Streams.root("attacker", 0), prior)
    if isinstance(quick, TrainableAttack):
        first = observations[0]
        setting = ClientSetting(
            TinyImage(), first.target, first.protocol, (), Everything(), first.batch_size
        )
        quick = quick.fit(setting, Shapes("public", 8).load(40), bench)
    return quick.reconstruct(
        [one.limit_to(attack.requires | {Fact.DEFENSE}) for one in observations], bench
    )


@each("attack")
def test_an_attack_guesses_as_many_pictures_as_there_are_and_alone_what_it_guesses_in_company(
    attack: Attack, scene: tuple[list[PrivateBatch], list[Observation]], prior: PicturePrior
) -> None:
    _, observations = scene
    together = attacked(attack, observations, prior)
    assert [len(guess.pictures) for guess in together] == [2, 2]
    for observation, guess in zip(observations, together, strict=True):
        (alone,) = attacked(attack, [observation], prior)
        assert alone.pictures == guess.pictures
        assert alone.loss == (None if guess.loss is None else pytest.approx(guess.loss, rel=1e-6))


@each("attack", searches)
def test_an_objective_is_less_at_the_truth_than_elsewhere(
    attack: Attack, scene: tuple[list[PrivateBatch], list[Observation]]
) -> None:
    private, observations = scene
    truths = [batch.batch for batch in private]
    turned = [Batch.of_pixels(batch.pixels.flip(-1), batch.labels) for batch in truths]
    here, there = attack.objective(observations, truths), attack.objective(observations, turned)
    assert here.shape == there.shape == (2,)
    assert bool((here < there).all())


@each("attack", lambda attack: not searches(attack))
def test_an_attack_that_learns_has_no_objective(
    attack: Attack, scene: tuple[list[PrivateBatch], list[Observation]]
) -> None:
    private, observations = scene
    assert attack.name in ("lti_pictures", "lti_pictures_paper")
    assert attack.objective(observations, [batch.batch for batch in private]) is None


@each("attack", searches)
def test_labels_that_are_not_granted_are_refused_or_read_off_the_update(attack: Attack) -> None:
    with pytest.raises(GradleakError, match=f"{attack.name} requires labels; .*Add --know labels"):
        AuditSpec.from_plain({**PLAIN, "attacks": [attack.name], "know": ["batch_size"]})
    AuditSpec.from_plain(
        {**PLAIN, "attacks": [f"{attack.name}:labels=derived"], "know": ["batch_size"]}
    )


@each("attack", searches)
def test_more_labels_than_can_be_tried_are_refused(attack: Attack, prior: PicturePrior) -> None:
    spec = AuditSpec.from_plain({**PLAIN, "limit": 1, "batch_size": 10})
    target = spec.target.open(CPU, torch.float64)
    observation = observe(spec, target, private_batches(spec, target)[0], 0)
    with pytest.raises(
        GradleakError, match="286 combinations of labels, more than 256: use labels=derived"
    ):
        attacked(dataclasses.replace(attack, labels="enumerate"), [observation], prior)


@each("metric")
def test_the_right_picture_scores_best_and_a_worse_one_worse(metric: Metric) -> None:
    values = pixels_of(Shapes(side=32).load(1)[0].content)  # type: ignore[union-attr]
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(0))
    seen = [picture_of(values + spread * noise) for spread in (0.0, 0.05, 0.3)]
    try:
        right, near, far = metric.values([Pair(seen[0], guess) for guess in seen])
    except GradleakError as error:
        pytest.skip(str(error))  # weights that are not here
    better = (right > near > far) if metric.direction == "higher" else (right < near < far)
    assert better
    assert metric.values([]) == []


def test_pictures_of_a_batch_are_held_against_the_secrets_they_are_nearest_to(
    scene: tuple[list[PrivateBatch], list[Observation]],
) -> None:
    private = scene[0][0]
    secrets = tuple(example.content for example in private.examples)
    pairs = picture_pairs(private, Reconstruction((), pictures=secrets[::-1]))
    assert all(pair.secret == pair.guess for pair in pairs)
    assert picture_pairs(private, Reconstruction((), pictures=secrets[:1]))[1].guess != secrets[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attacks": ["tag"]},
            (
                "tiny_image reads images and the attack tag is for texts: use one of blind, gi_gip,"
                " ig, lti_p"
            ),
        ),
        ({"metrics": ["rouge1"]}, "the metric rouge1 is for texts"),
        ({"data": "canaries"}, "the dataset canaries is for texts"),
        ({"prior": "english"}, "the prior english is for texts"),
        ({"target": "tiny"}, "tiny reads texts and the dataset shapes is for images"),
    ],
)
def test_texts_and_pictures_are_not_mixed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GradleakError, match=message):
        AuditSpec.from_plain({**PLAIN, **changes})
