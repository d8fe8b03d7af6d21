"""How many candidates are scored in one pass."""

from gradleak.attacks.gradient_matching.problems import Rows
from gradleak.matching.chunking import Chunks

TOKENS_AT_ONCE = {"cuda": 200_000, "cpu": 4_000}  # about 40 GB of activations on a GPU; on a CPU larger passes are no faster


def rows_in_passes(rows: Rows, candidates: int) -> Chunks:
    """Pieces of rows whose candidates fit one pass."""
    tokens = rows.mask[0].numel() * candidates
    return Chunks(max(1, TOKENS_AT_ONCE.get(rows.target.device.type, 4_000) // tokens))
