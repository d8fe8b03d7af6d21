"""Training: priors over a target's vocabulary, and fine-tuned targets."""
