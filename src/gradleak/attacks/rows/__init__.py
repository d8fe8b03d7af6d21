"""Batches past the width of the model: words by the rows of embeddings, sentences one by one."""
