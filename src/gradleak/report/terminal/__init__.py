"""Records, runs and maps on a terminal."""
