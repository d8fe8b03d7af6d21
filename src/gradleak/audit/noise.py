"""How large a defense's noise is beside what it hides: the one number by which noise levels of two models can be compared."""

import math
from collections.abc import Sequence
from statistics import median

from gradleak.audit.client import stream_of
from gradleak.audit.spec import AuditSpec
from gradleak.core.batch import PrivateBatch
from gradleak.core.defense import channel_of, protect_in_turn
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.records.schema import NoiseRecord

Ratios = dict[str, float]  # by tensor; under the empty name, of all that is seen
ALL = ""


def noise_ratios(spec: AuditSpec, target: Target, private: PrivateBatch, computed: Update, index: int) -> Ratios:
    """The expected norm of the noise over the norm of what would have been seen without it; nothing where there is no noise."""
    std = channel_of(spec.defenses).noise_std_for(len(private.examples))
    if not std:
        return {}
    stream = stream_of(spec, index)
    quiet = protect_in_turn([defense.without_noise() for defense in spec.defenses], computed, [stream])
    seen = spec.view.show(target, quiet).tensors
    squares = {name: float(tensor.double().square().sum()) for name, tensor in seen.items()}
    entries = {name: tensor[0].numel() for name, tensor in seen.items()}
    ratios = {name: std * math.sqrt(entries[name] / squares[name]) if squares[name] else math.inf for name in seen}
    return ratios | {ALL: std * math.sqrt(sum(entries.values()) / max(sum(squares.values()), 1e-300))}


def noise_record(ratios: Sequence[Ratios]) -> NoiseRecord | None:
    """Over all batches: the median, the least and the most, and each tensor's median."""
    if not ratios or not ratios[0]:
        return None
    overall = [one[ALL] for one in ratios]
    by_tensor = {name: median(one[name] for one in ratios) for name in ratios[0] if name != ALL}
    finite = {name: value if math.isfinite(value) else None for name, value in by_tensor.items()}
    return NoiseRecord(median(overall), min(overall), max(overall), finite, tuple(overall))
