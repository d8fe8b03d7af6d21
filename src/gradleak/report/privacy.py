"""What a record's defenses prove, and how large their noise is, in words."""

import math
from collections.abc import Iterable, Iterator
from itertools import groupby

from gradleak.records.schema import GuaranteeRecord, Record

UNEXPLAINED = (
    "not known: the record does not say whether there was no noise or the accountant failed"
)


def write_guarantees(record: Record) -> Iterator[str]:
    """Writes a line for each defense and reading.

    `dp_sgd, one release, per example: ε 4.38 (analytic Gaussian), … at δ 1e-05`. Of a whole run it
    has the sampling rate and the number of steps, as ε holds for these only.
    """
    for (defense, reading), group in groupby(
        record.guarantees, key=lambda one: (one.defense, one.reading)
    ):
        readings = list(group)
        first = readings[0]
        values = ", ".join(write_epsilons(readings))
        against = (
            "" if first.against_server else "; not against the server, which sees updates before it"
        )
        run = _describe_sampling(record, defense) if reading == "whole run" else ""
        yield (
            f"{defense}, {reading}{run}, per {first.protects}: {values} at δ "
            f"{first.delta:g}{against}"
        )


def _describe_sampling(record: Record, defense: str) -> str:
    """Writes ` (q = 0.01, T = 1000)`, or nothing where the spec does not have them."""
    for described in record.spec.get("defenses", []):
        if described.get("name") == defense and {"sampling_rate", "steps"} <= described.keys():
            return f" (q = {described['sampling_rate']:.4g}, T = {described['steps']:,})"
    return ""


def describe_noise(record: Record) -> str | None:
    """Says how large the noise was.

    `1.3 times the norm of what is seen (1.2 to 1.4 over the batches)`
    """
    noise = record.noise
    if noise is None:
        return None
    tensors = [value for value in noise.by_tensor.values() if value is not None]
    spread = (
        f"; by tensor {_write_times(min(tensors))} to {_write_times(max(tensors))} times"
        if len(tensors) > 1
        else ""
    )
    least, most = f"{noise.least:.3g}", f"{noise.most:.3g}"
    over = f" ({least} to {most} over the batches)" if least != most else ""
    return f"{noise.ratio:.3g} times the norm of what is seen{over}{spread}"


def _write_times(value: float) -> str:
    """Writes two figures of a ratio, and large ones out: 0.12, 10,000,000."""
    return f"{value:.2g}" if value < 100 else f"{float(f'{value:.2g}'):,.0f}"


def write_epsilons(readings: Iterable[GuaranteeRecord]) -> Iterator[str]:
    """Writes `ε 4.377 (PRV (Opacus))`, or what it is instead and why.

    Accountants that say the same are named together.
    """
    for said, group in groupby(
        readings, key=lambda one: write_epsilon(one.epsilon, one.epsilon_in_words)
    ):
        yield f"ε {said} ({', '.join(one.accountant for one in group)})"


def write_epsilon(value: float | None, in_words: str) -> str:
    """Writes a finite ε as a number; else in words: infinite or not known, a colon, and why."""
    return f"{value:.4g}" if is_finite(value) else in_words or UNEXPLAINED


def is_finite(value: float | None) -> bool:
    """Whether ε is a number; a file keeps an infinite one as none."""
    return value is not None and math.isfinite(value)
