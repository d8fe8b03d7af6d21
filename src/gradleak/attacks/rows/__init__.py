"""Batches past the width of the model: words by the rows of embeddings, sentences one by one."""

from gradleak.attacks.rows.rows_attack import RowsAttack

__all__ = ["RowsAttack"]
