"""What a fit belongs to: it is good for one setting, and refused elsewhere."""

import torch

from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.trainable import Setting


def refuse_another(name: str, setting: Setting, observation: Observation) -> None:
    """Refuses what an inverter was not made for, by what differs."""
    target = observation.target
    same = target is setting.target or all(
        path in target.parameters and torch.equal(value, target.parameters[path])
        for path, value in setting.target.parameters.items()
    )
    if not same:
        raise GradleakError(f"This {name} was fitted to another target: fit it to this one.")
    if observation.knows.defenses is not None and observation.knows.defenses != setting.defenses:
        raise GradleakError(f"This {name} was fitted through other defenses: fit it through these.")
    if tuple(observation.update.tensors) != setting.view.visible(setting.target):
        raise GradleakError(f"This {name} was fitted to another view: fit it to this one.")
    if observation.batch_size != setting.batch_size:
        raise GradleakError(
            f"This {name} was fitted to batches of {setting.batch_size}, not of {observation.batch_size}: fit it anew."
        )
