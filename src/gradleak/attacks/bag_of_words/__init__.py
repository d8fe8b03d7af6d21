"""Known words, unknown order: what is left to search where the word embeddings' gradient is seen."""
