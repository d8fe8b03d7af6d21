"""The directions in which a matrix was surely seen."""

from jaxtyping import Float
from torch import Tensor

from gradleak.core.observation import Observation
from gradleak.matching.rounding import signal_floor
from gradleak.matching.row_factor import row_factor, signal_shares


def sure_directions(
    observation: Observation, matrix: Float[Tensor, "*lead outputs inputs"], std: float
) -> Float[Tensor, "*lead rank inputs"]:
    """Orthogonal rows, each as long as it is sure under errors of that size, at most one a token, padded with zeros."""
    values, right = row_factor(matrix)
    floor = signal_floor(matrix.shape[-1], matrix.dtype)
    shares = signal_shares(values, (matrix.shape[-2], matrix.shape[-1]), std, floor)
    if observation.knows.lengths is not None:
        shares[..., sum(observation.knows.lengths) :] = 0
    most = max(1, int((shares > 0).sum(-1).max()))
    rows: Tensor = (right * shares.sqrt()[..., None])[..., :most, :]
    return rows.to(matrix)
