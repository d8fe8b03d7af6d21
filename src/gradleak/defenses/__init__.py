"""What clients do to updates before they leave."""

from gradleak.defenses import clipping_and_noise, few_bits, sparsification
