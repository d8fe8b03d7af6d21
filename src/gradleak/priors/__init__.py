"""What is likely before any gradient is seen."""

from gradleak.priors import causal_lm, english, frequent_words, mean_picture  # noqa: F401
