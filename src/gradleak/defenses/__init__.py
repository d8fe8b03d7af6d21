"""What clients do to an update before it leaves."""

from gradleak.defenses import gaussian_noise, rounding  # noqa: F401
