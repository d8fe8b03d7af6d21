"""Training: priors over a target's vocabulary."""
