"""What clients do to updates before they leave."""

from gradleak.defenses import clipping_and_noise, differential_privacy, few_bits, sparsification
