"""A defense of your own, audited beside none: python examples/own_defense.py"""

from collections.abc import Sequence
from dataclasses import dataclass

import gradleak
from gradleak.core.defense import Channel, Defense
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.update import Update


@register("defense", "fixed_step")
@dataclass(frozen=True)
class FixedStep(Defense):
    """Rounds every entry to a multiple of the step size; what is smaller than half a step is
    sent as zero."""

    step_size: float = 0.1

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return update.map(lambda tensor: (tensor / self.step_size).round() * self.step_size)

    def channel(self) -> Channel:
        # So that attacks know how far entries may be off
        return Channel(smallest_step=self.step_size)


for defenses in ([], ["fixed_step"], ["fixed_step:step_size=1.0"]):
    record = gradleak.measure(
        target="tiny", attacks=["dlg:steps=100"], defenses=defenses, limit=4
    ).record
    score = record.worst_case["bag_f1"]
    print(f"defense {' + '.join(defenses) or 'none'}")
    print(f"  bag_f1 {score.mean:.2f} [{score.low:.2f}, {score.high:.2f}], blind {score.blind:.2f}")
    print(f"  flags: {', '.join(flag.name for flag in record.attacks['dlg'].flags)}")
