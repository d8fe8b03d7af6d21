"""The time a run was given: read from the command line, counted from its start, ended by an
alarm."""

import contextlib
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from gradleak.core.errors import GradleakError

TIME = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
# Of the time, and in seconds: for what cannot be interrupted, the last words, and Python's own end
# (3 s on a busy machine).
RESERVE, MOST_RESERVE = 1 / 6, 5.0
# Seconds from one ring of the alarm to the next: the first may be swallowed by a destructor
AGAIN = 2.0


def read_time(words: str) -> float:
    """The seconds that `9m`, `90s` or `1h30m` stands for."""
    match = TIME.fullmatch(words.strip())
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise GradleakError(f"Cannot read --for {words!r}: write a time such as 90s, 9m or 1h30m.")
    return float(total)


class TimeIsUp(KeyboardInterrupt):
    """Ends what runs as an interruption by hand does: nothing that goes on after errors goes on
    after this."""


@contextlib.contextmanager
def ring_after(seconds: float) -> Iterator[None]:
    """Raises `TimeIsUp` in the block when so many seconds are over. On Windows, without such
    signals, a cell is never cut."""
    if sys.platform == "win32":
        yield
        return

    def ring(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds), AGAIN)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Allowance:
    """The time there is, from the start of the command on (time.monotonic, which processes of
    one machine share)."""

    began: float
    seconds: float
    clock: Callable[[], float] = time.monotonic
    alarm: Callable[[float], AbstractContextManager[None]] = ring_after

    @property
    def left(self) -> float:
        """Seconds for cells; the reserve is not among them."""
        return self.began + self.seconds - self.reserve - self.clock()

    @property
    def reserve(self) -> float:
        return min(RESERVE * self.seconds, MOST_RESERVE)
