"""What is likely before any gradient is seen."""

from gradleak.priors import english, language_model, picture_priors
