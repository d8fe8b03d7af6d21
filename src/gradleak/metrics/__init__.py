"""Comparing secrets with guesses: text overlap, tokens, marked secrets, meaning; and which guess belongs to which secret."""

from gradleak.metrics import rouge, secrets, semantic, tokens

__all__ = ["DEFAULT_METRICS", "rouge", "secrets", "semantic", "tokens"]

DEFAULT_METRICS = (
    "rouge1",
    "rouge2",
    "rougeL",
    "rouge1_legacy",
    "rouge2_legacy",
    "rougeL_legacy",
    "exact_match",
    "token_accuracy",
    "bag_f1",
    "secret_recall",
)
