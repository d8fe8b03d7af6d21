"""Errors a person reads: one sentence that says what is wrong, where, and how to fix it."""


class GradleakError(Exception):
    """Something the user can mend. The message is a whole sentence; the exit code is what the
    command returns."""

    exit_code = 2


class RunFailed(GradleakError):
    """Work began and could not be finished; whatever was computed before is on disk."""

    exit_code = 3
