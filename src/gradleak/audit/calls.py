"""How many batches one call of an attack takes: as many as are foretold to take a minute, since an interruption costs a call."""

from collections.abc import Sequence

from gradleak.core.attack import Attack
from gradleak.core.batch import PrivateBatch
from gradleak.core.target import Target

SECONDS = 60.0  # that a call may be foretold to take
# Operations a second. They are given, not measured, so that the same audit makes the same calls wherever and however often it
# is run: who shares a call changes the last bits of what an attack computes. LAMP on MiniLM does 8e10 on one core with AVX-512
# and 7.5e12 on an H200; older processors half of it.
SPEED = {"cpu": 5e10, "cuda": 1e13}
AT_LEAST = {"cuda": 16}  # a GPU takes about as long for one batch as for some
OPERATIONS = 6  # for a parameter and a position: forward, and twice as many back
POSITIONS_OF_A_PICTURE = 100  # how often a convolution uses a parameter, about
LOOKED_UP = ("word_embedding", "position_embedding")  # parameters that are read, not multiplied with


def batches_in_a_call(attack: Attack, target: Target, private: Sequence[PrivateBatch]) -> int:
    """How many of these batches an attack takes in a minute, by the passes it says it makes; at least one."""
    kind = target.device.type
    operations = attack.passes * OPERATIONS * _multiplied(target) * max(map(_positions, private))
    fit = int(SECONDS * SPEED.get(kind, SPEED["cpu"]) / max(1, operations))
    return max(fit, AT_LEAST.get(kind, 1))


def _multiplied(target: Target) -> int:
    """The parameters that every position is multiplied with."""
    looked_up = set() if target.labels_are_tokens else {part.name for part in target.parts if part.module in LOOKED_UP}
    return sum(value.numel() for name, value in target.parameters.items() if name not in looked_up)


def _positions(private: PrivateBatch) -> int:
    positions = int(private.batch.mask.sum())
    return positions if private.batch.pixels is None else POSITIONS_OF_A_PICTURE * positions
