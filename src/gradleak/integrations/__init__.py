"""Where updates come from: hooks on the training loops that people have."""
