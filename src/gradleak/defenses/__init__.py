"""What clients do to an update before it leaves."""

from gradleak.defenses import (
    central_dp,
    client_dp,
    clipping,
    dp_sgd,
    gaussian_noise,
    masking,
    pruning,
    quantisation,
    rounding,
    sign,
    top_k,
)
