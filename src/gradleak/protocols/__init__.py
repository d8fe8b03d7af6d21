"""How a private batch becomes what is sent."""

from gradleak.protocols import fedavg, fedsgd
