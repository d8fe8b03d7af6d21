"""How a private batch becomes what is sent."""

from gradleak.protocols import fedsgd  # noqa: F401
