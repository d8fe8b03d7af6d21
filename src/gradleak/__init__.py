"""gradleak: how much private training data can be rebuilt from the updates federated-learning
clients send."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Attack",
    "AuditSpec",
    "Batch",
    "Capture",
    "Defense",
    "GradleakError",
    "Metric",
    "Observation",
    "Protocol",
    "Reconstruction",
    "Reconstructions",
    "Record",
    "Target",
    "Update",
    "__version__",
    "capture",
    "measure",
    "observe",
    "reconstruct",
    "score",
]

# Where each name comes from: loaded on first use, since torch takes seconds to import.
HOMES = {
    "Attack": "gradleak.core.attack",
    "AuditSpec": "gradleak.audit",
    "Batch": "gradleak.core.batch",
    "Capture": "gradleak.captures",
    "Defense": "gradleak.core.defense",
    "GradleakError": "gradleak.core.errors",
    "Metric": "gradleak.core.metric",
    "Observation": "gradleak.core.observation",
    "Protocol": "gradleak.core.protocol",
    "Reconstruction": "gradleak.core.attack",
    "Reconstructions": "gradleak.audit.own_guesses",
    "Record": "gradleak.records.schema",
    "Target": "gradleak.core.target",
    "Update": "gradleak.core.update",
    "capture": "gradleak.integrations.pytorch",
    "observe": "gradleak.audit.own_update",
    "reconstruct": "gradleak.audit.own_guesses",
    "score": "gradleak.audit.own_score",
}

if TYPE_CHECKING:
    from pathlib import Path

    from gradleak.audit import AuditSpec
    from gradleak.audit.own_guesses import Reconstructions, reconstruct
    from gradleak.audit.own_score import score
    from gradleak.audit.own_update import observe
    from gradleak.audit.runner import Finished
    from gradleak.captures import Capture
    from gradleak.core.attack import Attack, Reconstruction
    from gradleak.core.batch import Batch
    from gradleak.core.defense import Defense
    from gradleak.core.errors import GradleakError
    from gradleak.core.metric import Metric
    from gradleak.core.observation import Observation
    from gradleak.core.protocol import Protocol
    from gradleak.core.target import Target
    from gradleak.core.update import Update
    from gradleak.integrations.pytorch import capture
    from gradleak.records.schema import Record


def measure(
    target: str = "minilm",
    data: str = "canaries",
    attacks: Sequence[str] = ("portfolio",),
    *,
    limit: int = 4,
    batch_size: int = 1,
    protocol: str = "fedsgd",
    defenses: Sequence[str] = (),
    view: str = "everything",
    know: Sequence[str] = ("labels", "lengths", "batch_size", "defense"),
    prior: str = "auto",
    metrics: Sequence[str] | None = None,
    draws: int = 1,
    seed: int = 0,
    dtype: str = "float32",
    truncate: bool = True,
    device: str = "cpu",
    memory: "str | int | None" = None,
    out: "str | Path | None" = None,
    keep_secrets: bool = False,
) -> "Finished":
    """Audits one setting: `measure("minilm", "canaries", ["tag:steps=500"], limit=2)`. With `out`
    the record is written there.

    Texts that are longer than the model reads are cut as its tokenizer does, or refused without
    `truncate`. `memory` is the most that the process may hold on its device: bytes, or `6GB`.
    """
    from pathlib import Path

    from gradleak.audit import AuditSpec, run_audit
    from gradleak.core.memory import parse_memory

    settings: dict[str, Any] = {
        "target": target,
        "data": data,
        "attacks": list(attacks),
        "limit": limit,
        "batch_size": batch_size,
        "protocol": protocol,
        "defenses": list(defenses),
        "view": view,
        "know": list(know),
        "prior": prior,
        "draws": draws,
        "seed": seed,
        "dtype": dtype,
        "truncate": truncate,
    }
    if metrics is not None:
        settings["metrics"] = list(metrics)
    folder = None if out is None else Path(out)
    most = parse_memory(memory) if isinstance(memory, str) else memory
    return run_audit(
        AuditSpec.from_plain(settings),
        device=device,
        memory=most,
        out=folder,
        keep_secrets=keep_secrets,
    )


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'gradleak' has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(HOMES[name]), name)
    globals()[name] = found  # a package of that name (gradleak.audit, say) does not come between
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
