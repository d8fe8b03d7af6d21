"""One setting, audited: the client is run, attacked and scored, and the result is kept as a
record.

`run_audit` is one setting, `run_audits` several that share a call, `find_record` what an earlier
run has answered; `rescore` adds metrics to a record without attacking again, and `bound_setting`
says what no attack could do.
"""

from gradleak.audit.bounding import bound_setting
from gradleak.audit.rescoring import rescore
from gradleak.audit.runner import Finished, Inputs, find_record, run_audit, run_audits
from gradleak.audit.spec import AuditSpec

__all__ = [
    "AuditSpec",
    "Finished",
    "Inputs",
    "bound_setting",
    "find_record",
    "rescore",
    "run_audit",
    "run_audits",
]
