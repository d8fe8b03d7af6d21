"""What is likely before any gradient is seen."""

from gradleak.priors import (
    causal_lm,
    english,
    frequent_words,
    generator,
    mean_picture,
)
