"""One setting, audited: the client is run, attacked and scored, and the result is kept as a
record."""

from gradleak.audit.runner import run_audit
from gradleak.audit.spec import AuditSpec

__all__ = ["AuditSpec", "run_audit"]
