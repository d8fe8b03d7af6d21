"""What is likely before any gradient is seen."""

from gradleak.priors import frequent_words  # noqa: F401
