"""The engine on convolutional networks, held to the client's own computation."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Knowledge, Observation, Round
from gradleak.core.target import Target
from gradleak.defenses.few_bits import Sign
from gradleak.defenses.sparsification import Pruning
from gradleak.matching import L2L1, Cosine, Distance, SquaredL2, for_observations
from gradleak.matching.factors import thin_factors
from gradleak.matching.kinds import patches
from gradleak.protocols.fedsgd import FedSGD
from gradleak.targets.image_classifier import ImageClassifier
from gradleak.targets.image_networks import TinyImage

SHAPE = (3, 8, 8)
DEFENSES = {"sign": Sign(), "pruning": Pruning()}


def every_kind(norm: nn.Module) -> Target:
    """One of each module that image networks are made of, with odd strides, padding and
    dilation."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=(1, 2)),
        norm,
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, dilation=2, bias=False),
        nn.Sigmoid(),
    )
    width = module.eval()(torch.zeros(1, *SHAPE)).numel()
    return ImageClassifier(
        "odd", nn.Sequential(module, nn.Flatten(), nn.Linear(width, 4)).double().eval(), SHAPE, 4
    )


def fixed_norm() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    norm.running_mean, norm.running_var = torch.linspace(-1, 1, 4), torch.linspace(0.5, 2, 4)
    return norm.eval()


TARGETS = {
    "tiny_image": lambda: TinyImage().open(torch.device("cpu"), torch.float64),
    "group norm": lambda: every_kind(nn.GroupNorm(2, 4)),
    "fixed batch norm": lambda: every_kind(fixed_norm()),
}


def observed(
    target: Target, pixels: torch.Tensor, labels: torch.Tensor, defenses: tuple[object, ...] = ()
) -> Observation:
    update = FedSGD().update(target, Batch.of_pixels(pixels[None], labels[None])).detached_clone()
    return Observation(
        0, (Round(target, update),), Knowledge(labels, None, len(labels), defenses), FedSGD()
    )


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("distance", [Cosine(), SquaredL2(), L2L1()], ids=repr)
@pytest.mark.parametrize("defense", ["none", "sign", "pruning"])
def test_fast_distances_and_slopes_are_those_of_the_simulated_client(
    name: str, distance: Distance, defense: str
) -> None:
    with torch.random.fork_rng(devices=[]):
        target = TARGETS[name]()
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(2, *SHAPE, generator=generator, dtype=torch.float64)
    candidates = torch.rand(
        1, 3, 2, *SHAPE, generator=generator, dtype=torch.float64
    ).requires_grad_()
    labels = torch.tensor([0, 3])
    known = () if defense == "none" else (DEFENSES[defense],)
    observation = observed(target, pixels, labels, known)
    batch = Batch.of_pixels(candidates, labels.expand(1, 3, 2))
    results = [
        for_observations([observation], distance, plain=plain).distances(batch)
        for plain in (False, True)
    ]
    slopes = [torch.autograd.grad(result.sum(), candidates)[0] for result in results]
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-6, atol=1e-9)


def test_batch_norm_in_training_mode_is_refused() -> None:
    with torch.random.fork_rng(devices=[]):
        module = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4)
        )
    with pytest.raises(GradleakError, match="BatchNorm in training mode .*call eval"):
        ImageClassifier("mixing", module, SHAPE, 4)


def test_a_small_matrix_of_full_rank_is_left_whole() -> None:
    assert (
        thin_factors(
            torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        )
        is None
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stride": 2, "padding": 2},
        {"dilation": (2, 1), "padding": (1, 3), "stride": (1, 2)},
        {"padding": "valid"},
    ],
)
def test_patches_are_those_of_torch(fields: dict[str, object]) -> None:
    module = nn.Conv2d(3, 4, kernel_size=(3, 2), **fields)  # type: ignore[arg-type]
    pictures = torch.randn(5, 3, 9, 11, generator=torch.Generator().manual_seed(0))
    padding = 0 if isinstance(module.padding, str) else module.padding
    expected = F.unfold(pictures, module.kernel_size, module.dilation, padding, module.stride).mT
    assert torch.equal(patches(module, pictures), expected)
