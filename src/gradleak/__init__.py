"""gradleak: how much private training data can be rebuilt from the updates federated-learning
clients send."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["AuditSpec", "__version__", "measure"]

if TYPE_CHECKING:
    from pathlib import Path

    from gradleak.audit import AuditSpec
    from gradleak.audit.runner import Finished


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
    if name == "AuditSpec":  # loaded on first use: torch takes seconds to import
        from gradleak.audit import AuditSpec

        return AuditSpec
    raise AttributeError(f"module 'gradleak' has no attribute {name!r}")
