"""How many batches go together: as many as memory holds, and as a minute is foretold to suffice
for."""

from collections.abc import Sequence

from gradleak.core.attack import Attack
from gradleak.core.batch import PrivateBatch
from gradleak.core.memory import memory_left
from gradleak.core.target import Target

# Bytes of visible updates held at once on a CPU; attacks take some times as much. Four times this
# was no faster (tag, MiniLM, 32 updates: 98 s of CPU time against 93), and what is held at once is
# lost at once where a run is killed.
UPDATES_IN_MEMORY = 2**30
# Times its updates that an attack holds: as sent, as seen, stacked, as factors and on their way (4
# were measured)
COPIES = 5
SECONDS = 60.0  # that a call may be foretold to take, since an interruption costs a call
# Operations a second. They are given, not measured, so that the same audit makes the same calls
# wherever and however often it is run: who shares a call changes the last bits of what an attack
# computes. LAMP on MiniLM does 8e10 on one core with AVX-512 and 7.5e12 on an H200; older
# processors half of it.
SPEED = {"cpu": 5e10, "cuda": 1e13}
AT_LEAST = {"cuda": 16}  # a GPU takes about as long for one batch as for some
OPERATIONS = 6  # for a parameter and a position: forward, and twice as many back
POSITIONS_OF_A_PICTURE = 100  # how often a convolution uses a parameter, about
# Parameters that are read, not multiplied with
LOOKED_UP = ("word_embedding", "position_embedding")


def batches_in_memory(bytes_each: int, memory: int | None, target: Target) -> int:
    """Returns how many batches fit in memory at once, of which so many bytes are seen each; at
    least one."""
    each, left = max(1, bytes_each), memory_left(memory, target.device)
    if target.device.type == "cuda":
        return max(1, int(left / 4 / each))
    count = max(1, UPDATES_IN_MEMORY // each)
    fits = max(1, int(left / COPIES / each))
    # A power of two: a few bytes change nothing
    return count if fits >= count else 2 ** (fits.bit_length() - 1)


def batches_in_a_call(attack: Attack, target: Target, private: Sequence[PrivateBatch]) -> int:
    """How many of these batches an attack takes in a minute, by the passes it says it makes; at
    least one."""
    kind = target.device.type
    operations = attack.passes * OPERATIONS * _multiplied(target) * max(map(_positions, private))
    fit = int(SECONDS * SPEED.get(kind, SPEED["cpu"]) / max(1, operations))
    return max(fit, AT_LEAST.get(kind, 1))


def _multiplied(target: Target) -> int:
    """The parameters that every position is multiplied with."""
    looked_up = (
        set()
        if target.labels_are_tokens
        else {part.name for part in target.parts if part.module in LOOKED_UP}
    )
    return sum(value.numel() for name, value in target.parameters.items() if name not in looked_up)


def _positions(private: PrivateBatch) -> int:
    positions = int(private.batch.mask.sum())
    return positions if private.batch.pixels is None else POSITIONS_OF_A_PICTURE * positions
