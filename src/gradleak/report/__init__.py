"""Records drawn for people. Imports records alone, so that reading one needs no torch."""
