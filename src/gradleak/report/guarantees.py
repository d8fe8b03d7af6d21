"""What a record's defenses prove, in lines of a terminal."""

from collections.abc import Iterator
from itertools import groupby

from gradleak.records.schema import GuaranteeRecord, Record


def guarantee_lines(record: Record) -> Iterator[str]:
    """One line a defense and reading: `dp_sgd, one release, per example: ε 4.38 (analytic Gaussian), … at δ 1e-05`."""
    for (defense, reading), group in groupby(record.guarantees, key=lambda one: (one.defense, one.reading)):
        readings = list(group)
        first = readings[0]
        values = ", ".join(f"ε {epsilon(one)} ({one.accountant})" for one in readings)
        against = "" if first.against_server else "; not against the server, which sees updates before it"
        yield f"{defense}, {reading}, per {first.protects}: {values} at δ {first.delta:g}{against}"


def noise_line(record: Record) -> str | None:
    """How large the noise was: `Noise: 1.3 times the norm of what is seen (1.2 to 1.4 over the batches)`."""
    noise = record.noise
    if noise is None:
        return None
    tensors = [value for value in noise.by_tensor.values() if value is not None]
    spread = f"; by tensor {min(tensors):.2g} to {max(tensors):.2g} times" if len(tensors) > 1 else ""
    over = f" ({noise.least:.3g} to {noise.most:.3g} over the batches)" if noise.most > noise.least else ""
    return f"Noise: {noise.ratio:.3g} times the norm of what is seen{over}{spread}"


def epsilon(one: GuaranteeRecord) -> str:
    """A finite ε, or that there is none; an infinite one is kept as none in a file."""
    return "none" if one.epsilon is None or one.epsilon == float("inf") else f"{one.epsilon:.4g}"
