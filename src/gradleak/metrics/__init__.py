"""Comparing secrets with guesses: overlap, tokens, marked secrets, meaning, pictures; and which
guess belongs to which secret."""

from gradleak.metrics import pictures, texts

__all__ = [
    "DEFAULT_METRICS",
    "PICTURE_METRICS",
    "pictures",
    "texts",
]

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
PICTURE_METRICS = ("mse", "psnr", "ssim")
