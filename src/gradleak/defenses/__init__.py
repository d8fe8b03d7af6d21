"""What clients do to an update before it leaves."""

from gradleak.defenses import (
    central_dp,
    client_dp,
    clipping,
    dp_sgd,
    gaussian_noise,
    half_precision,
    masking,
    pruning,
    quantisation,
    sign,
    top_k,
)
