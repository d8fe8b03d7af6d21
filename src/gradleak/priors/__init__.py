"""What is likely before any gradient is seen."""

from gradleak.priors import (
    english,
    frequent_words,
    language_model,
    picture_priors,
)
