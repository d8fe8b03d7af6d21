"""gradleak: how much private training data can be rebuilt from the updates federated-learning clients send."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["AuditSpec", "__version__", "measure"]

if TYPE_CHECKING:
    from gradleak.audit import AuditSpec
    from gradleak.audit.runner import Finished


def measure(*, device: str = "cpu", out: str | None = None, **settings: Any) -> "Finished":
    """Audits one setting: `measure(target="minilm", data="canaries", attacks=["tag:steps=500"], limit=2)`."""
    from pathlib import Path

    from gradleak.audit import AuditSpec, run_audit

    return run_audit(AuditSpec.from_plain(settings), device=device, out=None if out is None else Path(out))


def __getattr__(name: str) -> Any:
    if name == "AuditSpec":  # loaded on first use: torch takes seconds to import
        from gradleak.audit import AuditSpec

        return AuditSpec
    raise AttributeError(f"module 'gradleak' has no attribute {name!r}")
