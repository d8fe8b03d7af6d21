"""How many candidates are scored in one pass."""

from gradleak.attacks.gradient_matching.problems import Rows
from gradleak.matching.chunking import Chunks, fitting

TOKENS_AT_ONCE = {"cuda": 200_000, "cpu": 4_000}  # on a CPU larger passes are no faster
BYTES_A_TOKEN = 200_000  # of activations, gradients of gradients included


def rows_in_passes(rows: Rows, candidates: int) -> Chunks:
    """Pieces of rows whose candidates fit one pass."""
    tokens = rows.mask[0].numel() * candidates
    return Chunks(max(1, fitting(TOKENS_AT_ONCE, rows.target.device, BYTES_A_TOKEN) // tokens))
