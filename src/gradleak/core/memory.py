"""How much memory there is, how much a command may use, and how much it did."""

import ctypes
import ctypes.util
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from gradleak.core.errors import GradleakError

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

# Of what is free when an attack starts, where no limit is given: others live on the machine too
MOST = 0.8
# Of the limit that must be left, or else freed memory is handed back before it is measured again
LEAST = 0.25
SECONDS_BETWEEN_LOOKS = 0.02
PAGE = 4096 if resource is None else resource.getpagesize()  # bytes
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_memory(text: str) -> int:
    """The bytes that `6GB`, `512MB` or `1.5GiB` stand for; an i makes the units powers of 1024."""
    found = SIZE.fullmatch(text.strip())
    amount = 0
    if found is not None and (found[2] or not found[3]):
        base = 1024 if found[3] else 1000
        amount = int(float(found[1]) * base ** " kmgt".index(found[2].lower() or " "))
    if amount <= 0:
        raise GradleakError(
            f"--memory {text!r} is no amount of memory: write for example 6GB, 512MB or 1.5GiB."
        )
    return amount


def in_words(amount: float) -> str:
    """`12 GB`, `1.5 GB` or `300 MB`."""
    if amount >= 1e10:
        return f"{amount / 1e9:.0f} GB"
    return f"{amount / 1e9:.1f} GB" if amount >= 1e9 else f"{amount / 1e6:.0f} MB"


def used_memory(device: torch.device) -> int:
    """The bytes this process holds on a device; zero where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _resident() or 0


def free_memory(device: torch.device) -> int | None:
    """The bytes this process may still take on a device; none where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch has taken and nobody holds is not free to the driver, and is free to us
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    known = [
        amount
        for amount in (_available(), _of_control_group(), _of_address_space())
        if amount is not None
    ]
    return max(0, min(known)) if known else None


def limit_by_default(device: torch.device) -> int | None:
    """What a process may hold in all: what it holds now, and most of what is free."""
    free = free_memory(device)
    return None if free is None else used_memory(device) + int(MOST * free)


def memory_left(limit: int | None, device: torch.device) -> float:
    """The bytes left of a limit on all that this process holds; without a limit most of what is
    free."""
    free = free_memory(device)
    most = float("inf") if free is None else float(free)
    if limit is None:
        return MOST * most
    left = limit - used_memory(device)
    if device.type == "cpu" and left < LEAST * limit:
        _hand_back()  # freed blocks that the allocator keeps count as used otherwise
        left = limit - used_memory(device)
    return max(0.0, min(float(left), most))


@dataclass
class Peak:
    """The most bytes that were held while it was measured; none where the system does not say."""

    bytes: int | None = None


@contextmanager
def measured_peak(device: torch.device) -> Iterator[Peak]:
    """Measures the most that this process holds on the device meanwhile, the model and what was
    there before included.

    On a CPU a thread looks at the process now and then; where the process has never been as large,
    the system knows exactly.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        try:
            yield peak
        finally:
            peak.bytes = int(torch.cuda.max_memory_allocated(device))
        return
    before, ended = _largest_ever(), threading.Event()
    seen = [_resident() or 0]

    def look() -> None:
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            seen[0] = max(seen[0], _resident() or 0)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()
        after = _largest_ever()
        grown = after if after is not None and before is not None and after > before else 0
        peak.bytes = max(seen[0], grown, _resident() or 0) or None


def _resident() -> int | None:
    """Bytes of this process in memory; none where there is no /proc."""
    return _statm(1)


def _statm(column: int) -> int | None:
    """A column of what Linux says of this process, in bytes: 0 its addresses, 1 its memory."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/self/statm").read_bytes().split()[column]) * PAGE
    return None


def _largest_ever() -> int | None:
    """The most bytes this process ever held; none on a system without `resource`."""
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _available() -> int | None:
    """What the system could give without swapping."""
    with suppress(OSError, IndexError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _of_control_group() -> int | None:
    """What a container's limit leaves; both versions of control groups. Cached files do not
    count: they give way."""
    root, own = Path("/sys/fs/cgroup"), ""
    with suppress(OSError):
        own = next(
            (
                line[3:]
                for line in Path("/proc/self/cgroup").read_text().splitlines()
                if line.startswith("0::")
            ),
            "",
        )
    second = ("memory.max", "memory.current", "memory.stat", "inactive_file")
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file")
    for folder, (limit, used, stat, cached) in (
        (root / own.strip("/"), second),
        (root, second),
        (root / "memory", first),
    ):
        with suppress(OSError, ValueError):  # `max` is no number: no limit
            most, now = int((folder / limit).read_text()), int((folder / used).read_text())
            kept = [
                line.split()
                for line in (folder / stat).read_text().splitlines()
                if line.startswith(f"{cached} ")
            ]
            return max(0, most - now + (int(kept[0][1]) if kept else 0))
    return None


def _of_address_space() -> int | None:
    """What `ulimit -v` leaves."""
    held = _statm(0)
    if resource is None or held is None:
        return None
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if most == resource.RLIM_INFINITY else most - held


def _hand_back() -> None:
    """Gives freed memory back to the system, where the C library can."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(ctypes.util.find_library("c")).malloc_trim(0)
